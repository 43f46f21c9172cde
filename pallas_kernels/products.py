"""Matrix products with packed numbers, the Hadamard transform, and the variance term of a landmark's score.

All of it is plain jax.numpy.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bits import Profile, middle, parts_of, signed_at, unpack_bytes
from pallas_kernels.tiles import exact, key_products

CACHED_ROWS = 16_384  # the unpacked numbers of about this many rows fit into a CPU's cache


def coded_products(packed: jax.Array, right: jax.Array, profile: Profile) -> jax.Array:
    """Multiply rows of mid-rise codes of step 1 by a matrix, without computing the values of the codes.

    The codes are whole numbers below 256, which every model dtype represents exactly. The offset of mid-rise codes adds
    the same vector to each row of the product.

    Args:
        packed: uint8 [B, h or 1, t, w], where w is the packed width of the profile. The second axis is 1 if all heads
            share the rows.
        right: the matrix of each head, floating [B, h, r, d].
        profile: how many of the r codes of a row have 8, 4 and 2 bits.

    Returns:
        float32 [B, h, t, d].
    """
    parts = parts_of(profile)
    codes = [unpack_bytes(packed[..., part.byte : part.byte + part.size], part.bits) for part in parts]
    zeros = jnp.concatenate([middle(jnp.zeros(part.size * 8 // part.bits), part.bits) for part in parts])
    numbers = jnp.concatenate(codes, axis=-1).astype(right.dtype)
    options: Any = {"precision": exact(right.dtype), "preferred_element_type": jnp.float32}
    if packed.shape[1] < right.shape[1]:
        products = jnp.einsum("btr,bhrd->bhtd", numbers[:, 0], right, **options)
    else:
        products = jnp.einsum("bhtr,bhrd->bhtd", numbers, right, **options)
    constant = jnp.einsum("r,bhrd->bhd", zeros, right.astype(jnp.float32), precision=exact(jnp.float32))
    return products + constant[:, :, None]


def whole_products(rows: jax.Array, packed: jax.Array, bits: int) -> jax.Array:
    """Multiply rows by packed rows of two's complement numbers.

    Every model dtype represents the unpacked numbers exactly.

    Args:
        rows: floating [B, h, R, d].
        packed: uint8 [B, h, n, d * bits / 8].
        bits: bits of a packed number.

    Returns:
        float32 [B, h, R, n].
    """
    return lax.platform_dependent(
        rows,
        packed,
        cpu=lambda rows, packed: by_blocks(rows, packed, bits),
        default=lambda rows, packed: wide_products(rows, packed, bits),
    )


def wide_products(rows: jax.Array, packed: jax.Array, bits: int) -> jax.Array:
    """Compute `whole_products` by unpacking all numbers at once.

    There is one product for each place of the bytes (see `pallas_kernels.bits`). Concatenating the places first would
    take longer on a CPU.
    """
    width, products = packed.shape[3], jnp.zeros((), jnp.float32)
    for place in range(8 // bits):
        numbers = signed_at(packed, place, bits).astype(rows.dtype)
        products += key_products(rows[..., place * width : (place + 1) * width], numbers)
    return products


def by_blocks(rows: jax.Array, packed: jax.Array, bits: int) -> jax.Array:
    """Compute `whole_products` on a CPU, one head and one block of packed rows at a time.

    For 65,536 packed rows of 128 numbers this is eight times as fast as `wide_products`, which writes 128 MiB of
    unpacked numbers to memory.
    """
    lead, count = packed.shape[:2], packed.shape[2]
    blocks = max(1, round(count / CACHED_ROWS))
    block = -(-count // blocks)
    heads = tuple(x.reshape(math.prod(lead), *x.shape[2:]) for x in (rows, packed))
    height = rows.shape[2]

    def head(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, packed = operands

        def step(index: jax.Array, products: jax.Array) -> jax.Array:
            start = jnp.minimum(index * block, count - block)  # the last block overlaps the previous one
            part = wide_products(rows[None, None], lax.dynamic_slice_in_dim(packed, start, block)[None, None], bits)
            return lax.dynamic_update_slice_in_dim(products, part[0, 0], start, axis=1)

        return lax.fori_loop(0, blocks, step, jnp.zeros((height, count), jnp.float32))

    products = lax.map(head, heads)
    return products.reshape(*lead, *products.shape[1:])


def landmark_products(rows: jax.Array, landmarks: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Multiply query rows by landmarks.

    Args:
        rows: floating [B, h, R, d].
        landmarks: floating [B, h, n, d]. With a scale they are packed instead: uint8 [B, h, n, d * bits / 8], two's
            complement codes in the layout of `pallas_kernels.bits`.
        scale: floating [B, h, n, 1], the step of each landmark's codes, or None.

    Returns:
        float32 [B, h, R, n].
    """
    if scale is None:
        return key_products(rows, landmarks)
    bits = 8 * landmarks.shape[3] // max(rows.shape[3], 1)
    return whole_products(rows, landmarks, bits) * scale.astype(jnp.float32)[:, :, None, :, 0]


def gathered_products(rows: jax.Array, landmarks: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Compute the `landmark_products` of a few rows with gathered landmarks, for a GPU.

    It uses sums of products, for which XLA reads the landmarks in place. For a matrix product it would copy them first.
    """

    def summed(rows: jax.Array, numbers: jax.Array) -> jax.Array:
        return (rows[:, :, :, None].astype(jnp.float32) * numbers[:, :, None].astype(jnp.float32)).sum(axis=4)

    if scale is None:
        return summed(rows, landmarks)
    width = landmarks.shape[3]
    bits = 8 * width // max(rows.shape[3], 1)
    total = jnp.zeros((), jnp.float32)
    for place in range(8 // bits):
        numbers = signed_at(landmarks, place, bits)
        total += summed(rows[..., place * width : (place + 1) * width], numbers)
    return total * scale.astype(jnp.float32)[:, :, None, :, 0]


def hadamard(x: jax.Array) -> jax.Array:
    """Compute the Hadamard transform over the last axis, whose size s is a power of two.

    The first number of the result is the sum. Two transforms in a row multiply by s. The transform is computed by
    additions. A GPU would round a matrix product to TF32, and on a CPU sums of products take ten times as long.
    """
    half = x.shape[-1] // 2
    if half == 0:
        return x
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([hadamard(first + second), hadamard(first - second)], axis=-1)


def half_variance(rows: jax.Array, spread: jax.Array, scale: float) -> jax.Array:
    """Return half the variance of the scaled products of a query row with the keys that a landmark stands for.

    It is (scale * |q| * spread)**2 / 2, which assumes that the keys vary equally in all directions.

    Args:
        rows: queries, floating [B, h, R, d].
        spread: root mean square difference of the keys from their landmark, floating [B, h, m, 1].

    Returns:
        float32 [B, h, R, m].
    """
    length = (rows.astype(jnp.float32) ** 2).sum(axis=3)[..., None]
    return (scale**2 / 2) * length * (spread.astype(jnp.float32) ** 2)[:, :, None, :, 0]
