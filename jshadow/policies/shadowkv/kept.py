"""The chosen chunks of a step, and the cache of recently selected chunks.

A cache has P places for each KV head. With `CacheSpec.keep`, it holds the keys and values of its chunks on the device.
Attention reads the selected chunks in rising order of their ids, wherever they lie in the cache. So no result depends
on the cache: neither on its size nor on the steps before.

Sizes: B rows, h_kv KV heads, k selected chunks, Q queries that select, chunks of c tokens of width d.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

import pallas_kernels
from jshadow.cache.records import Fetched, Kept, Selection
from jshadow.ops.attention import Piece
from jshadow.ops.layout import top_k
from jshadow.policies.shadowkv.selection import Finalists
from jshadow.policies.shadowkv.state import ShadowLive
from pallas_kernels import MOST_AGE, places_of

AFTER_ALL = jnp.iinfo(jnp.int32).max  # larger than the id of any chunk


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
    """Choose the `count` best finalists of each query, and note them in the cache.

    Args:
        candidates: the finalists, which are the chunks of which the best are chosen. Their ids rise.
        asked: which queries select, bool [B, Q]. In each row these queries come first. A row in which no query selects
            leaves the cache as it is.
        count: number of chunks to choose for each query.
        resident, ages: the cache, as in `ShadowLive`.
    """
    scores, ids = candidates
    if scores.shape[2] > 1:
        return choose_each(candidates, asked, count, resident, ages)
    numbers = None if ids is None else ids[:, :, 0]
    chosen = pallas_kernels.select_chunks(
        scores[:, :, 0], asked[:, 0], resident, count=count, ages=ages, numbers=numbers
    )
    valid = jnp.arange(count, dtype=jnp.int32) < chosen.total[:, :, None]
    sides = (chosen.held, chosen.ages, chosen.places, chosen.missed)
    return Chunks(chosen.ids[:, :, None], valid[:, :, None], chosen.total, chosen.hits, *sides)


def choose_each(candidates: Finalists, asked: Array, count: int, resident: Array, ages: Array | None) -> Chunks:
    """Do what `choose` does for several queries. Afterwards the cache holds the chunks of the last query only."""
    scores, ids = candidates
    size = scores.shape[3]
    order = top_k(scores, count)
    there = asked[:, None, :, None] & (jnp.take_along_axis(scores, order, axis=3) >= 0)
    order = jnp.sort(jnp.where(there, order, size))
    valid, order = order < size, jnp.minimum(order, size - 1)
    chosen = order if ids is None else jnp.take_along_axis(ids, order, axis=3)
    known = jnp.where(valid, chosen, AFTER_ALL)
    first = are_in(jnp.sort(resident)[:, :, None], known[:, :, :1])
    hit = valid & jnp.concatenate([first, are_in(known[:, :, :-1], known[:, :, 1:])], axis=2)
    last = jnp.maximum(asked.sum(axis=1) - 1, 0)[:, None, None, None]
    newest = jnp.take_along_axis(jnp.where(valid, chosen, -1), last, axis=2)[:, :, 0]
    changed, spare = asked.any(axis=1)[:, None, None], ((0, 0), (0, 0), (0, resident.shape[2] - count))
    after = jnp.where(changed, jnp.pad(newest, spare, constant_values=-1), resident)
    if ages is not None:
        ages = jnp.where(changed, jnp.where(after >= 0, 0, MOST_AGE), ages)
    total, hits = (mask.sum(axis=(2, 3), dtype=jnp.int32) for mask in (valid, hit))
    return Chunks(chosen, valid, total, hits, after, ages)


def are_in(rising: Int[Array, "B h Q m"], ids: Int[Array, "B h Q k"]) -> Bool[Array, "B h Q k"]:
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
    """Return the state with the cache after a fetch. Without `CacheSpec.keep` it does not change.

    After several queries, the cache holds the chunks of the last one in its first places. Their keys are rebuilt again,
    as many at once as in a step with one query. XLA's CPU backend may round keys differently when it rebuilds more of
    them at once. Without this, results would depend on how long a chunk stays in the cache.

    Args:
        live: the state, with the chunks of the cache after this step.
        selection: the chunks that were fetched, Q * k for each head.
        fetched: their keys and values.
        queries: Q.
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
    keys = selection.rebuild.keys(jnp.maximum(live.resident[:, :, :count], 0)).astype(live.keys.dtype)

    def rows(new: Array, old: Array) -> Array:
        first = jnp.where(there, new.reshape(values.shape), old[:, :, :count])
        return jnp.concatenate([first, old[:, :, count:]], axis=2)

    return live.replace(values=rows(values, live.values), keys=rows(keys, live.keys))


def own_piece(fetched: Fetched, queries: int, width: int) -> Piece:
    """Return fetched chunks as a piece for attention. With queries > 1, each query attends only to its own k chunks.

    Args:
        fetched: the keys and values of queries * k chunks. If queries == 1, the valid ones are the first ones.
        queries: number of queries that selected their own chunks.
        width: width of a head, d.
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
