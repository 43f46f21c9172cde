"""The layout of packed numbers of 8, 4 or 2 bits in bytes or words, and functions that write and read it.

`count` numbers of `bits` bits fill w = count * bits / 8 bytes. Byte j holds the numbers j, j + w, j + 2 w, and so on.
The first of them has the lowest bits. For example, eight 4-bit numbers fill w = 4 bytes: byte 0 holds number 0 in its
low half and number 4 in its high half. A "place" is one of the 8 / bits positions in a byte. The numbers in the same
place of neighboring bytes are neighbors in the row. So a kernel that has loaded a tile of bytes unpacks each place with
one shift, and moves no data between lanes.

A profile (n8, n4, n2) describes a row of numbers of mixed width: n8 numbers of 8 bits, then n4 of 4 bits, then n2 of 2
bits. Each part fills whole bytes.

There are two kinds of codes. A mid-rise code q of b bits stands for (q + 1/2 - 2**(b - 1)) * step. A signed code is a
whole number in two's complement, which is multiplied by a scale.

A packed chunk of c rows with scales is one row of words of 16 bits (uint16), for c tokens of a head:

- The codes of each token in turn. The d codes of a token fill w = d * bits / 16 words, rounded up. Word j holds the
  codes j, j + w, j + 2 w, and so on, from its lowest bits. Codes past d are 0.
- The scale of each token in turn: one word for a float16 scale, two for a float32 scale, the lower half first.
- Zeros up to a multiple of 32 bytes.

A GPU reads memory in sectors of 32 bytes, so no sector is shared by two rows. Across PCIe, one read lies within an
aligned block of 128 bytes. For 8 tokens of width 128 in 4 bits, a row has 544 bytes. Its 512 bytes of codes lie in five
such blocks, or in four if the row begins with a block. Rows that are a multiple of 128 bytes long would always take
four, but 18 % more host memory, which limits the number of requests.

Words are used because Pallas computes the offset of an element in 32 bits, unless an array has more than 2**32 bytes.
With words, offsets fit in an array of any size; see `pallas_kernels.tiles`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BITS = (8, 4, 2)
WORD = 16  # bits of a word
SECTOR = 16  # words that a GPU reads at least at once, 32 bytes
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


# Whole rows of bytes or words. These functions run in XLA only.


def pack_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Pack codes [..., d] below 2**bits. They must fill whole elements of their dtype, which is uint8 or uint16.

    Returns:
        The bytes or words [..., d * bits / 8] or [..., d * bits / 16], in the dtype of the codes.
    """
    width, kind = codes.shape[-1] * bits // (8 * codes.dtype.itemsize), codes.dtype.type
    parts = [codes[..., first : first + width] for first in range(0, codes.shape[-1], max(width, 1))]
    packed = jnp.zeros((*codes.shape[:-1], width), kind)
    for place, part in enumerate(parts):
        packed |= part << kind(place * bits)
    return packed


def unpack_bytes(packed: jax.Array, bits: int) -> jax.Array:
    """Undo `pack_codes` of bytes: turn uint8 bytes [..., w] into uint8 codes [..., w * 8 / bits]."""
    mask = jnp.uint8(2**bits - 1)
    return jnp.concatenate([packed >> jnp.uint8(shift) & mask for shift in range(0, 8, bits)], axis=-1)


def pack_signed(numbers: jax.Array, bits: int) -> jax.Array:
    """Pack int8 whole numbers [..., d] as two's complement codes into uint8 bytes [..., d * bits / 8]."""
    return pack_codes(lax.bitcast_convert_type(numbers, jnp.uint8) & jnp.uint8(2**bits - 1), bits)


def signed_at(packed: jax.Array, place: int, bits: int) -> jax.Array:
    """Return the whole numbers that are in one place of each byte or word, int8 or int16 [..., w].

    `packed` is uint8 or uint16 [..., w]. It holds two's complement codes.

    The right shift of a signed integer keeps the sign. On a CPU this takes half the time of `signed`, which widens each
    code to four bytes.
    """
    size = 8 * packed.dtype.itemsize
    kind = jnp.int8 if size == 8 else jnp.int16
    top = packed << packed.dtype.type(size - bits * (place + 1))
    return lax.bitcast_convert_type(top, kind) >> kind(size - bits)


