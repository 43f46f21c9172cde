"""Scores of chunks in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiles import MASKED, group_rows


def chunk_scores(q: jax.Array, landmarks: jax.Array, candidates: jax.Array, scale: float) -> jax.Array:
    """See `pallas_kernels.chunk_scores`."""
    batch, kv_heads, count = candidates.shape
    logits = jnp.einsum(
        "bhmd,bhnd->bhmn", group_rows(q, kv_heads), landmarks,
        precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
    there = candidates[:, :, None]
    logits = jnp.where(there, logits * scale, MASKED)
    weight = jnp.where(there, jnp.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    mass = weight / jnp.maximum(weight.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    scores = mass.reshape(batch, kv_heads, q.shape[1], -1, count).max(axis=3)
    return jnp.where(there, scores, -1.0)
