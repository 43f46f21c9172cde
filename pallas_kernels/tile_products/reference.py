"""Products of tiles of rows in plain jax.numpy, one tile after another."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tile_products.operands import Stack, Tiles
from pallas_kernels.tiles import exact


def tile_products(x: jax.Array, stack: Stack, tiles: Tiles, height: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """See `pallas_kernels.tile_products`. Rows in no tile are 0."""

    def add(tile: jax.Array, out: jax.Array) -> jax.Array:
        row = tiles.first[tile] + jnp.arange(height)
        taken = x[jnp.minimum(row, len(x) - 1)]
        one = jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, tiles.matrix[tile], keepdims=False), stack)
        made = jnp.matmul(taken, numbers(one, x.dtype), precision=exact(x.dtype), preferred_element_type=jnp.float32)
        if one.scale is not None and one.zero is None:
            made *= one.scale.astype(jnp.float32)
        return out.at[jnp.where(row < tiles.end[tile], row, len(x))].set(made.astype(dtype), mode="drop")

    return lax.fori_loop(0, len(tiles.matrix), add, jnp.zeros((len(x), stack.kernel.shape[2]), dtype))


def numbers(one: Stack, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return one matrix [D, F] in a dtype, without factors of its columns."""
    if one.scale is None or one.zero is None:
        return one.kernel.astype(dtype)
    packed = one.kernel.reshape(one.scale.shape[0], -1, one.kernel.shape[1])
    codes = jnp.concatenate([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=1).astype(jnp.float32)
    scale, zero = (part[:, None].astype(jnp.float32) for part in (one.scale, one.zero))
    return (codes * scale + zero).astype(dtype).reshape(-1, one.kernel.shape[1])