def unpack_signed(packed: jax.Array, bits: int) -> jax.Array:
    """Return all whole numbers in two's complement codes, int8 [..., w * 8 / bits] or int16 [..., w * 16 / bits].

    `packed` is uint8 or uint16 [..., w].
    """
    places = 8 * packed.dtype.itemsize // bits
    return jnp.concatenate([signed_at(packed, place, bits) for place in range(places)], axis=-1)


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


def scaled_numbers(codes: jax.Array, scale: jax.Array, bits: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Unpack two's complement codes uint8 [..., w] and multiply them by scales [..., 1] in float32.

    Returns:
        [..., w * 8 / bits], rounded to dtype.
    """
    return (unpack_signed(codes, bits).astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)


# Chunks of such rows, as words


def token_words(dim: int, bits: int) -> int:
    """Return the number of words that the codes of one token fill."""
    return -(-dim * bits // WORD)


def row_words(tokens: int, dim: int, bits: int, dtype: jax.typing.DTypeLike) -> int:
    """Return the number of words of a packed chunk of `tokens` rows of `dim` numbers, with scales for `dtype`."""
    words = tokens * (token_words(dim, bits) + jnp.dtype(scale_dtype(dtype)).itemsize // 2)
    return -(-words // SECTOR) * SECTOR


def join_rows(codes: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Pack chunks of c rows of whole numbers and their scales.

    Args:
        codes: int8 [..., c, d], numbers of `bits` bits in two's complement.
        scale: float16 or float32 [..., c, 1].
        bits: bits of a number, 8 or 4.

    Returns:
        uint16 [..., `row_words`].
    """
    *lead, tokens, dim = codes.shape
    width = token_words(dim, bits)
    whole = [(0, 0)] * (len(lead) + 1) + [(0, width * WORD // bits - dim)]
    unsigned = lax.bitcast_convert_type(jnp.pad(codes, whole), jnp.uint8) & jnp.uint8(2**bits - 1)
    packed = pack_codes(unsigned.astype(jnp.uint16), bits).reshape(*lead, tokens * width)
    scales = lax.bitcast_convert_type(scale, jnp.uint16).reshape(*lead, tokens * scale.dtype.itemsize // 2)
    rest = row_words(tokens, dim, bits, scale.dtype) - packed.shape[-1] - scales.shape[-1]
    return jnp.concatenate([packed, scales, jnp.zeros((*lead, rest), jnp.uint16)], axis=-1)


def split_rows(
    joined: jax.Array, tokens: int, dim: int, bits: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Undo `join_rows`.

    Args:
        joined: uint16 [..., `row_words`].
        tokens: rows of a chunk.
        dim: numbers of a row.
        bits: bits of a number, 8 or 4.
        dtype: the dtype whose `scale_dtype` the scales have.

    Returns:
        The whole numbers int16 [..., tokens, dim], and the scales [..., tokens, 1].
    """
    lead, width, kind = joined.shape[:-1], token_words(dim, bits), jnp.dtype(scale_dtype(dtype))
    each, cut = kind.itemsize // 2, tokens * width
    codes = unpack_signed(joined[..., :cut].reshape(*lead, tokens, width), bits)[..., :dim]
    scales = joined[..., cut : cut + tokens * each].reshape(*lead, tokens, 1, *(() if each == 1 else (each,)))
    return codes, lax.bitcast_convert_type(scales, kind)


def row_values(joined: jax.Array, tokens: int, dim: int, bits: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the values of packed chunks: each number times its scale in float32, rounded to dtype.

    The arguments are those of `split_rows`. The result is [..., tokens, dim].
    """
    codes, scale = split_rows(joined, tokens, dim, bits, dtype)
    return (codes.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)
