"""Scores of chunks in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.codes import whole_products
from pallas_kernels.tiles import MASKED, group_rows, key_products


def chunk_scores(
    q: jax.Array, landmarks: jax.Array, candidates: jax.Array, landmark_scale: jax.Array | None = None, *, scale: float
) -> jax.Array:
    """See `pallas_kernels.chunk_scores`."""
    batch, kv_heads, count = candidates.shape
    parts = landmarks.shape[2] // count
    rows = group_rows(q, kv_heads)
    if landmark_scale is None:
        logits = key_products(rows, landmarks)
    else:
        logits = whole_products(rows, landmarks, 8 * landmarks.shape[3] // q.shape[3])
        logits *= landmark_scale.astype(jnp.float32)[:, :, None, :, 0]
    there = (candidates if parts == 1 else jnp.repeat(candidates, parts, axis=2))[:, :, None]
    logits = jnp.where(there, logits * scale, MASKED)
    weight = jnp.where(there, jnp.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    mass = weight / jnp.maximum(weight.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    if parts > 1:
        mass = mass.reshape(*mass.shape[:3], count, parts).sum(axis=4)
    scores = mass.reshape(batch, kv_heads, q.shape[1], -1, count).max(axis=3)
    return jnp.where(candidates[:, :, None], scores, -1.0)
