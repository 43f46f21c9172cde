"""Numbers of 8, 4 or 2 bits side by side in bytes, as XLA and the kernels take them apart.

`count` numbers of so many bits fill w = count * bits / 8 bytes; byte j has the numbers j, j + w, j + 2 w, ..., the
first in its lowest bits. So the numbers of one place in all bytes are neighbours, and a kernel that has read a tile of
bytes shifts it once for each place: no lane needs what another one has.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BITS = (8, 4, 2)
Profile = tuple[int, int, int]  # numbers of a row in 8, 4 and 2 bits, in this order


class Part(NamedTuple):
    """The numbers of a row that have so many bits.

    Attributes:
        byte: the first of their bytes.
        size: how many bytes they fill.
        bits: of each.
        column: the first of the numbers.
    """

    byte: int
    size: int
    bits: int
    column: int


def parts_of(profile: Profile) -> tuple[Part, ...]:
    """The parts of a row, without those that are empty."""
    byte, column, found = 0, 0, []
    for count, bits in zip(profile, BITS, strict=True):
        size = count * bits // 8
        if size:
            found.append(Part(byte, size, bits, column))
        byte, column = byte + size, column + count
    return tuple(found)


def packed_width(profile: Profile) -> int:
    """Bytes of a row."""
    return sum(part.size for part in parts_of(profile))


def code_at(packed: jax.Array, place: int, bits: int) -> jax.Array:
    """The codes in one place of bytes, both int32."""
    return packed >> (place * bits) & (2**bits - 1)


def middle(codes: jax.Array, bits: int) -> jax.Array:
    """What codes stand for in steps, by a quantiser without a zero (mid-rise): float32 halves."""
    return codes.astype(jnp.float32) + (0.5 - 2.0 ** (bits - 1))


def signed(codes: jax.Array, bits: int) -> jax.Array:
    """The whole numbers of two's complement codes, int32."""
    sign = 2 ** (bits - 1)
    return (codes.astype(jnp.int32) ^ sign) - sign


# In XLA


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The codes in uint8 bytes [..., w], in their order: uint8 [..., w * 8 / bits]."""
    mask = jnp.uint8(2**bits - 1)
    return jnp.concatenate([packed >> jnp.uint8(shift) & mask for shift in range(0, 8, bits)], axis=-1)


def dequantise(packed: jax.Array, step: jax.Array, profile: Profile) -> jax.Array:
    """Float32 [..., r] of mid-rise codes in rows of bytes [..., w], step broadcastable to the result."""
    parts = [
        middle(unpack(packed[..., part.byte : part.byte + part.size], part.bits), part.bits)
        for part in parts_of(profile)
    ]
    return jnp.concatenate(parts, axis=-1) * step
