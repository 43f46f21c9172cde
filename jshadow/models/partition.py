"""How a model's weights are spread over a mesh: heads, MLP and vocabulary split, as in Megatron (arXiv 1909.08053)."""

import re
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshadow.errors import ConfigError

# Weight path -> which axis is split; the rest is on every device.
SPLITS = (
    (r"embed/embedding", 0),
    (r"head/kernel", 1),
    (r"layer_\d+/(attention/(q|k|v)|mlp/(gate|up))/kernel", 1),
    (r"layer_\d+/(attention/(q|k|v)|mlp/(gate|up))/(bias|kernel_scale)", 0),
    (r"layer_\d+/(attention/o|mlp/down)/kernel", 0),
)


def check_mesh(mesh: Any) -> Mesh | None:
    """The mesh with axes that the compiler shards by itself. Raises ConfigError unless it is a Mesh or None."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}")
    return None if mesh is None else Mesh(mesh.devices, mesh.axis_names)


def sharding_of(mesh: Mesh, path: str, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of the weight at a path: split along the mesh's last axis where that divides it, else replicated."""
    name = mesh.axis_names[-1]
    for pattern, axis in SPLITS:
        if re.fullmatch(pattern, path) and shape[axis] % mesh.shape[name] == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * axis, name))
    return NamedSharding(mesh, PartitionSpec())
