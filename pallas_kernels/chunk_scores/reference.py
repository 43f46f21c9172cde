"""Scores of chunks in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.codes import whole_products
from pallas_kernels.tiles import MASKED, group_rows, key_products


def chunk_scores(
    q: jax.Array, landmarks: jax.Array, candidates: jax.Array, landmark_scale: jax.Array | None = None,
    spread: jax.Array | None = None, *, scale: float,
) -> jax.Array:  # fmt: skip
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
    logits *= scale
    if spread is not None:
        logits += half_variance(rows, spread, scale)
    logits = jnp.where(there, logits, MASKED)
    weight = jnp.where(there, jnp.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    mass = weight / jnp.maximum(weight.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    if parts > 1:
        mass = mass.reshape(*mass.shape[:3], count, parts).sum(axis=4)
    scores = mass.reshape(batch, kv_heads, q.shape[1], -1, count).max(axis=3)
    return jnp.where(candidates[:, :, None], scores, -1.0)


def half_variance(rows: jax.Array, spread: jax.Array, scale: float) -> jax.Array:
    """Half the variance of scaled products of rows [B, h, R, d] with keys of a spread [B, h, m, 1]: [B, h, R, m]."""
    length = (rows.astype(jnp.float32) ** 2).sum(axis=3)[..., None]
    return (scale**2 / 2) * length * (spread.astype(jnp.float32) ** 2)[:, :, None, :, 0]
