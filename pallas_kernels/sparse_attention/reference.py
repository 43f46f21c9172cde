"""Attention over scattered pieces in plain jax.numpy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import MASKED, exact

Piece = tuple[jax.Array, jax.Array, jax.Array]


def sparse_attention(q: jax.Array, pieces: Sequence[Piece], scale: float) -> jax.Array:
    """See `pallas_kernels.sparse_attention`."""
    batch, length, q_heads, dim = q.shape
    kv_heads = pieces[0][0].shape[1]
    grouped = q.reshape(batch, length, kv_heads, q_heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    scores = [masked_scores(grouped, k, valid, scale) for k, _, valid in pieces]
    top = jnp.stack([score.max(-1) for score in scores]).max(axis=0)
    total, out = jnp.zeros(()), jnp.zeros(())
    for score, (_, v, _) in zip(scores, pieces, strict=True):
        weight = jnp.where(score > MASKED, jnp.exp(score - top[..., None]), 0.0)
        total = total + weight.sum(-1)
        out = out + rows_product("bhtgn,bhnd->bhtgd", weight.astype(v.dtype), v)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def masked_scores(grouped: jax.Array, k: jax.Array, valid: jax.Array, scale: float) -> jax.Array:
    """Float32 scores [B, h_kv, T, group, N] of queries [B, h_kv, T, group, d]; MASKED where a query may not look."""
    scores = rows_product("bhtgd,bhnd->bhtgn", grouped, k) * scale
    return jnp.where(valid[:, :, :, None], scores, MASKED)


def rows_product(formula: str, left: jax.Array, rows: jax.Array) -> jax.Array:
    """Float32 einsum with a piece's rows, each query's own ones if 5-D."""
    shape = left.shape
    if rows.ndim == 5:
        formula = formula.replace("bhnd", "bhtnd")
    else:
        # One axis of rows: over two, XLA's CPU backend takes five times as long.
        left, formula = left.reshape(*shape[:2], shape[2] * shape[3], shape[4]), formula.replace("tg", "r")
    precision = exact(jnp.promote_types(left.dtype, rows.dtype))
    out = jnp.einsum(formula, left, rows, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(*shape[:4], -1)
