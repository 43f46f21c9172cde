"""Blocks of a prompt's tokens. A codec reads a prompt block by block, so that only one block has a float32 copy."""

import jax.numpy as jnp
from jax import Array, lax

from jshadow.ops.layout import token_slice


def token_block(k_pre: Array, lengths: Array, index: Array, block: int) -> tuple[Array, Array]:
    """Return one block of a prompt's keys, with all heads side by side.

    All blocks have the same size, so the last one overlaps the previous one. Tokens that the previous block contains
    are zero, and so is padding. So every token is counted once.

    Args:
        k_pre: keys before RoPE [B, S, h_kv, d].
        lengths: number of tokens in each row, int32 [B].
        index: number of the block.
        block: tokens in a block, at most S.

    Returns:
        The keys [B, block, h_kv * d] in k_pre's dtype, and the position of the block's first token.
    """
    batch, length, heads, dim = k_pre.shape
    start = jnp.minimum(index * block, length - block)
    rows = token_slice(k_pre, start, block).reshape(batch, block, heads * dim)
    new = new_tokens(lengths, index, start, block)
    return jnp.where(new[..., None], rows, jnp.zeros((), rows.dtype)), start


def new_tokens(lengths: Array, index: Array, start: Array, block: int) -> Array:
    """Return which tokens of a block are real and are not in the previous block, bool [B, block]."""
    token = start + jnp.arange(block)
    return (token >= index * block) & (token < lengths[:, None])


def put_block(buffer: Array, new: Array, index: Array, start: Array) -> Array:
    """Write one block's rows into a buffer [B, S, ...]. Tokens that the previous block has written are not changed."""
    block = new.shape[1]
    old = lax.dynamic_slice_in_dim(buffer, start, block, axis=1)
    written = (start + jnp.arange(block) < index * block).reshape(block, *[1] * (buffer.ndim - 2))
    return lax.dynamic_update_slice_in_dim(buffer, jnp.where(written, old, new), start, axis=1)
