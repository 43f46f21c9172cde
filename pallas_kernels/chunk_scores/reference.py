"""Scores of chunks in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_scores.operands import Chunks
from pallas_kernels.products import half_variance, landmark_products
from pallas_kernels.tiles import MASKED, group_rows


def chunk_scores(q: jax.Array, chunks: Chunks, *, scale: float) -> jax.Array:
    """See `pallas_kernels.chunk_scores`."""
    candidates, parts = chunks.candidates, chunks.parts
    batch, kv_heads, count = candidates.shape
    rows = group_rows(q, kv_heads)
    logits = landmark_products(rows, chunks.landmarks, chunks.scale)
    there = (candidates if parts == 1 else jnp.repeat(candidates, parts, axis=2))[:, :, None]
    logits *= scale
    if chunks.spread is not None:
        logits += half_variance(rows, chunks.spread, scale)
    logits = jnp.where(there, logits, MASKED)
    weight = jnp.where(there, jnp.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    mass = weight / jnp.maximum(weight.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    if parts > 1:
        mass = mass.reshape(*mass.shape[:3], count, parts).sum(axis=4)
    scores = mass.reshape(batch, kv_heads, q.shape[1], -1, count).max(axis=3)
    return jnp.where(candidates[:, :, None], scores, -1.0)
