"""Numbers of a few bits, quantised in two ways.

Groups are quantised asymmetrically and packed in 32-bit words (KIVI, arXiv 2402.02750, section 3). Rows are quantised
symmetrically and packed in bytes, in the layout of `pallas_kernels.bits`.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, UInt, UInt8

from pallas_kernels import bits as byte_layout
from pallas_kernels.bits import pack_signed, scaled_numbers
from pallas_kernels.bits import row_bytes as row_bytes
from pallas_kernels.bits import scale_dtype as scale_dtype


class Packed(struct.PyTreeNode):
    """Groups of g numbers along the last axis.

    Attributes:
        words: [..., n, ceil(g * bits / 32)] uint32, the first number in the lowest bits.
        scale: [..., n], the step of a group.
        zero: [..., n], what code 0 stands for.
    """

    words: Array
    scale: Array
    zero: Array


def quantise(x: Float[Array, "*n g"], bits: int) -> Packed:
    """Round each group of the last axis to one of 2**bits levels from its least to its largest number.

    One bit is a special case (SpeCache, arXiv 2503.16163, equation 3): the two codes of a group stand for the middles
    of its lower and its upper half, not for its ends.
    """
    dtype, x = scale_dtype(x.dtype), x.astype(jnp.float32)
    least, most = x.min(axis=-1), x.max(axis=-1)
    steps = 2**bits - 1
    scale = (most - least) / (2 if bits == 1 else steps)
    zero = (3 * least + most) / 4 if bits == 1 else least
    # codes must fit the scale and the zero as they are kept, after rounding
    scale, zero = scale.astype(dtype), zero.astype(dtype)
    step, start = scale.astype(jnp.float32)[..., None], zero.astype(jnp.float32)[..., None]
    if bits == 1:
        codes = x >= ((least + most) / 2)[..., None]
    else:
        codes = jnp.clip(jnp.round((x - start) / jnp.where(step > 0, step, 1)), 0, steps)
    return Packed(pack(codes.astype(jnp.uint32), bits), scale, zero)


def dequantise(packed: Packed, group: int, bits: int) -> Float[Array, "*n g"]:
    """The numbers that the codes stand for, float32 [..., n, g]."""
    codes = unpack(packed.words, group, bits).astype(jnp.float32)
    return codes * packed.scale.astype(jnp.float32)[..., None] + packed.zero.astype(jnp.float32)[..., None]


def words_of(group: int, bits: int) -> int:
    """Words that a group takes."""
    return -(-group * bits // 32)


def pack(codes: UInt[Array, "*n g"], bits: int) -> UInt[Array, "*n w"]:
    """Pack codes below 2**bits side by side in 32-bit words."""
    each = 32 // bits
    group = codes.shape[-1]
    missing = -group % each
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    lanes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // each, each)
    return (lanes << (jnp.arange(each, dtype=jnp.uint32) * bits)).sum(axis=-1, dtype=jnp.uint32)


def unpack(words: UInt[Array, "*n w"], group: int, bits: int) -> UInt[Array, "*n g"]:
    """The reverse of `pack`."""
    each = 32 // bits
    lanes = (words[..., None] >> (jnp.arange(each, dtype=jnp.uint32) * bits)) & jnp.uint32(2**bits - 1)
    return lanes.reshape(*words.shape[:-1], words.shape[-1] * each)[..., :group]


# Bytes

ROW_BITS = {"int8": 8, "int4": 4}


class Scaled(struct.PyTreeNode):
    """Rows of d numbers, each row with a scale of its own.

    Attributes:
        codes: two's complement, uint8 [..., d * bits / 8], in the order of `pallas_kernels.bits`.
        scale: the step of a row [..., 1].
    """

    codes: Array
    scale: Array


def quantise_rows(x: Float[Array, "*n d"], bits: int, dtype: Any) -> Scaled:
    """Round each row of the last axis to whole steps from -(2**(bits - 1) - 1) to 2**(bits - 1) - 1.

    d must be a multiple of 8 / bits. Scales are in `scale_dtype(dtype)`. A row of zeros has only zero bytes. Where a
    row's scale is too large for its dtype, the largest scale is used and the numbers are clipped.
    """
    most, x, kind = 2 ** (bits - 1) - 1, x.astype(jnp.float32), scale_dtype(dtype)
    scale = jnp.minimum(jnp.abs(x).max(axis=-1, keepdims=True) / most, float(jnp.finfo(kind).max)).astype(kind)
    step = scale.astype(jnp.float32)  # codes must fit the scale as it is kept, after rounding
    codes = jnp.clip(jnp.round(x / jnp.where(step > 0, step, 1)), -most, most).astype(jnp.int8)
    return Scaled(pack_signed(codes, bits), scale)


def dequantise_rows(rows: Scaled, bits: int, dtype: Any) -> Float[Array, "*n d"]:
    """The numbers that the rows stand for, in dtype."""
    return scaled_numbers(rows.codes, rows.scale, bits, dtype)


def join_rows(rows: Scaled) -> UInt8[Array, "*n w"]:
    """Rows [..., c, d * bits / 8] with their scales as one row of bytes: the codes of all rows, then all scales."""
    return byte_layout.join_rows(rows.codes, rows.scale)


def split_rows(joined: UInt8[Array, "*n w"], tokens: int, dtype: Any) -> Scaled:
    """The reverse of `join_rows` for `tokens` rows."""
    return Scaled(*byte_layout.split_rows(joined, tokens, dtype))
