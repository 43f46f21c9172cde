"""Scoring chunks (ShadowKV, algorithm 2), in three steps. A fourth one, `kept.choose`, takes the best of them.

1. `landmark_scores` scores every chunk by the softmax mass on its landmarks. With two levels, it is that on its mean.
2. `by_landmarks` returns these chunks. With two levels, it first scores the best candidates again, by all of
   their landmarks.
3. `finalists` with a second round takes WIDER times as many chunks, rebuilds their keys, and scores them by these keys.

Sizes: B rows, h_kv KV heads, T queries of a step, n chunks, k chosen chunks. Q is the number of sets of scores: 1 if
the queries choose together (`Scoring.shared`), else T.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from jshadow.ops.attention import MASKED, group_queries, grouped_product
from jshadow.ops.layout import top_k
from jshadow.ops.packing import Scaled
from jshadow.policies.shadowkv.landmark_levels import (
    GROUP,
    Levels,
    Marks,
    first_level,
    first_logits,
    first_rows,
    first_spread,
    level_logits,
    marks_at,
    two_levels,
)
from jshadow.policies.shadowkv.landmarks import EXACT
from jshadow.policies.shadowkv.records import WIDER

MANTISSA = {"float32": (8, 23), "bfloat16": (8, 7)}  # exponent and mantissa bits of the dtypes of scores


class Scoring(NamedTuple):
    """How queries score chunks.

    Attributes:
        scale: factor on products of queries and keys.
        shared: whether the queries of a step choose together.
        dtype: dtype that the softmax is rounded to, a key of MANTISSA.
    """

    scale: float
    shared: bool = False
    dtype: str = "float32"


class Query(NamedTuple):
    """The queries that choose chunks.

    Attributes:
        q: queries after RoPE [B, T, h_q, d].
        valid: which queries are real, bool [B, T]. The others choose nothing.
        scoring: how they score chunks.
    """

    q: Array
    valid: Array
    scoring: Scoring


# 1. The scores of all chunks


def landmark_scores(query: Query, marks: Sequence[Marks]) -> Float[Array, "B h_kv Q n"]:
    """Score all chunks by the landmarks that every query reads, float32; -1 where a chunk may not be chosen."""
    if not has_kernel(query.scoring, joined=len(marks) > 1):
        return product_scores(query, marks)
    landmarks, is_open = first_level(marks[0].landmarks), marks[0].open[:, :, 0]
    options: dict[str, Any] = {"scale": query.scoring.scale, "spread": first_spread(marks[0].spread)}
    options["landmark_scale"] = landmarks.scale if isinstance(landmarks, Scaled) else None
    return pallas_kernels.chunk_scores(query.q, first_rows(landmarks), is_open, **options)


def has_kernel(scoring: Scoring, *, joined: bool) -> bool:
    """Return whether a kernel scores the landmarks: float32 scores for each query, of the prompt's chunks only."""
    return not joined and not scoring.shared and scoring.dtype == "float32"


def product_scores(query: Query, marks: Sequence[Marks]) -> Float[Array, "B h_kv Q n"]:
    """Compute `landmark_scores` by XLA, without the kernel."""
    logits, parts = zip(*(first_logits(query.q, part, query.scoring.scale) for part in marks), strict=True)
    every = logits[0] if len(logits) == 1 else jnp.concatenate(logits, axis=-1)
    return chunk_scores(every, query.valid, query.scoring, parts[0])


