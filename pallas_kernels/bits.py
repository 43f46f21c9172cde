"""The layout of packed numbers of 8, 4 or 2 bits in bytes, and functions that write and read it.

`count` numbers of `bits` bits fill w = count * bits / 8 bytes. Byte j holds the numbers j, j + w, j + 2 w, and so on.
The first of them has the lowest bits. For example, eight 4-bit numbers fill w = 4 bytes: byte 0 holds number 0 in its
low half and number 4 in its high half. A "place" is one of the 8 / bits positions in a byte. The numbers in the same
place of neighboring bytes are neighbors in the row. So a kernel that has loaded a tile of bytes unpacks each place with
one shift, and moves no data between lanes.

A profile (n8, n4, n2) describes a row of numbers of mixed width: n8 numbers of 8 bits, then n4 of 4 bits, then n2 of 2
bits. Each part fills whole bytes.

There are two kinds of codes. A mid-rise code q of b bits stands for (q + 1/2 - 2**(b - 1)) * step. A signed code is a
whole number in two's complement, which is multiplied by a scale.

A packed chunk of rows with scales is one row of bytes: the codes of all rows, then the scales of all rows.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BITS = (8, 4, 2)
Profile = tuple[int, int, int]  # how many numbers of a row have 8, 4 and 2 bits


class Part(NamedTuple):
    """The numbers of a row that have the same number of bits.

    Attributes:
        byte: index of their first byte in the row.
        size: number of bytes that they fill.
        bits: bits of each number.
        column: index of the first number in the unpacked row.
    """

    byte: int
    size: int
    bits: int
    column: int


def parts_of(profile: Profile) -> tuple[Part, ...]:
    """Return the non-empty parts of a row with this profile, in order."""
    byte, column, parts = 0, 0, []
    for count, bits in zip(profile, BITS, strict=True):
        size = count * bits // 8
        if size:
            parts.append(Part(byte, size, bits, column))
        byte, column = byte + size, column + count
    return tuple(parts)


def packed_width(profile: Profile) -> int:
    """Return the number of bytes of a row with this profile."""
    return sum(part.size for part in parts_of(profile))


def whole_bytes(profile: Profile) -> bool:
    """Whether a profile is valid: each part fills whole bytes and the row has at least one number."""
    counts = len(profile) == 3 and min(profile) >= 0 and sum(profile) > 0
    return counts and profile[1] % 2 == profile[2] % 4 == 0


# Numbers in one place of all bytes. These functions run in XLA and inside kernels.


def code_at(packed: jax.Array, place: int, bits: int) -> jax.Array:
    """Return the unsigned codes in one place of the bytes. Bytes and codes are int32 arrays of the same shape."""
    return packed >> (place * bits) & (2**bits - 1)


def middle(codes: jax.Array, bits: int) -> jax.Array:
    """Return the float32 values of mid-rise codes, divided by the step: q + 1/2 - 2**(bits - 1). None of them is 0."""
    return codes.astype(jnp.float32) + (0.5 - 2.0 ** (bits - 1))


def signed(codes: jax.Array, bits: int) -> jax.Array:
    """Return the whole numbers of two's complement codes, int32."""
    sign = 2 ** (bits - 1)
    return (codes.astype(jnp.int32) ^ sign) - sign


# Whole rows of bytes. These functions run in XLA only.


def pack_bytes(codes: jax.Array, bits: int) -> jax.Array:
    """Pack uint8 codes [..., d] below 2**bits into uint8 bytes [..., d * bits / 8]. The codes must fill whole bytes."""
    width = codes.shape[-1] * bits // 8
    parts = [codes[..., first : first + width] for first in range(0, codes.shape[-1], max(width, 1))]
    packed = jnp.zeros((*codes.shape[:-1], width), jnp.uint8)
    for place, part in enumerate(parts):
        packed |= part << jnp.uint8(place * bits)
    return packed


