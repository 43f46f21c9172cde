"""Helpers that all kernels share. They cut any size into powers of two for Triton, and multiply tiles.

Triton needs blocks whose sizes are powers of two, and products whose sides are at least 16. Other sizes are cut or
padded, and the padding is masked.

All indices are int32, one for each axis. If an array has more than 2**32 bytes, Pallas multiplies each index by its
stride in 64 bits. So a kernel must never flatten two axes of a large array into one index, which could overflow. In a
smaller array, the offset of an element is an int32. So no kernel takes an array of bytes with more than 2**31 and at
most 2**32 elements.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

MASKED = -1e30  # finite, so that exp(MASKED - MASKED) is a number and empty rows need no special case
LOG2_E = math.log2(math.e)  # exp(x) is 2**(x * LOG2_E)
LEAST = 16  # the smallest side of a tile in a Triton product
MOST_BYTES = 2**31  # of an array of bytes; see above
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` and at least 16."""
    return max(LEAST, 1 << (size - 1).bit_length())


def spans(size: int, most: int = 128) -> tuple[tuple[int, int], ...]:
    """Cut an axis of `size` elements into tiles, and return (start, width) of each tile.

    Widths are powers of two, at least 16 and at most `most`. The last tile may reach past the end of the axis. For
    example, 160 becomes 128 + 32, 80 becomes 64 + 16, and 120 becomes a single 128.
    """
    start, cut = 0, []
    while start < size:
        rest = size - start
        width = power_of_two(rest)
        if width > LEAST and width - rest > rest // 4:
            width //= 2  # padding would be more than a quarter of the rest
        width = min(width, most)
        cut.append((start, width))
        start += width
    return tuple(cut)


def summed(size: int, *arrays: Any) -> tuple[tuple[int, int], ...]:
    """Return the spans of an axis of `size` elements that a product of these arrays or refs sums over.

    They are at most 64 wide, so that the tiles fit into registers. With a float32 array they are at most 32 wide,
    because float32 products are multiply-adds that hold both tiles in registers. Other products use the tensor cores.
    """
    return spans(size, 32 if any(x.dtype == jnp.float32 for x in arrays) else 64)


def warps(dim: int, *arrays: Any) -> int:
    """Return the number of warps of a program whose tiles are `dim` wide: 8 if 4 have too few registers, else 4."""
    return 8 if dim > 128 or any(x.dtype == jnp.float32 for x in arrays) else 4


def blocks(size: int, block: int) -> int:
    """Return how many blocks of `block` elements cover `size` elements."""
    return -(-size // block)


def iota(start: jax.Array | int, count: int) -> jax.Array:
    """Return the indices start .. start + count - 1 as int32, even if 64-bit types are enabled."""
    return start + lax.iota(jnp.int32, count)


def dot(left: jax.Array, right: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Multiply tiles [M, K] and [K, N], or [N, K] if transposed. Return float32 [M, N], never rounded to TF32."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        left.astype(dtype), right.astype(dtype), contract, precision=exact(dtype), preferred_element_type=jnp.float32
    )


def exact(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """Return the precision at which products of numbers of this dtype are not rounded to a shorter type.

    Products of bfloat16 and float16 are exact at any precision, and HIGHEST would only slow them down.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def group_rows(q: jax.Array, kv_heads: int) -> jax.Array:
    """Regroup queries [B, T, h_q, d] as the query rows of each KV head [B, h_kv, T * group, d]."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, length * heads // kv_heads, dim)


def key_products(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply few rows [B, h, m, d] by many keys [B, h, n, d] in XLA. Return float32 [B, h, m, n]."""
    options: Any = {
        "precision": exact(jnp.promote_types(rows.dtype, keys.dtype)),
        "preferred_element_type": jnp.float32,
    }
    # On XLA's CPU backend, float32 is faster with the keys on the left, and bfloat16 with the keys on the right. The
    # other order takes 1.5 times as long.
    if keys.dtype == jnp.float32:
        return jnp.einsum("bhnd,bhmd->bhnm", keys, rows, **options).swapaxes(2, 3)
    return jnp.einsum("bhmd,bhnd->bhmn", rows, keys, **options)


def row_block(rows: int, *arrays: Any) -> int:
    """Return how many of `rows` query rows one program handles if it multiplies these arrays."""
    return min(16 if any(x.dtype == jnp.float32 for x in arrays) else 64, power_of_two(rows))


def can_do(name: str, dim: int, *arrays: jax.Array, packed: tuple[jax.Array, ...] = ()) -> None:
    """Check that the kernel `name` supports heads `dim` wide and these arrays.

    The arrays in `packed` hold bytes. Their dtype is not checked.

    Raises:
        NotImplementedError: heads are wider than 256, an array is empty, a dtype is not float32, bfloat16 or float16,
            or the offsets in an array of bytes do not fit into 32 bits.
    """
    if dim > 256:
        raise NotImplementedError(f"{name}: the kernel takes heads up to 256 wide, got {dim}")
    for x in (*arrays, *packed):
        if math.prod(x.shape) == 0:
            raise NotImplementedError(f"{name}: the kernel takes no empty array, got shape {list(x.shape)}")
        if math.prod(x.shape) > MOST_BYTES and x.dtype.itemsize * math.prod(x.shape) <= 2**32:
            raise NotImplementedError(
                f"{name}: the kernel takes up to {MOST_BYTES:,} elements in an array of at most 4 GiB, got shape "
                f"{list(x.shape)}"
            )
    for x in arrays:
        if x.dtype not in DTYPES:
            raise NotImplementedError(f"{name}: the kernel takes float32, bfloat16 and float16, got {x.dtype}")


def number_of(mask: jax.Array) -> jax.Array:
    """Return how many entries of a tile are True, int32."""
    return mask.astype(jnp.int32).sum(dtype=jnp.int32)


def barrier(interpret: bool) -> None:
    """Wait for all threads of the program. Then they see what the others have stored."""
    if not interpret:
        pltriton.debug_barrier()
