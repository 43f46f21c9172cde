"""Numbers of 8, 4 or 2 bits side by side in bytes, as XLA and the kernels take them apart.

`count` numbers of so many bits fill w = count * bits / 8 bytes; byte j has the numbers j, j + w, j + 2 w, ..., the
first in its lowest bits. So the numbers of one place in all bytes are neighbours, and a kernel that has read a tile of
bytes shifts it once for each place: no lane needs what another one has.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiles import exact, key_products

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


def signed_at(packed: jax.Array, place: int, bits: int) -> jax.Array:
    """The whole numbers of two's complement codes in one place of uint8 bytes [..., w]: int8 [..., w].

    The shift of a signed byte carries its sign along. That is half the time of `signed` on a CPU, of four bytes each.
    """
    top = packed << jnp.uint8(8 - bits * (place + 1))
    return lax.bitcast_convert_type(top, jnp.int8) >> jnp.int8(8 - bits)


def unpack_signed(packed: jax.Array, bits: int) -> jax.Array:
    """The whole numbers of two's complement codes in uint8 bytes [..., w], in their order: int8 [..., w * 8 / bits]."""
    return jnp.concatenate([signed_at(packed, place, bits) for place in range(8 // bits)], axis=-1)


def dequantise(packed: jax.Array, step: jax.Array, profile: Profile) -> jax.Array:
    """Float32 [..., r] of mid-rise codes in rows of bytes [..., w], step broadcastable to the result."""
    parts = [
        middle(unpack(packed[..., part.byte : part.byte + part.size], part.bits), part.bits)
        for part in parts_of(profile)
    ]
    return jnp.concatenate(parts, axis=-1) * step


def coded_products(packed: jax.Array, right: jax.Array, step: jax.Array, profile: Profile) -> jax.Array:
    """Mid-rise codes in rows of bytes times a matrix, without the numbers that the codes stand for.

    Codes are whole numbers below 256 and so exact in every dtype of a model: the matrix takes the steps, and what
    codes of zero stand for is the same for all rows. On a CPU that is six times as fast as to scale the codes.

    Args:
        packed: uint8 [B, h or 1, t, w], w the width of the profile; of all heads together, or each its own.
        right: floating [B, h, r, d].
        step: float32 [B, r].
        profile: columns in 8, 4 and 2 bits, r in all.

    Returns:
        float32 [B, h, t, d].
    """
    parts = parts_of(profile)
    codes = [unpack(packed[..., part.byte : part.byte + part.size], part.bits) for part in parts]
    zeros = jnp.concatenate([middle(jnp.zeros(part.size * 8 // part.bits), part.bits) for part in parts])
    scaled = (right.astype(jnp.float32) * step[:, None, :, None]).astype(right.dtype)
    numbers = jnp.concatenate(codes, axis=-1).astype(right.dtype)
    options: Any = {"precision": exact(right.dtype), "preferred_element_type": jnp.float32}
    if packed.shape[1] < right.shape[1]:
        found = jnp.einsum("btr,bhrd->bhtd", numbers[:, 0], scaled, **options)
    else:
        found = jnp.einsum("bhtr,bhrd->bhtd", numbers, scaled, **options)
    constant = jnp.einsum("r,bhrd->bhd", zeros, scaled.astype(jnp.float32), precision=exact(jnp.float32))
    return found + constant[:, :, None]


def whole_products(rows: jax.Array, packed: jax.Array, bits: int) -> jax.Array:
    """Rows times packed whole numbers: floating [B, h, R, d] and uint8 [B, h, n, w] to float32 [B, h, R, n].

    Whole numbers of up to seven bits are exact in every dtype of a model.
    """
    return lax.platform_dependent(
        rows, packed, cpu=lambda rows, packed: by_blocks(rows, packed, bits),
        default=lambda rows, packed: wide_products(rows, packed, bits),
    )  # fmt: skip


def wide_products(rows: jax.Array, packed: jax.Array, bits: int) -> jax.Array:
    """By turning all numbers into the dtype of the rows; those of each place apart, which saves a CPU to put them side
    by side."""
    width, found = packed.shape[3], jnp.zeros((), jnp.float32)
    for place in range(8 // bits):
        numbers = signed_at(packed, place, bits).astype(rows.dtype)
        found += key_products(rows[..., place * width : (place + 1) * width], numbers)
    return found


BLOCK = 16_384  # rows, about, whose unpacked numbers stay in a CPU's cache


def by_blocks(rows: jax.Array, packed: jax.Array, bits: int) -> jax.Array:
    """`wide_products` of one head and block of packed rows after the other, for a CPU.

    Eight times as fast at 65,536 rows of 128 numbers, of which that writes 128 MiB.
    """
    lead, count = packed.shape[:2], packed.shape[2]
    blocks = max(1, round(count / BLOCK))
    block = -(-count // blocks)
    heads = tuple(x.reshape(math.prod(lead), *x.shape[2:]) for x in (rows, packed))
    each = rows.shape[2]

    def head(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, packed = operands

        def step(index: jax.Array, found: jax.Array) -> jax.Array:
            start = jnp.minimum(index * block, count - block)  # the last block overlaps the one before
            part = wide_products(rows[None, None], lax.dynamic_slice_in_dim(packed, start, block)[None, None], bits)
            return lax.dynamic_update_slice_in_dim(found, part[0, 0], start, axis=1)

        return lax.fori_loop(0, blocks, step, jnp.zeros((each, count), jnp.float32))

    found = lax.map(head, heads)
    return found.reshape(*lead, *found.shape[1:])
