"""Keys rebuilt from low-rank factors in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.reconstruct_keys.factors import Factors
from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.tiles import exact


def reconstruct_keys(factors: Factors) -> jax.Array:
    """See `pallas_kernels.reconstruct_keys`."""
    left, right = factors.left, factors.right
    ids = jnp.clip(factors.ids, 0, factors.units - 1)
    batch, heads, count = ids.shape
    rows, chunks = two_part_rows(left[:, None], factors.tail, ids), ids
    if factors.tail_unit is not None:
        chunks = jnp.where(ids < left.shape[1], ids, ids - left.shape[1] + factors.tail_unit[:, None, None])
    rows = rows.reshape(batch, heads, count * factors.chunk, right.shape[2])
    keys = jnp.einsum(
        "bhtr,bhrd->bhtd", rows, right,
        precision=exact(jnp.promote_types(left.dtype, right.dtype)), preferred_element_type=jnp.float32,
    )  # fmt: skip
    positions = (chunks[..., None] * factors.chunk + jnp.arange(factors.chunk)).reshape(keys.shape[:3])
    cos, sin = cos_sin_of(positions[..., None].astype(jnp.float32) * factors.inverse)
    half = cos.shape[-1]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(left.dtype)


def two_part_rows(first: jax.Array, tail: jax.Array | None, ids: jax.Array) -> jax.Array:
    """Rows ids [B, h, k] of first [B, 1 or h, U, width], ids from U on of tail [B, W, width]."""
    if tail is None:
        return rows_at(first, ids)
    units = first.shape[2]
    later = rows_at(tail[:, None], ids - units)
    return later if units == 0 else jnp.where((ids >= units)[..., None], later, rows_at(first, ids))


def rows_at(source: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows ids [B, h, k] of source [B, 1 or h, U, width]: [B, h, k, width]; ids are clipped."""
    return jnp.take_along_axis(source, ids[..., None], axis=2, mode="clip")
