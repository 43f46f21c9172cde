"""The weights of a projection, plain or as codes with factors, and their products with rows.

The kinds of codes of a kernel [D, F]:

- int8: whole numbers, int8 [D, F], and a float32 factor for each output, [F].
- fp8: numbers of 8 bits with 4 bits of exponent (E4M3), float8_e4m3fn [D, F], and a float32 factor for each output.
- int4: codes from 0 to 15, two to a byte, uint8 [D/2, F]. The inputs form groups of g. Each group of each output has a
  factor and the value of code 0, both bfloat16 [D/g, F]. A code stands for code * factor + value. The g/2 bytes of a
  group lie together. Byte j has input j of the group in its low half and input j + g/2 in its high half.

The kernels of a stack of experts have one more axis in front, and so have their factors.

The kind follows from the dtype of the codes, and g from the shapes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.errors import ConfigError
from pallas_kernels import Stack, tile_products
from pallas_kernels import Tiles as Tiles
from pallas_kernels.choose import run

# The kinds and the dtypes of their codes
KINDS = {"int8": jnp.dtype("int8"), "fp8": jnp.dtype("float8_e4m3fn"), "int4": jnp.dtype("uint8")}
NAMES = ("kernel", "kernel_scale", "kernel_zero")
_GROUP = 32  # most inputs of a group of int4
_FEW = 16  # rows of a product that a GPU computes by a kernel, which unpacks the codes while it multiplies
_BLOCK = 2**22  # how many numbers are unpacked at once


class Weights(NamedTuple):
    """The weights of a projection. Its fields are the arrays of NAMES; see the module.

    Attributes:
        kernel: floating [D, F], or codes.
        scale: the factors, or None for a floating kernel.
        zero: the values of code 0, for int4 alone.
    """

    kernel: Array
    scale: Array | None = None
    zero: Array | None = None

    @property
    def kind(self) -> str | None:
        """One of KINDS, or None for a floating kernel."""
        return next((kind for kind, dtype in KINDS.items() if self.kernel.dtype == dtype), None)

    @classmethod
    def of(cls, named: Mapping[str, Array]) -> "Weights":
        """Return the weights of a projection from its part of a weight tree. Other names are ignored."""
        return cls(named["kernel"], named.get("kernel_scale"), named.get("kernel_zero"))

    def each(self, function: Callable[[Array], Array]) -> "Weights":
        """Return the weights with a function applied to each array."""
        return Weights(*(part if part is None else function(part) for part in self))  # type: ignore[arg-type]

    @property
    def alone(self) -> bool:
        """Whether the kernel lies on one device. It may be a tracer."""
        return jax.typeof(self.kernel).sharding.mesh.size <= 1


def group_of(inputs: int) -> int:
    """Return the inputs of a group of int4: the largest power of two that divides the inputs, at most GROUP.

    Raises:
        ConfigError: the number of inputs is odd.
    """
    if inputs % 2:
        raise ConfigError(f"quantize='int4' packs two inputs into a byte, so their number must be even, got {inputs}")
    return min(_GROUP, inputs & -inputs)


def record_of(kind: str | None, shape: tuple[int, ...], group: int | None = None) -> dict[str, tuple[tuple, Any]]:
    """Return the arrays of the weights of a kernel [*E, D, F]: name -> shape and dtype.

    The names are "kernel", "kernel_scale" and "kernel_zero". The dtype of a plain kernel is None, that of the model.

    Args:
        kind: one of KINDS, or None for a plain kernel.
        shape: the shape of the plain kernel.
        group: inputs of a group of int4. None: those of `group_of`.

    Raises:
        ConfigError: see `group_of`.
    """
    *lead, inputs, features = shape
    if kind is None:
        return {"kernel": (shape, None)}
    if kind != "int4":
        return {"kernel": (shape, KINDS[kind]), "kernel_scale": ((*lead, features), jnp.dtype("float32"))}
    groups = (*lead, inputs // (group or group_of(inputs)), features)
    return {
        "kernel": ((*lead, inputs // 2, features), KINDS[kind]),
        "kernel_scale": (groups, jnp.dtype("bfloat16")),
        "kernel_zero": (groups, jnp.dtype("bfloat16")),
    }


def weights_of(named: Mapping[str, Array], shape: tuple[int, ...], name: str) -> Weights:
    """Return the weights of a projection from its part of a weight tree.

    Args:
        named: the arrays of `record_of`. Other names are ignored. Groups of int4 may have any even size that divides D.
        shape: the shape of the plain kernel.
        name: the projection's name in errors.

    Raises:
        ConfigError: an array is missing, does not belong to the kernel's kind, or has another shape or dtype.
    """
    weights = Weights.of(named)
    group = None
    if weights.kind == "int4" and weights.scale is not None and weights.scale.ndim == len(shape):
        each, rest = divmod(shape[-2], max(1, weights.scale.shape[-2]))
        group = None if rest or each % 2 else each
    wanted = record_of(weights.kind, shape, group)
    for key, x in zip(NAMES, weights, strict=True):
        what = f"params: {name}/{key} of {weights.kind or 'plain'} weights"
        got = "none" if x is None else f"{x.dtype} {list(x.shape)}"
        if key not in wanted:
            if x is not None:
                raise ConfigError(f"{what} must be absent, got {got}")
            continue
        size, dtype = wanted[key]
        if x is None or x.shape != size or not jnp.issubdtype(x.dtype, jnp.floating if dtype is None else dtype):
            told = "floating" if dtype is None else jnp.dtype(dtype).name
            raise ConfigError(f"{what} must be {told} {list(size)}, got {got}")
    return weights


def dequantized(weights: Weights, dtype: jax.typing.DTypeLike) -> Array:
    """Return the kernel [*E, D, F] in a dtype: codes times factors in float32, rounded once."""
    if weights.scale is None:
        return weights.kernel.astype(dtype)
    if weights.zero is None:
        return (weights.kernel.astype(jnp.float32) * weights.scale[..., None, :]).astype(dtype)
    *lead, bytes_, features = weights.kernel.shape
    groups = weights.scale.shape[-2]
    packed = weights.kernel.reshape(*lead, groups, bytes_ // groups, features)
    codes = jnp.concatenate([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-2).astype(jnp.float32)
    scale, zero = (part[..., None, :].astype(jnp.float32) for part in (weights.scale, weights.zero))
    numbers = codes * scale + zero
    return numbers.astype(dtype).reshape(*lead, 2 * bytes_, features)


def product(x: Array, weights: Weights) -> Array:
    """Multiply rows x [..., D] by a kernel [D, F]. Return [..., F] in x's dtype."""
    return scaled(sums(x, weights), weights, x.dtype)


