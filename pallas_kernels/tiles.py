"""Helpers that all kernels share: cutting odd sizes into Triton's powers of two, and products of tiles.

Triton needs blocks whose sizes are powers of two, and products whose sides are at least 16. Odd sizes are cut or
padded, and the padding is masked.

All indices are int32, one for each axis. Pallas multiplies an index with its stride in 64 bits once an array has more
than 2**32 bytes. So a kernel must never flatten two axes of a large array into one index.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite, so that exp(MASKED - MASKED) is a number and empty rows need no special case
LEAST = 16
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def power_of_two(size: int) -> int:
    """The least power of two that holds size, and is at least 16."""
    return max(LEAST, 1 << (size - 1).bit_length())


def spans(size: int, most: int = 128) -> tuple[tuple[int, int], ...]:
    """Cut an axis into (start, width), each width a power of two: 160 is 128 + 32, 80 is 64 + 16, 120 a padded 128."""
    start, cut = 0, []
    while start < size:
        rest = size - start
        width = power_of_two(rest)
        if width > LEAST and width - rest > rest // 4:
            width //= 2  # padding would be more than a quarter
        width = min(width, most)
        cut.append((start, width))
        start += width
    return tuple(cut)


def summed(size: int, *arrays: Any) -> tuple[tuple[int, int], ...]:
    """Spans of the axis over which a product of these arrays or refs sums. They are short, so that no tile spills.

    Float32 products are multiply-adds that hold both tiles in registers. Shorter types use the tensor cores.
    """
    return spans(size, 32 if any(x.dtype == jnp.float32 for x in arrays) else 64)


def warps(dim: int, *arrays: Any) -> int:
    """Warps of a program whose tiles are dim wide: 8 where 4 would run out of registers."""
    return 8 if dim > 128 or any(x.dtype == jnp.float32 for x in arrays) else 4


def blocks(size: int, block: int) -> int:
    """How many blocks hold size."""
    return -(-size // block)


def iota(start: jax.Array | int, count: int) -> jax.Array:
    """start .. start + count - 1, int32 whether or not 64-bit types are enabled."""
    return start + lax.iota(jnp.int32, count)


def dot(left: jax.Array, right: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Float32 product of two tiles, the right one [N, K] if transposed; never rounded to TF32."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        left.astype(dtype), right.astype(dtype), contract, precision=exact(dtype), preferred_element_type=jnp.float32
    )


def exact(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """The precision at which products are exact. Shorter types than float32 are exact at any, and slower at HIGHEST."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def group_rows(q: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [B, T, h_q, d] as rows of their KV head [B, h_kv, T * group, d]."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, length * heads // kv_heads, dim)


def key_products(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Float32 products [B, h, m, n] of few rows [B, h, m, d] with many keys [B, h, n, d], in XLA."""
    options: Any = {
        "precision": exact(jnp.promote_types(rows.dtype, keys.dtype)),
        "preferred_element_type": jnp.float32,
    }
    # Float32 keys on the left, bfloat16 keys on the right: the other order takes XLA's CPU backend 1.5 times as long.
    if keys.dtype == jnp.float32:
        return jnp.einsum("bhnd,bhmd->bhnm", keys, rows, **options).swapaxes(2, 3)
    return jnp.einsum("bhmd,bhnd->bhmn", rows, keys, **options)


def row_block(rows: int, *arrays: Any) -> int:
    """Query rows of one program that multiplies these arrays."""
    return min(16 if any(x.dtype == jnp.float32 for x in arrays) else 64, power_of_two(rows))


def can_do(name: str, dim: int, *arrays: jax.Array, packed: tuple[jax.Array, ...] = ()) -> None:
    """Check what no kernel can do. `packed` are arrays of bytes; their dtype is not checked.

    Raises:
        NotImplementedError: heads wider than 256, an array of no elements, or an unusual dtype.
    """
    if dim > 256:
        raise NotImplementedError(f"{name}: the kernel takes heads up to 256 wide, got {dim}")
    for x in (*arrays, *packed):
        if math.prod(x.shape) == 0:
            raise NotImplementedError(f"{name}: the kernel takes no empty array, got shape {list(x.shape)}")
    for x in arrays:
        if x.dtype not in DTYPES:
            raise NotImplementedError(f"{name}: the kernel takes float32, bfloat16 and float16, got {x.dtype}")
