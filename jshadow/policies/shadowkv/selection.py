"""Choosing chunks (ShadowKV, algorithm 2), from top to bottom.

1. `landmark_scores`: every chunk is scored by the softmax mass on its landmarks, or, with two levels, on its mean.
2. `best_by_landmarks`: the best chunks. With two levels, the chunks near the best ones are scored again by all of their
   landmarks.
3. `best_chunks`: with a second round, the keys of twice as many chunks are rebuilt, and those keys choose.
4. `in_turn`: a chunk that stays selected keeps its place, so that its values can stay where they are. A fetch then
   writes only into the places of dropped chunks, in the buffer that the step before has filled.

Sizes: B rows, h_kv KV heads, T queries of a step, n chunks, k chosen ones, Q sets of scores: T, or 1 if shared.
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
)
from jshadow.policies.shadowkv.landmarks import EXACT
from jshadow.policies.shadowkv.records import WIDER

MANTISSA = {"float32": (8, 23), "bfloat16": (8, 7)}  # exponent and mantissa bits of the dtypes of scores
PLACES = 256  # places compared with all chosen chunks at once; the largest temporary is [B, h_kv, k, PLACES]


class Scoring(NamedTuple):
    """How queries score chunks.

    Attributes:
        scale: factor on products of queries and keys.
        shared: the queries of a step choose together.
        dtype: dtype that the softmax is rounded to.
    """

    scale: float
    shared: bool = False
    dtype: str = "float32"


class Query(NamedTuple):
    """The queries that choose.

    Attributes:
        q: after RoPE [B, T, h_q, d].
        valid: bool [B, T]; the other queries choose nothing.
        scoring: how they score chunks.
    """

    q: Array
    valid: Array
    scoring: Scoring


# 1. Every chunk's score


def landmark_scores(query: Query, marks: Sequence[Marks]) -> Float[Array, "B h_kv Q n"]:
    """Float32 scores of all chunks by the landmarks that every query reads; -1 where a chunk may not be chosen."""
    if not has_kernel(query.scoring, joined=len(marks) > 1):
        return product_scores(query, marks)
    landmarks, is_open = first_level(marks[0].landmarks), marks[0].open[:, :, 0]
    options: dict[str, Any] = {"scale": query.scoring.scale, "spread": first_spread(marks[0].spread)}
    options["landmark_scale"] = landmarks.scale if isinstance(landmarks, Scaled) else None
    return pallas_kernels.chunk_scores(query.q, first_rows(landmarks), is_open, **options)


def has_kernel(scoring: Scoring, *, joined: bool) -> bool:
    """Whether a kernel scores the landmarks: float32 scores, each query its own, of the prompt's chunks alone."""
    return not joined and not scoring.shared and scoring.dtype == "float32"


def product_scores(query: Query, marks: Sequence[Marks]) -> Float[Array, "B h_kv Q n"]:
    """`landmark_scores` by XLA."""
    logits, parts = zip(*(first_logits(query.q, part, query.scoring.scale) for part in marks), strict=True)
    every = logits[0] if len(logits) == 1 else jnp.concatenate(logits, axis=-1)
    return chunk_scores(every, query.valid, query.scoring, parts[0])