def sums(x: Array, weights: Weights) -> Array:
    """Return the sums of `product` [..., F], before `scaled`.

    The sums of int8 and fp8 are float32, because they may exceed the range of float16 before they are multiplied by
    their factors. On a GPU, few rows are multiplied by codes of fp8 and int4 by a kernel.
    """
    rows = math.prod(x.shape[:-1])
    if weights.kind in ("fp8", "int4") and 0 < rows <= _FEW and weights.alone:
        return run("auto", _few_sums, _sums, x, weights)
    return _sums(x, weights)


def _few_sums(x: Array, weights: Weights, interpret: bool) -> Array:
    rows, packed = x.reshape(-1, x.shape[-1]), weights.zero is not None
    stack = Stack(*weights.each(lambda part: part[None]))
    nothing = jnp.zeros(1, jnp.int32)
    out = tile_products(
        rows,
        stack if packed else stack._replace(scale=None),
        Tiles(nothing, nothing, jnp.full(1, len(rows), jnp.int32)),
        height=len(rows),
        dtype=x.dtype if packed else jnp.float32,
        implementation="interpret" if interpret else "pallas",
    )
    return out.reshape(*x.shape[:-1], -1)


def _sums(x: Array, weights: Weights) -> Array:
    """Compute `sums` in XLA. A kernel of fp8 or int4 is unpacked to x's dtype, some columns at a time."""
    axes, by_outputs = (((x.ndim - 1,), (0,)), ((), ())), weights.scale is not None and weights.zero is None

    def part(some: Weights) -> Array:
        numbers = some.kernel.astype(x.dtype) if some.zero is None else dequantized(some, x.dtype)
        return lax.dot_general(x, numbers, axes, preferred_element_type=jnp.float32 if by_outputs else None)

    features = weights.kernel.shape[-1]
    blocks = min(features, -(-x.shape[-1] * features // _BLOCK))
    # Columns that lie on several devices are not cut.
    if weights.kind in (None, "int8") or blocks <= 1 or not weights.alone:
        return part(weights)
    block = -(-features // blocks)

    def columns(index: Array, out: Array) -> Array:
        start = jnp.minimum(index * block, features - block)  # the last block overlaps the one before it
        some = weights.each(lambda one: lax.dynamic_slice_in_dim(one, start, block, axis=one.ndim - 1))
        return lax.dynamic_update_slice_in_dim(out, part(some), start, axis=x.ndim - 1)

    zeros = jnp.zeros((*x.shape[:-1], features), jnp.float32 if by_outputs else x.dtype)
    return lax.fori_loop(0, blocks, columns, zeros)


def scaled(out: Array, weights: Weights, dtype: jax.typing.DTypeLike) -> Array:
    """Multiply the `sums` of a product by the factors of its outputs, and return them in a dtype."""
    return out if weights.scale is None or weights.zero is not None else (out * weights.scale).astype(dtype)


def grouped_product(x: Array, stack: Weights, tiles: Tiles, height: int, implementation: str = "auto") -> Array:
    """Multiply rows that are sorted by expert by the kernels of their experts.

    Args:
        x: rows [P, D].
        stack: the kernels [E, D, F].
        tiles: the rows of each tile, and its expert.
        height: most rows of a tile.
        implementation: see `pallas_kernels`.

    Returns:
        [P, F] in x's dtype. Rows in no tile may have any value.
    """
    return tile_products(x, Stack(*stack), tiles, height=height, implementation=implementation)
