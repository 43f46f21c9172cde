"""Sharding of a model's weights over a mesh. Heads, MLP and vocabulary are split as in Megatron (arXiv 1909.08053)."""

import re
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig

AXES = ("data", "tp")  # of a mesh: rows, heads; the devices of the last one are neighbors, in one process if they fit
GONE = "; sp, which split the tokens of a prompt, is gone: tp and data replace it"
_LEFT = ("split", "everywhere")  # how left rows of a key code lie on the devices of `tp`

# (pattern of the weight's path, axis that is split). All other weights are replicated.
_SPLITS = (
    (r"embed/embedding", 0),
    (r"head/kernel", 1),
    (r"layer_\d+/(attention/(q|k|v)|mlp/(shared/)?(gate|up))/kernel", 1),
    (r"layer_\d+/(attention/(q|k|v)|mlp/(shared/)?(gate|up))/(bias|kernel_scale)", 0),
    (r"layer_\d+/(attention/o|mlp/(shared/)?down)/kernel", 0),
    (r"layer_\d+/mlp/experts/(gate|up)/kernel", 2),
    (r"layer_\d+/mlp/experts/(down/kernel|(gate|up)/(bias|kernel_scale))", 1),
    (r"layer_\d+/attention/sinks", 0),
)


def check_mesh(mesh: Any) -> Mesh | None:
    """Return a mesh of the same devices with the axes AXES of JAX's "auto" type, or None for None.

    An axis that `mesh` does not have gets size 1.

    Raises:
        ConfigError: mesh is neither a Mesh nor None, or it has an axis that is not one of AXES.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}")
    if not set(mesh.axis_names) <= set(AXES):
        gone = GONE * ("sp" in mesh.axis_names)
        raise ConfigError(f"mesh must have no axes but {AXES}, got {mesh.axis_names}{gone}")
    order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    return Mesh(mesh.devices.transpose(order).reshape([mesh.shape.get(axis, 1) for axis in AXES]), AXES)


def check_left(left: str) -> None:
    """Raise ConfigError unless `left` is one of LEFT."""
    if left not in _LEFT:
        raise ConfigError(f"left must be one of {_LEFT}, got {left!r}")


def check_heads(mesh: Mesh | None, config: ModelConfig) -> None:
    """Raise ConfigError unless the mesh's axis `tp` divides the KV heads of the model."""
    if mesh is not None and config.kv_heads % mesh.shape["tp"]:
        raise ConfigError(f"mesh axis tp must divide the {config.kv_heads} KV heads, got tp={mesh.shape['tp']}")


def sharding_of(mesh: Mesh | AbstractMesh, path: str, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of the weight at `path`.

    A weight in SPLITS is split over `tp` if the size of its split axis is a multiple of that axis. All other weights
    are replicated.
    """
    for pattern, axis in _SPLITS:
        if re.fullmatch(pattern, path) and shape[axis] % mesh.shape["tp"] == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * axis, "tp"))
    return NamedSharding(mesh, PartitionSpec())
