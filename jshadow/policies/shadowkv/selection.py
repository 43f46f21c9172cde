"""Which chunks are scored, selected, kept on the device, and kept exactly (ShadowKV, algorithm 2).

1. `landmark_scores` scores every chunk by the softmax mass on its landmarks. With two levels, it is that on its mean.
2. `by_landmarks` returns these chunks. With two levels, it first scores the best candidates again, by all of
   their landmarks.
3. `finalists` with a second round takes WIDER times as many chunks, rebuilds their keys, and scores them by these keys.
4. `choose` takes the best of them, and notes them in the cache of recently selected chunks.

The cache has P places for each KV head. With `CacheSpec.keep`, it holds the keys and values of its chunks on the
device. Attention reads the selected chunks in rising order of their ids, wherever they lie in the cache. So no result
depends on the cache: neither on its size nor on the steps before.

Two kinds of chunks should stay exact (outliers). The keys of the first kind differ from their landmark, so the chunk is
not selected when it should be; the first tokens of a text are an example. The second kind has a large coding error, so
its keys are rebuilt wrongly; a number in a repetitive text is an example. The paper keeps the first kind.
`Choice(outlier_rule="both")` keeps both.

Sizes: B rows, h_kv KV heads, T queries of a step, n chunks, k chosen chunks of c tokens of width d. Q is the number of
sets of scores: 1 if the queries choose together (`Scoring.shared`), else T.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

import pallas_kernels
from jshadow.cache.records import Fetched, Kept, KeyValues, Selection
from jshadow.ops.attention import MASKED, Piece, group_queries, grouped_product
from jshadow.ops.layout import top_k
from jshadow.ops.packing import Scaled
from jshadow.policies.shadowkv.key_codecs import squared_error
from jshadow.policies.shadowkv.landmarks import (
    EXACT,
    GROUP,
    Levels,
    Marks,
    chunk_landmarks,
    first_level,
    first_logits,
    first_rows,
    first_spread,
    level_logits,
    marks_at,
    two_levels,
)
from jshadow.policies.shadowkv.settings import MANTISSA, WIDER, Scoring
from jshadow.policies.shadowkv.state import PlusLive, Preload, ShadowLive
from pallas_kernels import MOST_AGE, places_of


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

    `logits` are those of m landmarks, `parts` for each chunk, whose masses are added. They are MASKED where a chunk is
    not a candidate, and the result is -1 there. Shared masses are summed over the queries before the maximum.
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
    """Return the finalists of `count` chunks by their landmarks. `scores` are those of `landmark_scores`."""
    if not isinstance(marks[0].landmarks, Levels):
        return Finalists(scores)
    if has_kernel(query.scoring, joined=len(marks) > 1):
        landmarks, spread = marks[0].landmarks, None if marks[0].spread is None else marks[0].spread[1]
        options: dict[str, Any] = {"count": count, "size": GROUP, "scale": query.scoring.scale}
        return Finalists(*pallas_kernels.level_scores(query.q, scores, two_levels(landmarks, spread), **options))
    near, there = near_chunks(scores, count, marks[0].open.shape[3])
    levels, spread = marks_at(marks, near.reshape(*near.shape[:2], -1))
    logits = level_logits(query.q, levels, spread, near.shape[2], query.scoring.scale)
    return Finalists(_scores_where(logits, there, query, levels.parts), near)


def near_chunks(
    scores: Float[Array, "B h Q n"], count: int, first: int
) -> tuple[Int[Array, "B h Q m"], Bool[Array, "B h Q m"]]:
    """Return the candidates whose landmarks are all read: the `count` best groups of GROUP neighboring chunks.

    A group has the score of its best chunk. The ids are in rising order, so that the first of equal chunks is chosen.
    The mask tells which may be chosen: those whose score is not negative. `first` is the number of chunks of the
    prompt. No group spans the prompt and later chunks, so that results do not depend on the capacity.
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


def _scores_where(logits: Array, there: Array, query: Query, parts: int) -> Array:
    """Return `chunk_scores` of m chunks by logits [B, h_kv, group, T, m * parts]; `there` is bool [B, h_kv, Q, m]."""
    is_there = jnp.repeat(there, parts, axis=3)[:, :, None]  # for all heads of a group, and all queries if Q = 1
    return chunk_scores(jnp.where(is_there, logits, MASKED), query.valid, query.scoring, parts)