def unpack_bytes(packed: jax.Array, bits: int) -> jax.Array:
    """Undo `pack_bytes`: turn uint8 bytes [..., w] into uint8 codes [..., w * 8 / bits]."""
    mask = jnp.uint8(2**bits - 1)
    return jnp.concatenate([packed >> jnp.uint8(shift) & mask for shift in range(0, 8, bits)], axis=-1)


def pack_signed(numbers: jax.Array, bits: int) -> jax.Array:
    """Pack int8 whole numbers [..., d] as two's complement codes into uint8 bytes [..., d * bits / 8]."""
    return pack_bytes(lax.bitcast_convert_type(numbers, jnp.uint8) & jnp.uint8(2**bits - 1), bits)


def signed_at(packed: jax.Array, place: int, bits: int) -> jax.Array:
    """Return the whole numbers that are in one place of each byte, int8 [..., w].

    `packed` is uint8 [..., w]. Its bytes hold two's complement codes.

    The right shift of a signed byte keeps the sign. On a CPU this takes half the time of `signed`, which widens each
    code to four bytes.
    """
    top = packed << jnp.uint8(8 - bits * (place + 1))
    return lax.bitcast_convert_type(top, jnp.int8) >> jnp.int8(8 - bits)


def unpack_signed(packed: jax.Array, bits: int) -> jax.Array:
    """Undo `pack_signed`: turn uint8 bytes [..., w] into int8 whole numbers [..., w * 8 / bits]."""
    return jnp.concatenate([signed_at(packed, place, bits) for place in range(8 // bits)], axis=-1)


def dequantize(packed: jax.Array, step: jax.Array, profile: Profile) -> jax.Array:
    """Unpack rows of mid-rise codes and multiply them by their steps.

    Args:
        packed: uint8 [..., w], where w is `packed_width(profile)`.
        step: float32, broadcastable to the result.
        profile: how many of the r numbers of a row have 8, 4 and 2 bits.

    Returns:
        float32 [..., r].
    """
    parts = [
        middle(unpack_bytes(packed[..., part.byte : part.byte + part.size], part.bits), part.bits)
        for part in parts_of(profile)
    ]
    return jnp.concatenate(parts, axis=-1) * step


# Rows of signed codes, each with a scale


def scale_dtype(dtype: jax.typing.DTypeLike) -> Any:
    """Return the dtype of the scales for values of `dtype`: float32 if it has four bytes, else float16."""
    return jnp.float32 if jnp.dtype(dtype).itemsize == 4 else jnp.float16


def row_bytes(rows: int, dim: int, bits: int, dtype: jax.typing.DTypeLike) -> int:
    """Return the number of bytes of a packed chunk with `rows` rows of `dim` numbers and one scale for each row."""
    return rows * (dim * bits // 8 + jnp.dtype(scale_dtype(dtype)).itemsize)


def scaled_numbers(codes: jax.Array, scale: jax.Array, bits: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Unpack two's complement codes uint8 [..., w] and multiply them by scales [..., 1] in float32.

    Returns:
        [..., w * 8 / bits], rounded to dtype.
    """
    return (unpack_signed(codes, bits).astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)


def join_rows(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Join codes uint8 [..., c, w] and scales [..., c, 1] of chunks into rows of bytes, uint8 [..., `row_bytes`]."""
    lead = codes.shape[:-2]
    parts = codes, lax.bitcast_convert_type(scale, jnp.uint8)
    return jnp.concatenate([x.reshape(*lead, math.prod(x.shape[len(lead) :])) for x in parts], axis=-1)


def split_rows(joined: jax.Array, rows: int, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Undo `join_rows`: return codes uint8 [..., rows, w] and scales [..., rows, 1] in `scale_dtype(dtype)`."""
    kind, lead = jnp.dtype(scale_dtype(dtype)), joined.shape[:-1]
    cut = joined.shape[-1] - rows * kind.itemsize
    scales = joined[..., cut:].reshape(*lead, rows, 1, kind.itemsize)
    return joined[..., :cut].reshape(*lead, rows, cut // rows), lax.bitcast_convert_type(scales, kind)
