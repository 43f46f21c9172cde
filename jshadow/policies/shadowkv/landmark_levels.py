"""Landmarks in two levels: a chunk's mean, which every query reads, and its landmarks, read where they may count.

Not the paper's. The finer landmarks are, the better they choose, and the more of the device's memory every step reads
only to choose. Their Hadamard transform takes as many numbers, and the first is the mean of the chunk: what a landmark
of the whole chunk would be. So a query scores all chunks by their means, and by all of their landmarks those alone that
come near to being selected. An error of a mean is one of all landmarks of its chunk, so it has eight bits where they
have four.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jshadow.ops.attention import MASKED, group_queries
from jshadow.ops.layout import top_k
from jshadow.ops.packing import Scaled
from jshadow.policies.shadowkv.key_codecs.base import chosen_rows
from jshadow.policies.shadowkv.landmarks import chunk_scores, keep_landmarks, landmark_products
from pallas_kernels import half_variance
from pallas_kernels.bits import signed_at

GROUP = 4  # neighbouring chunks whose landmarks are read together; as many groups as chunks are chosen


class Levels(struct.PyTreeNode):
    """Landmarks of n chunks, s of each: their transform over a chunk, as `keep_landmarks` keeps rows.

    Attributes:
        means: of chunks [B, h_kv, n, d], or `Scaled` rows of them.
        details: the s - 1 other rows of each chunk side by side [B, h_kv, n, (s - 1) * d], or `Scaled` rows of them
            with s - 1 scales.
    """

    means: Array | Scaled
    details: Array | Scaled

    @property
    def parts(self) -> int:
        """Landmarks of a chunk."""
        mean, details = (x.scale if isinstance(x, Scaled) else x for x in (self.means, self.details))
        return 1 + details.shape[3] // mean.shape[3]


Landmarks = Array | Scaled | Levels


Marks = tuple[Landmarks, Any]  # landmarks and their spread, as a state keeps them


def first_level(landmarks: Landmarks) -> Array | Scaled:
    """What every query reads of them."""
    return landmarks.means if isinstance(landmarks, Levels) else landmarks


def first_spread(spread: Any) -> Array | None:
    """What every query reads of spreads."""
    return spread[0] if isinstance(spread, tuple) else spread


def hadamard(x: Float[Array, "*rows s"]) -> Float[Array, "*rows s"]:
    """Hadamard transform over the last axis, whose size is a power of two: first the sum, then other sums with half of
    the signs turned; s times its own inverse.

    By additions: a GPU would round a product of matrices to TF32, and a CPU takes ten times as long for the sum of
    products.
    """
    half = x.shape[-1] // 2
    if half == 0:
        return x
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([hadamard(first + second), hadamard(first - second)], axis=-1)


def mean_kind(kind: str) -> str:
    """What means are kept as, where details are kept as `kind`."""
    return "int8" if kind == "int4" else kind


def near_chunks(
    scores: Float[Array, "B h Q n"], count: int, first: int
) -> tuple[Int[Array, "B h Q m"], Bool[Array, "B h Q m"]]:  # fmt: skip
    """Chunks that come near to being chosen: the groups whose best chunk is among the best.

    Args:
        scores: by the means; negative where a chunk may not be chosen.
        count: chunks that are chosen in the end.
        first: chunks of the prompt; groups of later ones begin anew, so that they do not hang on the capacity.

    Returns:
        int32 ids, those of a group side by side, and whether each may be chosen.
    """
    # What is there hangs on the scores as what is best does: XLA's CPU backend would compute them once for each.
    scores = jax.lax.optimization_barrier(scores)
    ids, grouped = [], []
    for start, end in ((0, first), (first, scores.shape[3])):
        groups = -(-(end - start) // GROUP)
        ends = [(0, 0)] * 3 + [(0, groups * GROUP - (end - start))]
        padded = jnp.pad(scores[..., start:end], ends, constant_values=-1.0)
        grouped.append(padded.reshape(*scores.shape[:3], groups, GROUP))
        ids.append(np.minimum(np.arange(start, start + groups * GROUP), max(end - 1, 0)).reshape(groups, GROUP))
    every = jnp.concatenate(grouped, axis=3)
    best = top_k(every.max(axis=4), min(count, every.shape[3]))
    shape = (*scores.shape[:3], best.shape[3] * GROUP)
    there = jnp.take_along_axis(every, best[..., None], axis=3).reshape(shape) >= 0
    return jnp.asarray(np.concatenate(ids), jnp.int32)[best].reshape(shape), there


def keep_levels(landmarks: Float[Array, "B h m d"], parts: int, kind: str, dtype: Any) -> Levels:
    """Landmarks [B, h, n * parts, d], a chunk's side by side, as their levels; kind and dtype as `keep_landmarks`, of
    the details."""
    batch, heads, count, dim = landmarks.shape
    chunked = landmarks.astype(jnp.float32).reshape(batch, heads, count // parts, parts, dim)
    rows = hadamard(chunked.swapaxes(3, 4) / parts).swapaxes(3, 4)
    means = keep_landmarks(rows[:, :, :, 0], mean_kind(kind), dtype)
    details = keep_landmarks(rows[:, :, :, 1:], kind, dtype)
    return Levels(means, jax.tree.map(lambda x: x.reshape(*x.shape[:3], x.shape[3] * x.shape[4]), details))


def chosen_marks(marks: Any, later: Any, ids: Int[Array, "B h_kv k"]) -> Any:
    """Of a tree of arrays with a row a chunk, those of chunks [B, h_kv, k]; ids past its end mean those of `later`, a
    tree like it or None."""
    if later is None:
        return jax.tree.map(lambda rows: chosen_rows(rows, None, ids), marks)
    return jax.tree.map(lambda rows, tail: chosen_rows(rows, tail, ids), marks, later)


def gathered_products(rows: Float[Array, "B h R d"], landmarks: Array | Scaled) -> Float[Array, "B h R n"]:
    """`landmark_products` of few rows with landmarks that were gathered, for a GPU: as a sum, XLA reads them where they
    lie, and for a product of matrices it would write them all to memory first."""

    def summed(rows: Array, numbers: Array) -> Array:
        return (rows[:, :, :, None].astype(jnp.float32) * numbers[:, :, None].astype(jnp.float32)).sum(axis=4)

    if not isinstance(landmarks, Scaled):
        return summed(rows, landmarks)
    width = landmarks.codes.shape[3]
    bits = 8 * width // max(rows.shape[3], 1)
    found = jnp.zeros((), jnp.float32)
    for place in range(8 // bits):
        numbers = signed_at(landmarks.codes, place, bits)
        found += summed(rows[..., place * width : (place + 1) * width], numbers)
    return found * landmarks.scale.astype(jnp.float32)[:, :, None, :, 0]


def scores_by_details(
    q: Float[Array, "B T h_q d"], near: Levels, there: Bool[Array, "B h_kv Q m"], valid: Bool[Array, "B T"],
    scale: float, shared: bool, dtype: str = "float32", spread: Float[Array, "B h_kv Q_m s"] | None = None,
) -> Float[Array, "B h_kv Q m"]:  # fmt: skip
    """`chunk_scores` of m chunks by all of their landmarks.

    Args:
        q: after RoPE [B, T, h_q, d].
        near: levels of Q sets of m chunks [B, h_kv, Q * m, ...], one a query or one for all queries.
        there: bool [B, h_kv, Q, m], chunks that may be chosen.
        valid: bool [B, T], queries that count.
        scale: factor on the products.
        shared: the queries choose together (Q = 1).
        dtype: to which the softmax is rounded.
        spread: of the landmarks [B, h_kv, Q * m, s].

    Returns:
        float32 [B, h_kv, Q, m]; -1 where not there.
    """
    batch, heads, sets, count = there.shape
    grouped = group_queries(q, heads)
    group, length = grouped.shape[2:4]
    # A set meets the queries whose it is: all of them, or one.
    asking = grouped.reshape(batch, heads, 1, group * length, -1) if sets == 1 else grouped.transpose(0, 1, 3, 2, 4)
    asking = asking.reshape(batch, heads * sets, -1, q.shape[3])
    parts = near.parts

    def products(level: Array | Scaled, rows: int) -> Array:
        """With each of the rows of a chunk, [B, h_kv * Q, R, m, rows]."""
        shape = (batch, heads * sets, count * rows)
        level = jax.tree.map(lambda x: x.reshape(*shape, x.shape[3] // rows), level)
        found = jax.lax.platform_dependent(asking, level, cpu=landmark_products, default=gathered_products)
        return found.reshape(*asking.shape[:3], count, rows)

    found = scale * jnp.concatenate([products(near.means, 1), products(near.details, parts - 1)], axis=4)
    back = hadamard(found)
    if spread is not None:
        one = spread.reshape(batch, heads * sets, count * parts, 1)
        back += half_variance(asking, one, scale).reshape(back.shape)
    logits = back.reshape(batch, heads, sets, -1, count * parts)
    if sets == 1:
        logits = logits.reshape(batch, heads, group, length, count * parts)
    else:
        logits = logits.transpose(0, 1, 3, 2, 4)
    mask = jnp.repeat(there, parts, axis=3)[:, :, None]
    return chunk_scores(jnp.where(mask, logits, MASKED), valid, shared, dtype, parts)
