"""Rebuilding keys from low-rank factors or packed codes in plain jax.numpy."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import coded_products
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.tiles import exact


def reconstruct_keys(keys: ChosenKeys) -> jax.Array:
    """See `pallas_kernels.reconstruct_keys`."""
    if keys.profile is None:
        return all_heads(keys)
    return lax.platform_dependent(keys, cpu=head_by_head, default=all_heads)


def head_by_head(keys: ChosenKeys) -> jax.Array:
    """Compute `all_heads` one KV head at a time, so that the unpacked numbers fit into a CPU's caches."""

    def head(operands: tuple[jax.Array, ...]) -> jax.Array:
        right, ids, mean = (x[:, None] for x in operands)
        return all_heads(dataclasses.replace(keys, right=right, ids=ids, mean=mean))[:, 0]

    assert keys.mean is not None
    heads = tuple(jnp.moveaxis(x, 1, 0) for x in (keys.right, keys.ids, keys.mean))
    return jnp.moveaxis(lax.map(head, heads), 0, 1)


def all_heads(keys: ChosenKeys) -> jax.Array:
    """Rebuild the keys [B, h_kv, k * c, d] of all KV heads at once."""
    units = keys.left.shape[-2]
    ids = jnp.clip(keys.ids, 0, keys.units - 1)
    batch, heads, count = ids.shape
    rows, chunks = two_part_rows(keys.left[:, None], keys.tail, ids), ids
    if keys.tail_unit is not None:
        chunks = jnp.where(ids < units, ids, ids - units + keys.tail_unit[:, None, None])
    plain = before_rope(keys, rows.reshape(batch, heads, count * keys.chunk, -1))
    positions = (chunks[..., None] * keys.chunk + jnp.arange(keys.chunk)).reshape(plain.shape[:3])
    cos, sin = cos_sin_of(positions[..., None].astype(jnp.float32) * keys.inverse)
    half = cos.shape[-1]
    first, second, rest = plain[..., :half], plain[..., half : 2 * half], plain[..., 2 * half :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(keys.dtype)


def before_rope(keys: ChosenKeys, rows: jax.Array) -> jax.Array:
    """Turn left rows [B, h, t, r] or [B, h, t, w] into float32 keys before RoPE [B, h, t, d]."""
    if keys.profile is None or keys.mean is None:
        return product(rows, keys.right)
    mean = keys.mean.astype(jnp.float32)[:, :, None]
    return coded_products(rows, keys.right, keys.profile) + mean


def product(rows: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply rows [B, h, t, r] by right [B, h, r, d]. Return float32 [B, h, t, d]."""
    precision = exact(jnp.promote_types(rows.dtype, right.dtype))
    return jnp.einsum("bhtr,bhrd->bhtd", rows, right, precision=precision, preferred_element_type=jnp.float32)


def two_part_rows(first: jax.Array, tail: jax.Array | None, ids: jax.Array) -> jax.Array:
    """Gather rows `ids` [B, h, k] of first [B, 1, U, width]. Id U + i means row i of tail [B, W, width]."""
    if tail is None:
        return rows_at(first, ids)
    units = first.shape[2]
    later = rows_at(tail[:, None], ids - units)
    return later if units == 0 else jnp.where((ids >= units)[..., None], later, rows_at(first, ids))


def rows_at(source: jax.Array, ids: jax.Array) -> jax.Array:
    """Gather rows `ids` [B, h, k] of source [B, 1 or h, U, width]. Return [B, h, k, width]. Ids are clipped."""
    return jnp.take_along_axis(source, ids[..., None], axis=2, mode="clip")