def chunk_scores(
    logits: Float[Array, "B h_kv group T m"], valid: Bool[Array, "B T"], scoring: Scoring, parts: int = 1
) -> Float[Array, "B h_kv Q n"]:
    """Score each chunk: a softmax over all candidates in each query head, then the maximum over a group's heads.

    Args:
        logits: the logits of m landmarks, MASKED where a chunk is not a candidate.
        valid: which queries are real, bool [B, T].
        scoring: if shared, masses are summed over the queries before the maximum.
        parts: number of logits of a chunk, whose masses are added; m = n * parts.

    Returns:
        float32 [B, h_kv, Q, n]; -1 where a chunk is not a candidate.
    """
    there = logits > MASKED
    mass = jnp.where(there & valid[:, None, None, :, None], jax.nn.softmax(logits, axis=-1), 0.0)
    mass = lax.reduce_precision(mass, *MANTISSA[scoring.dtype])
    if parts > 1:
        mass = mass.reshape(*mass.shape[:4], mass.shape[4] // parts, parts).sum(axis=-1)
        there = there[..., ::parts]
    if scoring.shared:
        mass, there = mass.sum(axis=3, keepdims=True), there.any(axis=3, keepdims=True)
    return jnp.where(there[:, :, 0], mass.max(axis=2), -1.0)


# 2. The best chunks by their landmarks


class Finalists(NamedTuple):
    """The chunks of which the best are chosen.

    Attributes:
        scores: float32 [B, h_kv, Q, m]; -1 where a chunk may not be chosen.
        ids: their chunks in rising order, int32 [B, h_kv, Q, m]. None: entry i is chunk i.
    """

    scores: Array
    ids: Array | None = None

    def best(self, count: int) -> tuple[Array, Array]:
        """Return the `count` best chunks, int32 [B, h_kv, Q, count], the best first, and their scores."""
        order = top_k(self.scores, count)
        ids = order if self.ids is None else jnp.take_along_axis(self.ids, order, axis=3)
        return ids, jnp.take_along_axis(self.scores, order, axis=3)


def by_landmarks(query: Query, marks: Sequence[Marks], scores: Array, count: int) -> Finalists:
    """Return the finalists by their landmarks.

    Args:
        query: the queries.
        marks: the chunks.
        scores: the scores of all chunks, from `landmark_scores`.
        count: number of chunks that are chosen in the end.
    """
    if not isinstance(marks[0].landmarks, Levels):
        return Finalists(scores)
    if has_kernel(query.scoring, joined=len(marks) > 1):
        landmarks, spread = marks[0].landmarks, None if marks[0].spread is None else marks[0].spread[1]
        options: dict[str, Any] = {"count": count, "size": GROUP, "scale": query.scoring.scale}
        return Finalists(*pallas_kernels.level_scores(query.q, scores, two_levels(landmarks, spread), **options))
    near, there = near_chunks(scores, count, marks[0].open.shape[3])
    levels, spread = marks_at(marks, near.reshape(*near.shape[:2], -1))
    logits = level_logits(query.q, levels, spread, near.shape[2], query.scoring.scale)
    return Finalists(scores_where(logits, there, query, levels.parts), near)


def near_chunks(
    scores: Float[Array, "B h Q n"], count: int, first: int
) -> tuple[Int[Array, "B h Q m"], Bool[Array, "B h Q m"]]:
    """Return the candidates whose landmarks are all read: the `count` best groups of GROUP neighboring chunks.

    Args:
        scores: scores by the means; negative where a chunk may not be chosen. A group has the score of its best chunk.
        count: number of chunks that are chosen in the end.
        first: number of chunks of the prompt. No group spans the prompt and later chunks, so that results do not depend
            on the capacity.

    Returns:
        The ids, int32, in rising order, so that the first of equal chunks is chosen, and whether each may be chosen.
    """
    # Without this barrier, XLA's CPU backend computes the scores twice.
    scores = lax.optimization_barrier(scores)
    ids, grouped = [], []
    for start, end in ((0, first), (first, scores.shape[3])):
        groups = -(-(end - start) // GROUP)
        ends = [(0, 0)] * 3 + [(0, groups * GROUP - (end - start))]
        padded = jnp.pad(scores[..., start:end], ends, constant_values=-1.0)
        grouped.append(padded.reshape(*scores.shape[:3], groups, GROUP))
        ids.append(np.minimum(np.arange(start, start + groups * GROUP), max(end - 1, 0)).reshape(groups, GROUP))
    every = jnp.concatenate(grouped, axis=3)
    best = jnp.sort(top_k(every.max(axis=4), min(count, every.shape[3])))
    shape = (*scores.shape[:3], best.shape[3] * GROUP)
    there = jnp.take_along_axis(every, best[..., None], axis=3) >= 0
    there = there.reshape(shape)
    return jnp.asarray(np.concatenate(ids), jnp.int32)[best].reshape(shape), there


def scores_where(logits: Array, there: Array, query: Query, parts: int) -> Array:
    """Return `chunk_scores` of m chunks by logits [B, h_kv, group, T, m * parts]; `there` is bool [B, h_kv, Q, m]."""
    is_there = jnp.repeat(there, parts, axis=3)[:, :, None]  # for all heads of a group, and all queries if Q = 1
    return chunk_scores(jnp.where(is_there, logits, MASKED), query.valid, query.scoring, parts)


# 3. The best chunks by their keys


def finalists(
    query: Query, marks: Sequence[Marks], scores: Array, count: int, rebuild: Callable[[Array], Array] | None
) -> Finalists:
    """Return the chunks of which the `count` best are chosen, with their last scores.

    With a second round, three times as many chunks are rebuilt, but no more rows are moved from the host. The choice is
    better, because a landmark is a mean and hides single keys.

    Args:
        query: the queries.
        marks: the prompt's chunks, and the chunks that joined later if there are any.
        scores: the scores of all chunks, from `landmark_scores`.
        count: number of chunks to choose.
        rebuild: None: one round. Otherwise it maps chunks int32 [B, h_kv, m] to keys after RoPE [B, h_kv, m * c, d].
    """
    if rebuild is None:
        return by_landmarks(query, marks, scores, count)
    wider = min(WIDER * count, scores.shape[3])
    found = by_landmarks(query, marks, scores, wider)
    ids, scores = found.best(min(wider, found.scores.shape[3]))
    order = jnp.argsort(ids, axis=3)
    ids, there = (jnp.take_along_axis(x, order, axis=3) for x in (ids, scores >= 0))
    keys = rebuild(ids.reshape(*ids.shape[:2], -1))
    return Finalists(scores_by_keys(query, keys, there), ids)


def scores_by_keys(
    query: Query, keys: Float[Array, "B h_kv tokens d"], there: Bool[Array, "B h_kv Q m"]
) -> Float[Array, "B h_kv Q m"]:
    """Score m chunks by all of their keys [B, h_kv, Q * m * c, d]; -1 where a chunk may not be chosen."""
    batch, heads, sets, count = there.shape
    grouped, size = group_queries(query.q, heads), keys.shape[2] // (sets * count)
    keys = keys.reshape(batch, heads, sets, count * size, keys.shape[3])
    if sets == 1:
        logits = grouped_product("bhgtd,bhnd->bhgtn", grouped, keys[:, :, 0], EXACT)
    else:
        logits = jnp.einsum("bhgtd,bhtnd->bhgtn", grouped, keys, precision=EXACT, preferred_element_type=jnp.float32)
    return scores_where(logits * query.scoring.scale, there, query, size)