# 3. The best chunks by their keys


def finalists(
    query: Query, marks: Sequence[Marks], scores: Array, count: int, rebuild: Callable[[Array], Array] | None
) -> Finalists:
    """Return the chunks of which the `count` best are chosen, with their last scores.

    `scores` are those of `landmark_scores`. `rebuild` is None for one round. Otherwise it maps chunks int32 [B, h_kv,
    m]
    to keys after RoPE [B, h_kv, m * c, d]. Then three times as many chunks are rebuilt, but no more rows are moved from
    the host. The choice is better, because a landmark is a mean and hides single keys.
    """
    if rebuild is None:
        return by_landmarks(query, marks, scores, count)
    wider = min(WIDER * count, scores.shape[3])
    found = by_landmarks(query, marks, scores, wider)
    ids, scores = found.best(min(wider, found.scores.shape[3]))
    order = jnp.argsort(ids, axis=3)
    ids, there = (jnp.take_along_axis(x, order, axis=3) for x in (ids, scores >= 0))
    keys = rebuild(ids.reshape(*ids.shape[:2], -1))
    return Finalists(_scores_by_keys(query, keys, there), ids)


def _scores_by_keys(
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
    return _scores_where(logits * query.scoring.scale, there, query, size)


_AFTER_ALL = jnp.iinfo(jnp.int32).max  # larger than the id of any chunk


def empty_cache(shape: tuple[int, int], places: int, *, aged: bool) -> tuple[Array, Array | None]:
    """Return the ids and the ages of the chunks in an empty cache, int32 [B, h_kv, places]; no ages unless `aged`."""
    ids = jnp.full((*shape, places), -1, jnp.int32)
    return ids, jnp.full_like(ids, MOST_AGE) if aged else None


# Choosing


class Chunks(NamedTuple):
    """The chunks that the queries of a step choose, and the cache of chunks after the step.

    Attributes:
        ids: the chosen chunks in rising order, int32 [B, h_kv, Q, k]. Any chunk where not valid.
        valid: which of them are chosen, bool [B, h_kv, Q, k]. They are the first ones.
        total: number of chosen chunks of all queries, int32 [B, h_kv].
        hits: how many of them were in the cache, or among the chunks of the query before, int32 [B, h_kv].
        resident, ages: the cache after the step, as in `ShadowLive`.
        places: for one query, the place of each chunk in the cache, int32 [B, h_kv, k], as in `Kept`.
        missed: for one query, the indices of the chunks that were not in the cache, int32 [B, h_kv, k], as in `Kept`.
    """

    ids: Array
    valid: Array
    total: Array
    hits: Array
    resident: Array
    ages: Array | None
    places: Array | None = None
    missed: Array | None = None


def choose(candidates: Finalists, asked: Array, count: int, resident: Array, ages: Array | None) -> Chunks:
    """Choose the `count` best finalists of each query, and note them in the cache (`resident` and `ages`).

    `asked`, bool [B, Q], tells which queries select. In each row these queries come first. A row in which no query
    selects leaves the cache as it is.
    """
    scores, ids = candidates
    if scores.shape[2] > 1:
        return _choose_each(candidates, asked, count, resident, ages)
    numbers = None if ids is None else ids[:, :, 0]
    chosen = pallas_kernels.select_chunks(
        scores[:, :, 0], asked[:, 0], resident, count=count, ages=ages, numbers=numbers
    )
    valid = jnp.arange(count, dtype=jnp.int32) < chosen.total[:, :, None]
    sides = (chosen.held, chosen.ages, chosen.places, chosen.missed)
    return Chunks(chosen.ids[:, :, None], valid[:, :, None], chosen.total, chosen.hits, *sides)


def _choose_each(candidates: Finalists, asked: Array, count: int, resident: Array, ages: Array | None) -> Chunks:
    """Do what `choose` does for several queries. Afterwards the cache holds the chunks of the last query only."""
    scores, ids = candidates
    size = scores.shape[3]
    order = top_k(scores, count)
    there = asked[:, None, :, None] & (jnp.take_along_axis(scores, order, axis=3) >= 0)
    order = jnp.sort(jnp.where(there, order, size))
    valid, order = order < size, jnp.minimum(order, size - 1)
    chosen = order if ids is None else jnp.take_along_axis(ids, order, axis=3)
    known = jnp.where(valid, chosen, _AFTER_ALL)
    first = _are_in(jnp.sort(resident)[:, :, None], known[:, :, :1])
    hit = valid & jnp.concatenate([first, _are_in(known[:, :, :-1], known[:, :, 1:])], axis=2)
    last = jnp.maximum(asked.sum(axis=1) - 1, 0)[:, None, None, None]
    newest = jnp.take_along_axis(jnp.where(valid, chosen, -1), last, axis=2)[:, :, 0]
    changed, spare = asked.any(axis=1)[:, None, None], ((0, 0), (0, 0), (0, resident.shape[2] - count))
    after = jnp.where(changed, jnp.pad(newest, spare, constant_values=-1), resident)
    if ages is not None:
        ages = jnp.where(changed, jnp.where(after >= 0, 0, MOST_AGE), ages)
    total, hits = (mask.sum(axis=(2, 3), dtype=jnp.int32) for mask in (valid, hit))
    return Chunks(chosen, valid, total, hits, after, ages)


def _are_in(rising: Int[Array, "B h Q m"], ids: Int[Array, "B h Q k"]) -> Bool[Array, "B h Q k"]:
    """Return which ids are in the list `rising` of the same query."""
    one, other = (x.reshape(-1, x.shape[3]) for x in (rising, ids))
    at = jax.vmap(jnp.searchsorted)(one, other).reshape(ids.shape)
    return jnp.take_along_axis(rising, jnp.minimum(at, rising.shape[3] - 1), axis=3) == ids


# The rows of the cache


def kept_rows(live: ShadowLive, chosen: Chunks) -> Kept | None:
    """Return the cache on the device, and which of the chosen chunks it lacks. None without `CacheSpec.keep`."""
    if live.values is None or live.keys is None:
        return None
    if chosen.missed is not None and chosen.places is not None:
        return Kept(live.values, live.keys, chosen.places, chosen.missed, chosen.total - chosen.hits)
    # A step of several queries does not read the cache. It fetches all chunks into a new array, in their order.
    shape = chosen.ids.shape[:2]
    valid = chosen.valid.reshape(*shape, -1)
    places = jnp.broadcast_to(jnp.arange(valid.shape[2], dtype=jnp.int32), valid.shape)
    none = jnp.zeros((*valid.shape, live.values.shape[3]), live.values.dtype)
    return Kept(none, none, places, places_of(valid), chosen.total)


def received(live: ShadowLive, selection: Selection, fetched: Fetched, queries: int) -> ShadowLive:
    """Return the state with the cache after a fetch for Q queries. Without `CacheSpec.keep` it does not change.

    After several queries, the cache holds the chunks of the last one in its first places. Their keys are rebuilt again,
    as many at once as in a step with one query. XLA's CPU backend may round keys differently when it rebuilds more of
    them at once. Without this, results would depend on how long a chunk stays in the cache.
    """
    if live.values is None or live.keys is None:
        return live
    assert fetched.k is not None
    if queries == 1:
        return live.replace(values=fetched.v, keys=fetched.k)
    assert selection.rebuild is not None
    asked = selection.valid.reshape(*selection.valid.shape[:2], queries, -1).any(axis=3)
    last = queries - 1 - jnp.argmax(asked[:, :, ::-1], axis=2)
    several = fetched.v.reshape(*asked.shape, -1, live.values.shape[3])
    values = jnp.take_along_axis(several, last[:, :, None, None, None], axis=2)[:, :, 0]
    count, there = values.shape[2], asked.any(axis=2)[:, :, None, None]
    units = jnp.maximum(live.resident[:, :, :count], 0)
    tokens = values.reshape(*values.shape[:2], count * selection.rebuild.unit, -1)
    keys = selection.rebuild.keys(units, tokens).astype(live.keys.dtype)

    def rows(new: Array, old: Array) -> Array:
        first = jnp.where(there, new.reshape(values.shape), old[:, :, :count])
        return jnp.concatenate([first, old[:, :, count:]], axis=2)

    return live.replace(values=rows(values, live.values), keys=rows(keys, live.keys))


def own_piece(fetched: Fetched, queries: int, width: int) -> Piece:
    """Return the fetched chunks of some queries as a piece for attention. `width` is the width of a head.

    With several queries, each attends only to its own k chunks. With one, the valid chunks are the first ones.
    """
    assert fetched.k is not None
    if queries == 1 and fetched.places is not None:
        assert fetched.count is not None
        return Piece(fetched.k, fetched.v, fetched.count[:, :, None, None], fetched.places)
    if queries == 1:
        return Piece(fetched.k, fetched.v, fetched.valid[:, :, None])
    # With several queries, the rows lie in the order of the chunks, with and without places.
    shape = (*fetched.v.shape[:2], queries)
    k, v = (x.reshape(*shape, -1, width) for x in (fetched.k, fetched.v))
    return Piece(k, v, fetched.valid.reshape(*shape, -1))


# The published code's first keys


def preloaded_chunks(query: Query, marks: Marks, count: int) -> Array:
    """Return the chunks that the prompt's last query (T = 1) selects, int32 [B, h_kv, count]; -1 in unused entries."""
    ids, scores = by_landmarks(query, (marks,), product_scores(query, (marks,)), count).best(count)
    return jnp.where(scores >= 0, ids, -1)[:, :, 0]


def exact_keys(preload: Preload, fresh: Array, fetched: Fetched, valid: Array) -> tuple[Array, Array]:
    """Replace rebuilt keys by exact keys, for those preloaded chunks that every query so far has selected.

    `fresh`, bool [B, h_kv, n], tells which of them every query before this step has selected. `fetched` has n chunks
    for each of Q queries: keys [B, h_kv, Q * n * c, d]. `valid`, bool [B, T], tells which queries are real. Return the
    keys, in the shape of fetched.k, and `fresh` after this step.
    """
    assert fetched.k is not None
    batch, heads, count = preload.ids.shape
    rows, size = fetched.ids.shape[2], preload.keys.shape[2] // max(count, 1)
    queries = rows // count
    chosen = jnp.where(fetched.valid, fetched.ids, -2)
    chosen = chosen.reshape(batch, heads, queries, count)
    same = chosen[..., :, None] == preload.ids[:, :, None, None, :]  # [B, h_kv, Q, chosen, preloaded]
    idle = ~(valid if queries > 1 else valid.any(axis=1, keepdims=True))[:, None, :, None]
    still = fresh[:, :, None] & jnp.cumprod(same.any(axis=3) | idle, axis=2).astype(bool)  # [B, h_kv, Q, preloaded]
    same = same & still[:, :, :, None, :]
    slot = same.argmax(axis=-1).reshape(batch, heads, rows)
    exact = preload.keys.reshape(batch, heads, count, -1)
    exact = jnp.take_along_axis(exact, slot[..., None], axis=2).reshape(fetched.k.shape)
    is_exact = jnp.repeat(same.any(axis=-1).reshape(batch, heads, rows), size, axis=2)
    return jnp.where(is_exact[..., None], exact, fetched.k), still[:, :, -1]


def outlier_chunks(whole: Array, worst: Array, lost: Array | None, first: int, count: int) -> Array:
    """Choose the `count` chunks of a prompt that stay exact, int32 [B, h_kv, count].

    A row with fewer chunks has its real chunks first. The entries after them are arbitrary.

    Args:
        whole: which chunks the row has, bool [B, h_kv, n].
        worst: least cosine between a key of each chunk and its landmark, float32 [B, h_kv, n].
        lost: largest squared error of a rebuilt key of each chunk, float32 [B, h_kv, n]; None if first == count.
        first: number of chunks that are chosen by the least cosine. They come first.
        count: number of chunks in all. The others are chosen by the largest error.
    """
    ids = top_k(jnp.where(whole, -worst, -jnp.inf), first)
    if lost is None:
        return ids
    others = leave_out(whole, ids, jnp.ones(ids.shape, bool))
    return jnp.concatenate([ids, top_k(jnp.where(others, lost, -jnp.inf), count - first)], axis=2)


def leave_out(chunks: Array, ids: Array, chosen: Array) -> Array:
    """Return the mask `chunks` [B, h_kv, n], but False at the ids [B, h_kv, o] where `chosen` [B, h_kv, o] is True."""
    row, head = jnp.ogrid[: chunks.shape[0], : chunks.shape[1]]
    ids = jnp.where(chosen, ids, chunks.shape[2])
    return chunks.at[row[..., None], head[..., None], ids].set(False, mode="drop")


def least_cosine(outliers: KeyValues, used: Array, size: int, parts: int) -> Array:
    """Return the limit `PlusFrozen.cut`, float32 [B, h_kv].

    `outliers` are the prompt's, those chosen by their landmark first. `used`, bool [B, 1, m], tells which of the first
    m
    are real and were chosen by their landmark.
    """
    batch, heads, _, dim = outliers.k.shape
    exact = outliers.k.reshape(batch, heads, -1, size, dim)
    _, worst = chunk_landmarks(exact[:, :, : used.shape[2]], parts)
    return jnp.where(used, worst, -jnp.inf).max(axis=2, initial=-jnp.inf)


def most_lost(candidates: Array, lost: Array | None) -> Array:
    """Return the limit `PlusFrozen.most`, float32 [B, h_kv].

    `candidates`, bool [B, h_kv, n], are the chunks that may be rebuilt, and `lost`, float32 [B, h_kv, n], is the
    largest
    squared error of a rebuilt key of every chunk. None: no outlier is chosen by its error.
    """
    if lost is None:
        return jnp.full(candidates.shape[:2], jnp.inf)
    return jnp.where(candidates, lost, -1.0).max(axis=2, initial=-1.0)


def loses_more(keys: Array, real: Array, weights: Array | None, most: Array) -> Array:
    """Return whether the coding error of a chunk is above the limit `PlusFrozen.most`, bool [B, h_kv, n].

    The rebuilt keys and the real keys after RoPE [B, h_kv, n, c, d] were rounded to the model's dtype. The keys from
    which `most` was measured were not. Therefore the difference that rounding alone can cause is subtracted. `weights`
    are as in `PlusFrozen.key_weights`. If `most` is negative, every chunk is above it.
    """
    rounding = float(jnp.finfo(real.dtype).eps)
    off, size = (jnp.sqrt(squared_error(x, real, weights)) for x in (keys, jnp.zeros_like(real)))
    limit = jnp.where(most < 0, -jnp.inf, jnp.sqrt(jnp.maximum(most, 0)))
    return (off - rounding * size).max(axis=3) > limit[..., None]


def keep_exact(live: PlusLive, number: Array, bad: Array, k: Array, v: Array) -> PlusLive:
    """Copy the joining chunks that should stay exact to free exact slots of ShadowKV+, as long as there are any.

    `number`, int32 [B, m], are the later chunks that join, and `bad`, bool [B, h_kv, m], tells which should stay exact.
    k and v are their keys after RoPE and values [B, h_kv, m, c, d].
    """
    batch, heads = bad.shape[:2]
    slots = live.extra_ids.shape[2]
    used = (live.extra_ids >= 0).sum(axis=2, keepdims=True)
    slot = jnp.where(bad, used + jnp.cumsum(bad, axis=2) - 1, slots)  # an index past the last slot is dropped
    bad = bad & (slot < slots)
    row, head = jnp.ogrid[:batch, :heads]
    place = (row[..., None], head[..., None], slot)
    numbers = jnp.broadcast_to(number[:, None], bad.shape)

    def into_slots(buffer: Array, rows: Array) -> Array:
        chunked = buffer.reshape(batch, heads, slots, *rows.shape[3:])
        return chunked.at[place].set(rows.astype(buffer.dtype), mode="drop").reshape(buffer.shape)

    return live.replace(
        extra=KeyValues(into_slots(live.extra.k, k), into_slots(live.extra.v, v)),
        extra_ids=live.extra_ids.at[place].set(numbers, mode="drop"),
        kept=live.kept.at[row[..., None], head[..., None], jnp.where(bad, numbers, live.kept.shape[2])].set(
            True, mode="drop"
        ),
    )


def without_later(live: PlusLive, behind: Array, prompt: int) -> PlusLive:
    """Return the state without the later chunks from number `behind`, int32 [B, 1, 1], on, in the exact slots and the
    cache.

    `prompt` is the id of later chunk 0.
    """
    return live.replace(
        kept=live.kept & (jnp.arange(live.kept.shape[2]) < behind),
        extra_ids=jnp.where(live.extra_ids < behind, live.extra_ids, -1),
        resident=jnp.where(live.resident < prompt + behind, live.resident, -1),
    )
