"""level_scores in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.level_scores.operands import NearScores, TwoLevels
from pallas_kernels.products import gathered_products, hadamard, half_variance, landmark_products
from pallas_kernels.tiles import MASKED


def level_scores(
    q: jax.Array, scores: jax.Array, levels: TwoLevels, *, count: int, size: int, scale: float
) -> NearScores:
    """See `pallas_kernels.level_scores`."""
    batch, heads, length, _ = scores.shape
    ids, there = near_chunks(scores, count, size)
    at = ids.reshape(batch, heads, -1, 1)
    near = jax.tree.map(lambda rows: jnp.take_along_axis(rows, at, axis=2, mode="clip"), levels)
    # A query and its chunks are treated as a head with its chunks.
    near = jax.tree.map(lambda rows: rows.reshape(batch, heads * length, -1, rows.shape[3]), near)
    rows = q.reshape(batch, length, heads, -1, q.shape[3]).swapaxes(1, 2)
    logits = level_logits(rows.reshape(batch, heads * length, -1, q.shape[3]), near, scale)
    parts = levels.parts(q.shape[3])
    # The landmarks of all chunks are one axis, because XLA's CPU backend takes five times as long with two axes.
    is_there = jnp.repeat(there.reshape(batch, heads * length, 1, -1), parts, axis=3)
    mass = jnp.where(is_there, jax.nn.softmax(jnp.where(is_there, logits, MASKED), axis=3), 0.0)
    mass = mass.reshape(*mass.shape[:3], -1, parts).sum(axis=4).max(axis=2).reshape(there.shape)
    return NearScores(jnp.where(there, mass, -1.0), ids)


def near_chunks(scores: jax.Array, count: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the ids of the chunks in the best groups, int32 [B, h_kv, T, m], and which of them are candidates."""
    chunks = scores.shape[3]
    groups = -(-chunks // size)
    # Without this barrier, XLA's CPU backend computes the scores twice.
    scores = lax.optimization_barrier(scores)
    padded = jnp.pad(scores, [(0, 0)] * 3 + [(0, groups * size - chunks)], constant_values=-1.0)
    best, at = lax.top_k(padded.reshape(*scores.shape[:3], groups, size).max(axis=4), count)
    at = jnp.sort(jnp.where(best >= 0, at.astype(jnp.int32), groups))
    ids = (at[..., None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(*scores.shape[:3], count * size)
    there = jnp.take_along_axis(scores, ids, axis=3, mode="fill", fill_value=-1.0) >= 0
    return jnp.where(there, ids, 0), there


def level_logits(rows: jax.Array, near: TwoLevels, scale: float) -> jax.Array:
    """Compute the logits of all landmarks of all chunks.

    Args:
        rows: query rows [B, h, R, d].
        near: the landmarks of m chunks, [B, h, m, ...] each.

    Returns:
        float32 [B, h, R, m * s], with the s landmarks of a chunk side by side.
    """
    batch, heads, _, dim = rows.shape
    chunks, parts = near.means.shape[2], near.parts(dim)

    def products(level: jax.Array, step: jax.Array | None, count: int) -> jax.Array:
        """Return the products of the queries with `count` rows of each chunk, [B, h, R, m, count]."""
        level = level.reshape(batch, heads, chunks * count, -1)
        step = None if step is None else step.reshape(batch, heads, chunks * count, 1)
        found = lax.platform_dependent(rows, level, step, cpu=landmark_products, default=gathered_products)
        return found.reshape(*rows.shape[:3], chunks, count)

    first = products(near.means, near.mean_scale, 1)
    others = products(near.details, near.detail_scale, parts - 1)
    logits = hadamard(scale * jnp.concatenate([first, others], axis=4)).reshape(*rows.shape[:3], chunks * parts)
    if near.spread is not None:
        logits += half_variance(rows, near.spread.reshape(batch, heads, chunks * parts, 1), scale)
    return logits
