"""Sharding of a model's weights over a mesh. Heads, MLP and vocabulary are split as in Megatron (arXiv 1909.08053)."""

import re
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshadow.errors import ConfigError, check_one_of
from jshadow.models.config import ModelConfig

AXES = ("data", "tp")  # of a mesh: rows, heads; the devices of the last one are neighbors, in one process if they fit
GONE = "; sp, which split the tokens of a prompt, is gone: tp and data replace it"
_LEFT = ("split", "everywhere")  # how left rows of a key code lie on the devices of `tp`

# (pattern of the weight's path, axis that is split). All other weights are replicated.
_SPLITS = (
    (r"embed/embedding", 0),
    (r"head/kernel", -1),
    (
        r"layer_\d+/(attention/(q|k|v|gate)|recurrent/(q|k|v|gate|beta|decay)|mlp/((shared|experts)/)?(gate|up))/"
        r"(bias|kernel|kernel_scale|kernel_zero)",
        -1,
    ),
    (r"layer_\d+/((attention|recurrent)/o|mlp/((shared|experts)/)?down)/kernel", -2),
    (r"layer_\d+/recurrent/((q|k|v)_(taps|biases)|a_log|dt_bias|skip)", -1),
    (r"layer_\d+/attention/sinks", 0),
)
# Factors of groups of inputs (see `jshadow.ops.projections`), with as many axes as their kernel
_GROUPS = r"layer_\d+/((?:attention|recurrent)/o|mlp/((?:shared|(experts))/)?down)/(kernel_scale|kernel_zero)"


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
    check_one_of("left", left, _LEFT)


def check_heads(mesh: Mesh | None, config: ModelConfig) -> None:
    """Raise ConfigError unless the mesh's axis `tp` divides the KV heads, and the key heads of recurrent layers."""
    if mesh is not None and (heads := undivided_heads(config, tp := mesh.shape["tp"])):
        raise ConfigError(f"mesh axis tp must divide the {heads}, got tp={tp}")


def undivided_heads(config: ModelConfig, tp: int) -> str | None:
    """Return the number and the name of heads that `tp` does not divide, or None if there are none."""
    for kind in config.kinds:
        if kind.kv_heads % tp:
            return f"{kind.kv_heads} " + ("KV heads" if kind.mixer == "attention" else "key heads of recurrent layers")
    return None


def sharding_of(mesh: Mesh | AbstractMesh, path: str, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of the weight at `path`.

    A weight in SPLITS is split over `tp` if the size of its split axis is a multiple of that axis. All other weights
    are replicated.

    Raises:
        ConfigError: the groups of inputs of int4 are split, but `tp` does not divide their number.
    """
    splits = mesh.shape["tp"]
    groups = re.fullmatch(_GROUPS, path)
    if groups and len(shape) == (3 if groups[3] else 2):
        if shape[-2] % splits:
            raise ConfigError(f"mesh axis tp must divide the {shape[-2]} groups of {path}, got tp={splits}")
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 2), "tp"))
    for pattern, axis in _SPLITS:
        if re.fullmatch(pattern, path) and shape[axis] % splits == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * (axis % len(shape)), "tp"))
    return NamedSharding(mesh, PartitionSpec())
