"""Keys rebuilt from low-rank factors or packed codes in plain jax.numpy."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codes import coded_products, dequantise
from pallas_kernels.reconstruct_keys.codes import Codes
from pallas_kernels.reconstruct_keys.operands import Keys
from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.tiles import exact


def reconstruct_keys(factors: Keys) -> jax.Array:
    """See `pallas_kernels.reconstruct_keys`."""
    if not isinstance(factors, Codes) or factors.right is None:
        return rebuilt(factors)
    return lax.platform_dependent(factors, cpu=head_by_head, default=rebuilt)


def head_by_head(codes: Codes) -> jax.Array:
    """`rebuilt` with the unpacked numbers of one KV head at a time: a CPU's caches hold those, and no more."""
    assert codes.right is not None

    def head(operands: tuple[jax.Array, ...]) -> jax.Array:
        right, ids, mean = (x[:, None] for x in operands)
        return rebuilt(dataclasses.replace(codes, right=right, ids=ids, mean=mean))[:, 0]

    return jnp.moveaxis(lax.map(head, tuple(jnp.moveaxis(x, 1, 0) for x in (codes.right, codes.ids, codes.mean))), 0, 1)


def rebuilt(factors: Keys) -> jax.Array:
    """All KV heads at once."""
    left = factors.left
    ids = jnp.clip(factors.ids, 0, factors.units - 1)
    batch, heads, count = ids.shape
    rows, chunks = two_part_rows(by_head(left), factors.tail, ids), ids
    if factors.tail_unit is not None:
        chunks = jnp.where(ids < left.shape[-2], ids, ids - left.shape[-2] + factors.tail_unit[:, None, None])
    keys = product(factors, rows.reshape(batch, heads, count * factors.chunk, -1))
    positions = (chunks[..., None] * factors.chunk + jnp.arange(factors.chunk)).reshape(keys.shape[:3])
    cos, sin = cos_sin_of(positions[..., None].astype(jnp.float32) * factors.inverse)
    half = cos.shape[-1]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(factors.dtype)


def product(factors: Keys, rows: jax.Array) -> jax.Array:
    """Float32 keys before RoPE [B, h, t, d] of left rows [B, h, t, r] or [B, h, t, w]."""
    if not isinstance(factors, Codes):
        return multiplied(rows, factors.right)
    mean = factors.mean.astype(jnp.float32)[:, :, None]
    if factors.right is None:
        return dequantise(rows, factors.step[:, :, None], factors.profile) + mean
    return coded_products(rows, factors.right, factors.step, factors.profile) + mean


def multiplied(rows: jax.Array, right: jax.Array) -> jax.Array:
    """Float32 rows [B, h, t, r] times right [B, h, r, d]."""
    return jnp.einsum(
        "bhtr,bhrd->bhtd", rows, right,
        precision=exact(jnp.promote_types(rows.dtype, right.dtype)), preferred_element_type=jnp.float32,
    )  # fmt: skip


def by_head(left: jax.Array) -> jax.Array:
    """Left rows with an axis for heads, of size 1 where a row is of all heads together."""
    return left if left.ndim == 4 else left[:, None]


def two_part_rows(first: jax.Array, tail: jax.Array | None, ids: jax.Array) -> jax.Array:
    """Rows ids [B, h, k] of first [B, 1 or h, U, width], ids from U on of tail [B, W, width] or [B, h, W, width]."""
    if tail is None:
        return rows_at(first, ids)
    units = first.shape[2]
    later = rows_at(by_head(tail), ids - units)
    return later if units == 0 else jnp.where((ids >= units)[..., None], later, rows_at(first, ids))


def rows_at(source: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows ids [B, h, k] of source [B, 1 or h, U, width]: [B, h, k, width]; ids are clipped."""
    return jnp.take_along_axis(source, ids[..., None], axis=2, mode="clip")
