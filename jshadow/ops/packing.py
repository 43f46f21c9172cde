"""Numbers of a few bits: asymmetric quantisation by groups in 32-bit words (KIVI, arXiv 2402.02750, section 3), and
symmetric quantisation by rows in bytes.
"""

import math
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt, UInt8


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


def scale_dtype(dtype: Any) -> Any:
    """Dtype of the scales of numbers of a dtype: as exact as they are, in no more bytes."""
    return jnp.float32 if jnp.dtype(dtype).itemsize == 4 else jnp.float16


def quantise(x: Float[Array, "*n g"], bits: int) -> Packed:
    """Groups of the last axis in 2**bits steps from their least to their largest number.

    One bit is a case of its own (SpeCache, arXiv 2503.16163, equation 3): a group's two codes stand for the middles of
    its lower and upper half, not for its ends.
    """
    dtype, x = scale_dtype(x.dtype), x.astype(jnp.float32)
    least, most = x.min(axis=-1), x.max(axis=-1)
    steps = 2**bits - 1
    scale = (most - least) / (2 if bits == 1 else steps)
    zero = (3 * least + most) / 4 if bits == 1 else least
    # codes must be those of the numbers that are kept, rounded as they are
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
    """Codes below 2**bits, side by side in 32-bit words."""
    each = 32 // bits
    group = codes.shape[-1]
    missing = -group % each
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    lanes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // each, each)
    return (lanes << (jnp.arange(each, dtype=jnp.uint32) * bits)).sum(axis=-1, dtype=jnp.uint32)


def unpack(words: UInt[Array, "*n w"], group: int, bits: int) -> UInt[Array, "*n g"]:
    """`pack` backwards."""
    each = 32 // bits
    lanes = (words[..., None] >> (jnp.arange(each, dtype=jnp.uint32) * bits)) & jnp.uint32(2**bits - 1)
    return lanes.reshape(*words.shape[:-1], words.shape[-1] * each)[..., :group]


# Bytes

ROW_BITS = {"int8": 8, "int4": 4}


class Scaled(struct.PyTreeNode):
    """Rows of d numbers, each row with a scale of its own.

    Attributes:
        codes: two's complement, uint8 [..., d * bits / 8], in the order of `pack_bytes`.
        scale: the step of a row [..., 1].
    """

    codes: Array
    scale: Array


def pack_bytes(codes: UInt8[Array, "*n d"], bits: int) -> UInt8[Array, "*n w"]:
    """Codes below 2**bits, 8 / bits of them in a byte: byte j has the numbers j, j + w, j + 2 w, ..., the first lowest.

    The numbers of one place in all bytes are neighbours, so that to unpack takes no shuffle.
    """
    width = codes.shape[-1] * bits // 8
    parts = [codes[..., first : first + width] for first in range(0, codes.shape[-1], max(width, 1))]
    packed = jnp.zeros((*codes.shape[:-1], width), jnp.uint8)
    for place, part in enumerate(parts):
        packed |= part << jnp.uint8(place * bits)
    return packed


def unpack_bytes(packed: UInt8[Array, "*n w"], bits: int) -> UInt8[Array, "*n d"]:
    """`pack_bytes` backwards."""
    mask = jnp.uint8(2**bits - 1)
    return jnp.concatenate([packed >> jnp.uint8(shift) & mask for shift in range(0, 8, bits)], axis=-1)


def quantise_rows(x: Float[Array, "*n d"], bits: int, dtype: Any) -> Scaled:
    """Rows of the last axis in whole steps from -(2**(bits - 1) - 1) to as much; scales in `scale_dtype(dtype)`.

    A row of zeros has only zero bytes; of one whose scale there is no number for, what is too large is clipped. d must
    be a multiple of 8 / bits.
    """
    most, x, kind = 2 ** (bits - 1) - 1, x.astype(jnp.float32), scale_dtype(dtype)
    scale = jnp.minimum(jnp.abs(x).max(axis=-1, keepdims=True) / most, float(jnp.finfo(kind).max)).astype(kind)
    step = scale.astype(jnp.float32)  # codes must be those of the scale that is kept, rounded as it is
    codes = jnp.clip(jnp.round(x / jnp.where(step > 0, step, 1)), -most, most).astype(jnp.int8)
    return Scaled(pack_bytes(lax.bitcast_convert_type(codes, jnp.uint8) & jnp.uint8(2**bits - 1), bits), scale)


def row_codes(codes: UInt8[Array, "*n w"], bits: int, dtype: Any) -> Float[Array, "*n d"]:
    """The whole numbers of `Scaled.codes`; exact in every dtype of a model."""
    sign = 2 ** (bits - 1)
    wide = unpack_bytes(codes, bits).astype(jnp.int32)
    return ((wide ^ sign) - sign).astype(dtype)


def dequantise_rows(rows: Scaled, bits: int, dtype: Any) -> Float[Array, "*n d"]:
    """The numbers that the rows stand for, in dtype."""
    return (row_codes(rows.codes, bits, jnp.float32) * rows.scale.astype(jnp.float32)).astype(dtype)


def row_bytes(tokens: int, dim: int, bits: int, dtype: Any) -> int:
    """Bytes of `join_rows` of so many rows of dim numbers."""
    return tokens * (dim * bits // 8 + jnp.dtype(scale_dtype(dtype)).itemsize)


def join_rows(rows: Scaled) -> UInt8[Array, "*n w"]:
    """Rows [..., c, d * bits / 8] with their scales as one row of bytes: the codes of all, then the scales of all."""
    lead = rows.codes.shape[:-2]
    parts = rows.codes, lax.bitcast_convert_type(rows.scale, jnp.uint8)
    return jnp.concatenate([x.reshape(*lead, math.prod(x.shape[len(lead) :])) for x in parts], axis=-1)


def split_rows(joined: UInt8[Array, "*n w"], tokens: int, dtype: Any) -> Scaled:
    """`join_rows` backwards, of `tokens` rows."""
    kind, lead = jnp.dtype(scale_dtype(dtype)), joined.shape[:-1]
    cut = joined.shape[-1] - tokens * kind.itemsize
    scales: Shaped[Array, "..."] = joined[..., cut:].reshape(*lead, tokens, 1, kind.itemsize)
    codes = joined[..., :cut].reshape(*lead, tokens, cut // tokens)
    return Scaled(codes, lax.bitcast_convert_type(scales, kind))
