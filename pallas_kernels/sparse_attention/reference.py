"""Attention over several pieces in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_attention.operands import Piece, seen_rows
from pallas_kernels.tiles import MASKED, exact, key_products


def sparse_attention(q: jax.Array, pieces: tuple[Piece, ...], sinks: jax.Array | None, scale: float) -> jax.Array:
    """See `pallas_kernels.sparse_attention`."""
    batch, length, q_heads, dim = q.shape
    kv_heads = pieces[0].k.shape[1]
    grouped = q.reshape(batch, length, kv_heads, q_heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    pieces = tuple(listed_rows(piece, dim) for piece in pieces)
    scores = [masked_scores(grouped, k, valid, scale) for k, _, valid, _ in pieces]
    top = jnp.stack([score.max(-1) for score in scores]).max(axis=0)
    total, out = jnp.zeros(()), jnp.zeros(())
    if sinks is not None:
        logits = sinks.astype(jnp.float32).reshape(kv_heads, 1, -1)
        top = jnp.maximum(top, logits)
        total = jnp.exp(logits - top)
    for score, (_, v, _, _) in zip(scores, pieces, strict=True):
        weight = jnp.where(score > MASKED, jnp.exp(score - top[..., None]), 0.0)
        total = total + weight.sum(-1)
        out = out + weighted_sum(weight, v)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def listed_rows(piece: Piece, dim: int) -> Piece:
    """Return the piece without a list of places: its rows are copied in the order of the list."""
    if piece.places is None:
        return piece
    # The place of an entry that no query may see can be any number. It is clipped.
    index = piece.places[..., None]
    k, v = (
        jnp.take_along_axis(x, index, axis=2, mode="clip").reshape(*x.shape[:2], piece.rows(dim), dim)
        for x in (piece.k, piece.v)
    )
    if piece.valid.dtype != jnp.int32:
        return Piece(k, v, piece.valid)
    return Piece(k, v, jnp.minimum(piece.valid, index.shape[2]) * (piece.k.shape[3] // dim))


def masked_scores(grouped: jax.Array, k: jax.Array, valid: jax.Array, scale: float) -> jax.Array:
    """Return the float32 scores [B, h_kv, T, group, N] of queries [B, h_kv, T, group, d]. Invisible rows get MASKED."""
    shape = grouped.shape
    if k.ndim == 5:
        precision = exact(jnp.promote_types(grouped.dtype, k.dtype))
        scores = jnp.einsum("bhtgd,bhtnd->bhtgn", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    else:
        # The query axes are merged, because XLA's CPU backend takes five times as long with two of them.
        scores = key_products(grouped.reshape(*shape[:2], -1, shape[4]), k).reshape(*shape[:4], -1)
    return jnp.where(seen_rows(valid, k.shape[-2])[:, :, :, None], scores * scale, MASKED)


def weighted_sum(weight: jax.Array, v: jax.Array) -> jax.Array:
    """Sum a piece's values with weights [B, h_kv, T, group, N]: float32 [B, h_kv, T, group, d].

    Values are [B, h_kv, N, d], or [B, h_kv, T, N, d] if each query has separate rows.
    """
    shape, weight = weight.shape, weight.astype(v.dtype)
    formula = "bhtgn,bhtnd->bhtgd"
    if v.ndim == 4:
        weight, formula = weight.reshape(*shape[:2], -1, shape[4]), "bhrn,bhnd->bhrd"
    out = jnp.einsum(formula, weight, v, precision=exact(v.dtype), preferred_element_type=jnp.float32)
    return out.reshape(*shape[:4], -1)
