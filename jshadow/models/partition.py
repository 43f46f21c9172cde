"""Sharding of a model's weights over a mesh. Heads, MLP and vocabulary are split as in Megatron (arXiv 1909.08053)."""

import re
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshadow.errors import ConfigError

# (pattern of the weight's path, axis that is split). All other weights are replicated.
SPLITS = (
    (r"embed/embedding", 0),
    (r"head/kernel", 1),
    (r"layer_\d+/(attention/(q|k|v)|mlp/(gate|up))/kernel", 1),
    (r"layer_\d+/(attention/(q|k|v)|mlp/(gate|up))/(bias|kernel_scale)", 0),
    (r"layer_\d+/(attention/o|mlp/down)/kernel", 0),
)


def check_mesh(mesh: Any) -> Mesh | None:
    """Return a mesh of the same devices whose axes are of JAX's "auto" type, or None for None.

    Raises:
        ConfigError: mesh is neither a Mesh nor None.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}")
    return None if mesh is None else Mesh(mesh.devices, mesh.axis_names)


def sharding_of(mesh: Mesh, path: str, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of the weight at `path`.

    A weight in SPLITS is split over the last axis of the mesh if the size of its split axis is a multiple of that axis.
    All other weights are replicated.
    """
    name = mesh.axis_names[-1]
    for pattern, axis in SPLITS:
        if re.fullmatch(pattern, path) and shape[axis] % mesh.shape[name] == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * axis, name))
    return NamedSharding(mesh, PartitionSpec())
