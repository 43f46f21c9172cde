"""Attention over lists of keys in plain jax.numpy, by a mask of all pairs of a query and a key."""

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_prefill.operands import KeyLists, Keys
from pallas_kernels.tiles import MASKED, exact


def sparse_prefill(
    q: jax.Array, keys: Keys, lists: KeyLists, first: jax.Array, sinks: jax.Array | None, scale: float
) -> jax.Array:
    """See `pallas_kernels.sparse_prefill`."""
    batch, length, heads, dim = q.shape
    k, v = keys.k, keys.v
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], dim)
    precision = exact(jnp.promote_types(q.dtype, k.dtype))
    scores = jnp.einsum("bthgd,bshd->bhgts", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, length, -1) * scale
    seen = seen_keys(lists, keys, first, length)
    scores = jnp.where(seen, scores, MASKED)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        logits = sinks.astype(jnp.float32)[:, None, None]
        top = jnp.maximum(top, logits)
    weight = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = weight.sum(-1) if sinks is None else weight.sum(-1) + jnp.exp(logits - top)[..., 0]
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    weight = weight.astype(v.dtype).reshape(batch, k.shape[2], -1, length, k.shape[1])
    out = jnp.einsum("bhgts,bshd->bhgtd", weight, v, precision=exact(v.dtype), preferred_element_type=jnp.float32)
    out = out.reshape(batch, heads, length, dim) / total[..., None]
    return out.swapaxes(1, 2).astype(q.dtype)


def seen_keys(lists: KeyLists, keys: Keys, first: jax.Array, length: int) -> jax.Array:
    """Return which keys each query sees, bool [B, h_q, P, S]."""
    tokens, count = keys.k.shape[1], lists.blocks.shape[2]
    block = length // count
    query, key = first + jnp.arange(length)[:, None], jnp.arange(tokens)
    near = in_list(lists.blocks, lists.block_counts, -(-tokens // block))
    near = jnp.repeat(jnp.repeat(near, block, axis=3)[..., :tokens], block, axis=2)
    if lists.diagonals is not None and lists.in_column is not None:
        back = jnp.clip(query - key, 0, tokens - 1)
        near &= lists.diagonals[:, :, back] | lists.in_column[:, :, None]
    single = jnp.repeat(in_list(lists.columns, lists.column_counts, tokens), block, axis=2)
    real = (query < keys.lengths[:, None, None])[:, None]
    return (near | single) & (key <= query) & real


def in_list(ids: jax.Array, counts: jax.Array, size: int) -> jax.Array:
    """Return which of the numbers 0 .. size - 1 are among the first `counts` ids of each list, bool [..., size]."""
    valid = jnp.arange(ids.shape[-1]) < counts[..., None]
    row = jnp.ogrid[tuple(slice(n) for n in (*counts.shape, 1))]
    mask = jnp.zeros((*counts.shape, size), bool)
    return mask.at[(*row[:-1], jnp.where(valid, ids, size))].set(True, mode="drop")
