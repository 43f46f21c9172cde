"""Keys and values of selected chunks that stay on the device from step to step, with `CacheSpec.keep`.

Sizes: B rows, h_kv KV heads, k places for selected chunks, Q queries that select, chunks of c tokens of width d.
"""

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import Fetched, Kept, Selection
from jshadow.policies.shadowkv.state import ShadowLive
from pallas_kernels import Chosen, places_of


def kept_rows(live: ShadowLive, chosen: Chosen) -> Kept | None:
    """Return the rows on the device, and which of the chosen chunks they lack. None without `CacheSpec.keep`.

    Args:
        live: the state before the step.
        chosen: the chosen chunks, with fields [B, h_kv, Q, k].
    """
    if live.values is None or live.keys is None:
        return None
    queries, count = chosen.missed.shape[2:]
    if queries == 1:
        return Kept(live.values, live.keys, chosen.missed[:, :, 0], chosen.counts[..., 0] - chosen.counts[..., 1])
    # Several queries reuse no rows.
    none = jnp.zeros((*chosen.ids.shape[:2], queries * count, live.values.shape[3]), live.values.dtype)
    return Kept(none, none, places_of(chosen.valid.reshape(none.shape[:3])), chosen.counts[..., 0])


def received(live: ShadowLive, selection: Selection, fetched: Fetched) -> ShadowLive:
    """Return the state with the fetched rows of the last query's chunks. Without `CacheSpec.keep` it does not change.

    Args:
        live: the state, with the chunks of the last query in `resident`.
        selection: the chunks that were fetched, Q * k for each head.
        fetched: their keys and values.
    """
    if live.values is None or live.keys is None:
        return live
    assert fetched.k is not None
    valid = selection.valid.reshape(*live.resident.shape[:2], -1, live.resident.shape[2])

    def rows(new: Array, old: Array) -> Array:
        several = new.reshape(*valid.shape, old.shape[3])
        if valid.shape[2] == 1:
            return several[:, :, 0]
        # In each place, keep the row of the last query that is valid there.
        last = valid.shape[2] - 1 - jnp.argmax(valid[:, :, ::-1], axis=2)
        newest = jnp.take_along_axis(several, last[:, :, None, :, None], axis=2)[:, :, 0]
        return jnp.where(valid.any(axis=2)[..., None], newest, old)

    return live.replace(values=rows(fetched.v, live.values), keys=rows(fetched.k, live.keys))
