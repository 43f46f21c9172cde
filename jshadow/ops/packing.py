"""Two ways of quantizing arrays to a few bits.

Groups of numbers are quantized asymmetrically and packed into 32-bit words (KIVI, arXiv 2402.02750, section 3). Rows
are quantized symmetrically and packed into bytes, or into words of 16 bits for chunks of rows. Both layouts are those
of `pallas_kernels.bits`.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int8, UInt, UInt16

from pallas_kernels.bits import join_rows, pack_signed, row_values, scaled_numbers
from pallas_kernels.bits import row_words as row_words
from pallas_kernels.bits import scale_dtype as scale_dtype
from pallas_kernels.bits import split_rows as split_rows


class Packed(struct.PyTreeNode):
    """Quantized groups of g numbers. Code q of a group stands for q * scale + zero.

    Attributes:
        words: packed codes, uint32 [..., n, ceil(g * bits / 32)]. The first code of a word has the lowest bits.
        scale: [..., n], the step of each group.
        zero: [..., n], the value of code 0 of each group.
    """

    words: Array
    scale: Array
    zero: Array


def quantize(x: Float[Array, "*n g"], bits: int) -> Packed:
    """Round each number of a group [..., n, g] to one of 2**bits equally spaced levels.

    The levels reach from the smallest to the largest number of the group. One bit is a special case (SpeCache, arXiv
    2503.16163, equation 3): the two levels are the middles of the lower and the upper half of that range. Scale and
    zero are in `scale_dtype(x.dtype)`.
    """
    dtype, x = scale_dtype(x.dtype), x.astype(jnp.float32)
    least, most = x.min(axis=-1), x.max(axis=-1)
    steps = 2**bits - 1
    scale = (most - least) / (2 if bits == 1 else steps)
    zero = (3 * least + most) / 4 if bits == 1 else least
    # The codes are computed from the stored scale and zero, so that they compensate for the rounding of these two.
    scale, zero = scale.astype(dtype), zero.astype(dtype)
    step, start = scale.astype(jnp.float32)[..., None], zero.astype(jnp.float32)[..., None]
    if bits == 1:
        codes = x >= ((least + most) / 2)[..., None]
    else:
        codes = jnp.clip(jnp.round((x - start) / jnp.where(step > 0, step, 1)), 0, steps)
    return Packed(pack(codes.astype(jnp.uint32), bits), scale, zero)


def dequantize(packed: Packed, group: int, bits: int) -> Float[Array, "*n g"]:
    """Undo `quantize` up to rounding: return the values of the codes, float32 [..., n, g]."""
    codes = unpack(packed.words, group, bits).astype(jnp.float32)
    return codes * packed.scale.astype(jnp.float32)[..., None] + packed.zero.astype(jnp.float32)[..., None]


def words_of(group: int, bits: int) -> int:
    """Return the number of 32-bit words of a group."""
    return -(-group * bits // 32)


def pack(codes: UInt[Array, "*n g"], bits: int) -> UInt[Array, "*n w"]:
    """Pack codes below 2**bits into 32-bit words, the first code in the lowest bits."""
    each = 32 // bits
    group = codes.shape[-1]
    missing = -group % each
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    lanes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // each, each)
    return (lanes << (jnp.arange(each, dtype=jnp.uint32) * bits)).sum(axis=-1, dtype=jnp.uint32)


def unpack(words: UInt[Array, "*n w"], group: int, bits: int) -> UInt[Array, "*n g"]:
    """Undo `pack`: return the `group` codes of each group."""
    each = 32 // bits
    lanes = (words[..., None] >> (jnp.arange(each, dtype=jnp.uint32) * bits)) & jnp.uint32(2**bits - 1)
    return lanes.reshape(*words.shape[:-1], words.shape[-1] * each)[..., :group]


# Rows with a scale

ROW_BITS = {"int8": 8, "int4": 4}


class Scaled(struct.PyTreeNode):
    """Quantized rows of d numbers. Each row has one scale.

    Attributes:
        codes: uint8 [..., d * bits / 8], two's complement codes in the layout of `pallas_kernels.bits`.
        scale: [..., 1], the step of each row.
    """

    codes: Array
    scale: Array


def rounded_rows(x: Float[Array, "*n d"], bits: int, dtype: Any) -> tuple[Int8[Array, "*n d"], Float[Array, "*n 1"]]:
    """Round each row [..., d] to whole multiples of its step, from -(2**(bits - 1) - 1) to 2**(bits - 1) - 1.

    Returns:
        The multiples, and the steps in `scale_dtype(dtype)`. A row of zeros has the step 0. If the step of a row
        exceeds the range of its dtype, the largest step is used and the numbers are clipped.
    """
    most = 2 ** (bits - 1) - 1
    multiples, scale = scaled_rows(x, most, dtype)
    return jnp.round(multiples).astype(jnp.int8), scale


def scaled_rows(x: Float[Array, "*n d"], most: float, dtype: Any) -> tuple[Float[Array, "*n d"], Float[Array, "*n 1"]]:
    """Divide each row [..., d] by a step of its own, so that its numbers lie from -most to most.

    Returns:
        The float32 quotients, and the steps as in `rounded_rows`.
    """
    kind, x = scale_dtype(dtype), x.astype(jnp.float32)
    scale = jnp.minimum(jnp.abs(x).max(axis=-1, keepdims=True) / most, float(jnp.finfo(kind).max)).astype(kind)
    step = scale.astype(jnp.float32)  # the scale as stored, after rounding
    return jnp.clip(x / jnp.where(step > 0, step, 1), -most, most), scale


def quantize_rows(x: Float[Array, "*n d"], bits: int, dtype: Any) -> Scaled:
    """Quantize rows [..., d] as `rounded_rows` does, and pack them into bytes. d must be a multiple of 8 / bits."""
    codes, scale = rounded_rows(x, bits, dtype)
    return Scaled(pack_signed(codes, bits), scale)


def dequantize_rows(rows: Scaled, bits: int, dtype: Any) -> Float[Array, "*n d"]:
    """Undo `quantize_rows` up to rounding: return the values of the codes [..., d] in dtype."""
    return scaled_numbers(rows.codes, rows.scale, bits, dtype)


def quantize_chunks(x: Float[Array, "*n c d"], bits: int, dtype: Any) -> UInt16[Array, "*n w"]:
    """Quantize c rows [..., c, d] as `rounded_rows` does, and pack them into one row of `row_words` words."""
    return join_rows(*rounded_rows(x, bits, dtype), bits)


def dequantize_chunks(words: UInt16[Array, "*n w"], tokens: int, dim: int, bits: int, dtype: Any) -> Array:
    """Undo `quantize_chunks` up to rounding: return the values of the codes [..., tokens, dim] in dtype."""
    return row_values(words, tokens, dim, bits, dtype)