def chunk_scores(
    logits: Float[Array, "B h_kv group T m"], valid: Bool[Array, "B T"], scoring: Scoring, parts: int = 1
) -> Float[Array, "B h_kv Q n"]:
    """Score of each chunk: the softmax over all candidates of a query head, then the maximum over the heads of a group.

    Args:
        logits: MASKED where there is no candidate.
        valid: bool [B, T], queries that count.
        scoring: if shared, masses are summed over the queries before the maximum.
        parts: logits of a chunk, whose masses are added up; m = n * parts.

    Returns:
        float32 [B, h_kv, Q, n]; -1 where a chunk is no candidate.
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


def best_by_landmarks(query: Query, marks: Sequence[Marks], scores: Array, count: int) -> tuple[Array, Array]:
    """The best chunks, int32 [B, h_kv, Q, count], and their scores.

    Args:
        query: the queries.
        marks: the chunks.
        scores: of all chunks, from `landmark_scores`.
        count: chunks to choose.
    """
    if not isinstance(marks[0].landmarks, Levels):
        ids = top_k(scores, count)
        return ids, jnp.take_along_axis(scores, ids, axis=3)
    near, there = near_chunks(scores, count, marks[0].open.shape[3])
    levels, spread = marks_at(marks, near.reshape(*near.shape[:2], -1))
    logits = level_logits(query.q, levels, spread, near.shape[2], query.scoring.scale)
    return best_of(near, scores_where(logits, there, query, levels.parts), count)


def near_chunks(
    scores: Float[Array, "B h Q n"], count: int, first: int
) -> tuple[Int[Array, "B h Q m"], Bool[Array, "B h Q m"]]:
    """Chunks that come near to being chosen: all chunks of the groups of neighbours whose best chunk is among the best.

    Args:
        scores: by the means; negative where a chunk may not be chosen.
        count: chunks that are chosen in the end.
        first: chunks of the prompt. Groups do not span the prompt and later chunks, so that results do not depend on
            the capacity.

    Returns:
        int32 ids, those of a group side by side, and whether each may be chosen.
    """
    # Keep the scores shared: without this barrier XLA's CPU backend computes them twice.
    scores = lax.optimization_barrier(scores)
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


def scores_where(logits: Array, there: Array, query: Query, parts: int) -> Array:
    """`chunk_scores` of m chunks by logits [B, h_kv, group, T, m * parts]; `there` bool [B, h_kv, Q, m]."""
    is_there = jnp.repeat(there, parts, axis=3)[
        :, :, None
    ]  # one for all heads of a group, and for all queries if Q = 1
    return chunk_scores(jnp.where(is_there, logits, MASKED), query.valid, query.scoring, parts)


def best_of(ids: Array, scores: Array, count: int) -> tuple[Array, Array]:
    """Of chunks ids and their scores, both [B, h_kv, Q, m], the best ones."""
    order = top_k(scores, count)
    return jnp.take_along_axis(ids, order, axis=3), jnp.take_along_axis(scores, order, axis=3)


# 3. The chosen chunks


def best_chunks(
    query: Query, marks: Sequence[Marks], scores: Array, count: int, rebuild: Callable[[Array], Array] | None
) -> tuple[Array, Array]:
    """The chunks that each query chooses, int32 [B, h_kv, Q, count], and their scores; -1 for no chunk.

    A second round costs the rebuilding of three times the chunks, but nothing more moves from the host. It is better
    because a landmark blurs its tokens: what a mean hides, the keys show.

    Args:
        query: the queries.
        marks: the prompt's chunks, and those that joined later if there are any.
        scores: of all chunks, from `landmark_scores`.
        count: chunks to choose.
        rebuild: for a second round: the keys after RoPE [B, h_kv, m * c, d] of chunks int32 [B, h_kv, m].
    """
    if rebuild is None:
        return best_by_landmarks(query, marks, scores, count)
    ids, scores = best_by_landmarks(query, marks, scores, min(WIDER * count, scores.shape[3]))
    keys = rebuild(ids.reshape(*ids.shape[:2], -1))
    return best_of(ids, scores_by_keys(query, keys, scores >= 0), count)


def scores_by_keys(
    query: Query, keys: Float[Array, "B h_kv tokens d"], there: Bool[Array, "B h_kv Q m"]
) -> Float[Array, "B h_kv Q m"]:
    """Scores of m chunks by all of their keys [B, h_kv, Q * m * c, d]; -1 where one may not be chosen."""
    batch, heads, sets, count = there.shape
    grouped, size = group_queries(query.q, heads), keys.shape[2] // (sets * count)
    keys = keys.reshape(batch, heads, sets, count * size, keys.shape[3])
    if sets == 1:
        logits = grouped_product("bhgtd,bhnd->bhgtn", grouped, keys[:, :, 0], EXACT)
    else:
        logits = jnp.einsum("bhgtd,bhtnd->bhgtn", grouped, keys, precision=EXACT, preferred_element_type=jnp.float32)
    return scores_where(logits * query.scoring.scale, there, query, size)


# 4. Their order


def in_turn(ids: Array, valid: Array, asked: Array, resident: Array) -> tuple[Array, Array, Array, Array]:
    """Order the selections of successive queries so that what stays selected keeps its place.

    Args:
        ids: int32 [B, h, Q, k], distinct in each selection.
        valid: bool [B, h, Q, k]; what is not valid is not selected.
        asked: bool [B, Q]; a query that did not ask leaves everything as it is.
        resident: what was selected before, int32 [B, h, k], distinct; -1: nothing at that place.

    Returns:
        ids and valid in that order, whether each was selected by the query before it too, and the new resident.
    """

    def follow(resident: Array, one: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        ids, valid, asked = one
        order = in_place(ids, valid, resident)
        ids, valid = (jnp.take_along_axis(x, order, axis=2) for x in (ids, valid))
        after = jnp.where(asked[:, None, None], jnp.where(valid, ids, -1), resident)
        return after, (ids, valid, valid & (ids == resident))

    if ids.shape[2] == 1:
        resident, parts = follow(resident, (ids[:, :, 0], valid[:, :, 0], asked[:, 0]))
        return *(part[:, :, None] for part in parts), resident  # type: ignore[return-value]
    queries = (ids.transpose(2, 0, 1, 3), valid.transpose(2, 0, 1, 3), asked.T)
    resident, parts = lax.scan(follow, resident, queries)
    return *(part.transpose(1, 2, 0, 3) for part in parts), resident  # type: ignore[return-value]


def in_place(new: Array, valid: Array, resident: Array) -> Array:
    """Which of the new units [B, h, k] each place gets, int32 [B, h, k].

    A unit that is resident gets its own place again; the others get the free places in turn.
    """
    count = new.shape[2]
    size = min(count, PLACES)
    blocks = -(-count // size)
    # Places past the last one get -1, which no unit is.
    padded = jnp.pad(resident, ((0, 0), (0, 0), (0, blocks * size - count)), constant_values=-1)
    tiles = padded.reshape(*resident.shape[:2], blocks, size).transpose(2, 0, 1, 3)

    def same(tile: Array) -> Array:
        return valid[..., :, None] & (new[..., :, None] == tile[..., None, :])  # [B, h, new, place]

    def look(found: Array, tile: Array) -> tuple[Array, Array]:
        there = same(tile)
        return found | there.any(axis=-1), there.any(axis=-2)

    found, taken = over_blocks(look, jnp.zeros_like(valid), tiles)
    free = ~taken.transpose(1, 2, 0, 3).reshape(padded.shape)
    # The n-th unit without a place gets the n-th free place; the two fillers, 0 and -1, never meet.
    number = jnp.where(found, 0, jnp.cumsum(~found, axis=-1, dtype=jnp.int32))
    turn = jnp.where(free, jnp.cumsum(free, axis=-1, dtype=jnp.int32), -1)
    index = jnp.arange(count, dtype=jnp.int32)[:, None]

    def take(nothing: None, one: tuple[Array, Array]) -> tuple[None, Array]:
        tile, turn = one
        pair = same(tile) | (number[..., :, None] == turn[..., None, :])
        # One entry of each column is true. Summing its index is several times cheaper than argmax on a CPU.
        return nothing, jnp.where(pair, index, 0).sum(axis=-2)

    turns = turn.reshape(*resident.shape[:2], blocks, size).transpose(2, 0, 1, 3)
    _, order = over_blocks(take, None, (tiles, turns))
    return order.transpose(1, 2, 0, 3).reshape(padded.shape)[..., :count]


def over_blocks(function: Callable[..., Any], start: Any, blocks: Any) -> tuple[Any, Any]:
    """lax.scan over the leading axis, without a loop for a single block."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return lax.scan(function, start, blocks)
    last, out = function(start, jax.tree.map(lambda x: x[0], blocks))
    return last, jax.tree.map(lambda x: x[None], out)
