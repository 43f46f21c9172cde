"""Scores of chunks in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import MASKED, group_rows, key_products


def chunk_scores(q: jax.Array, landmarks: jax.Array, candidates: jax.Array, scale: float) -> jax.Array:
    """See `pallas_kernels.chunk_scores`."""
    batch, kv_heads, count = candidates.shape
    logits = key_products(group_rows(q, kv_heads), landmarks)
    there = candidates[:, :, None]
    logits = jnp.where(there, logits * scale, MASKED)
    weight = jnp.where(there, jnp.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    mass = weight / jnp.maximum(weight.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    scores = mass.reshape(batch, kv_heads, q.shape[1], -1, count).max(axis=3)
    return jnp.where(there, scores, -1.0)
