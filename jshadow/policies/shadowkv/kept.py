"""The cache of recently selected chunks. With `CacheSpec.keep`, it holds their keys and values on the device.

A cache has P places for each KV head. Attention reads the selected chunks in rising order of their ids, wherever they
lie in the cache. So no result depends on the cache: neither on its size nor on the steps before.

Sizes: B rows, h_kv KV heads, k selected chunks, Q queries that select, chunks of c tokens of width d.
"""

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import Fetched, Kept, Selection
from jshadow.ops.attention import Piece
from jshadow.policies.shadowkv.selection import Chunks
from jshadow.policies.shadowkv.state import ShadowLive
from pallas_kernels import MOST_AGE, places_of


def empty_cache(shape: tuple[int, int], places: int, *, aged: bool) -> tuple[Array, Array | None]:
    """Return the ids and the ages of the chunks in an empty cache, int32 [B, h_kv, places]; no ages unless `aged`."""
    ids = jnp.full((*shape, places), -1, jnp.int32)
    return ids, jnp.full_like(ids, MOST_AGE) if aged else None


def kept_rows(live: ShadowLive, chosen: Chunks) -> Kept | None:
    """Return the cache on the device, and which of the chosen chunks it lacks. None without `CacheSpec.keep`."""
    if live.values is None or live.keys is None:
        return None
    if chosen.missed is not None and chosen.places is not None:
        return Kept(live.values, live.keys, chosen.places, chosen.missed, chosen.total - chosen.hits)
    # Several queries take nothing from the cache. Each chunk gets a place of its own in a temporary one.
    shape = chosen.ids.shape[:2]
    valid = chosen.valid.reshape(*shape, -1)
    places = jnp.broadcast_to(jnp.arange(valid.shape[2], dtype=jnp.int32), valid.shape)
    none = jnp.zeros((*valid.shape, live.values.shape[3]), live.values.dtype)
    return Kept(none, none, places, places_of(valid), chosen.total)


def received(live: ShadowLive, selection: Selection, fetched: Fetched, queries: int) -> ShadowLive:
    """Return the state with the cache after a fetch. Without `CacheSpec.keep` it does not change.

    After several queries, the cache holds the chunks of the last one in its first places.

    Args:
        live: the state.
        selection: the chunks that were fetched, Q * k for each head.
        fetched: their keys and values.
        queries: Q.
    """
    if live.values is None or live.keys is None:
        return live
    assert fetched.k is not None
    if queries == 1:
        return live.replace(values=fetched.v, keys=fetched.k)
    asked = selection.valid.reshape(*selection.valid.shape[:2], queries, -1).any(axis=3)
    last = queries - 1 - jnp.argmax(asked[:, :, ::-1], axis=2)

    def rows(new: Array, old: Array) -> Array:
        several = new.reshape(*asked.shape, -1, old.shape[3])
        newest = jnp.take_along_axis(several, last[:, :, None, None, None], axis=2)[:, :, 0]
        there = asked.any(axis=2)[:, :, None, None]
        return jnp.concatenate(
            [jnp.where(there, newest, old[:, :, : newest.shape[2]]), old[:, :, newest.shape[2] :]], axis=2
        )

    return live.replace(values=rows(fetched.v, live.values), keys=rows(fetched.k, live.keys))


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
    # Here every chunk has a place of its own, so both forms of the rows have the same order.
    shape = (*fetched.v.shape[:2], queries)
    k, v = (x.reshape(*shape, -1, width) for x in (fetched.k, fetched.v))
    return Piece(k, v, fetched.valid.reshape(*shape, -1))
