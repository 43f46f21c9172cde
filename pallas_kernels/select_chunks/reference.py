"""select_chunks in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.select_chunks.operands import MOST_AGE, Candidates, Chosen

NO_CHUNK = jnp.iinfo(jnp.int32).max  # larger than every chunk


def select_chunks(candidates: Candidates, count: int) -> Chosen:
    """See `pallas_kernels.select_chunks`."""
    scores, asked, resident, ages, numbers = candidates
    size, places = scores.shape[2], resident.shape[2]
    best, at = lax.top_k(scores, min(count, size))
    at = jnp.sort(jnp.where(asked[:, None, None] & (best >= 0), at.astype(jnp.int32), size))
    at = jnp.pad(at, ((0, 0), (0, 0), (0, count - at.shape[2])), constant_values=size)
    valid = at < size
    ids = jnp.where(valid, at if numbers is None else take(numbers, at), NO_CHUNK)

    # The chunks that stay, and the chunks that are missed
    rank = search(ids, resident)
    stays = (resident >= 0) & (take(ids, rank) == resident)
    index = jnp.arange(places, dtype=jnp.int32)
    found = put(jnp.full_like(ids, places), jnp.where(stays, rank, count), jnp.broadcast_to(index, rank.shape))
    is_missed = valid & (found == places)
    total, hits = (mask.sum(axis=2, dtype=jnp.int32) for mask in (valid, stays))

    # The places that are freed, in rising order, and then P
    if ages is None:
        freed = places_of(~stays)[..., :count]
    else:
        oldest = jnp.sort(jnp.where(stays, NO_CHUNK, (MOST_AGE - ages) * places + index))[..., :count]
        order = jnp.arange(count, dtype=jnp.int32)
        freed = jnp.sort(jnp.where(order < (total - hits)[..., None], oldest % max(places, 1), places))
    turn = jnp.cumsum(is_missed, axis=2, dtype=jnp.int32) - 1
    place = jnp.where(is_missed, take(freed, turn), found)

    is_asked = asked[:, None, None]
    kept = resident if ages is not None else jnp.where(stays | ~is_asked, resident, -1)
    if ages is not None:
        ages = jnp.where(is_asked, put(jnp.minimum(ages + 1, MOST_AGE), place, jnp.zeros_like(place)), ages)
    return Chosen(jnp.where(valid, ids, 0), place, places_of(is_missed), put(kept, place, ids), ages, total, hits)


@jax.vmap
@jax.vmap
def search(rising: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return for each chunk in `wanted` how many entries of `rising` are less. Both are [B, h, ...]."""
    return jnp.searchsorted(rising, wanted).astype(jnp.int32)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x at the indices of its last axis. An index past the end takes the last entry."""
    return jnp.take_along_axis(x, index, axis=2, mode="clip")


@jax.vmap
@jax.vmap
def put(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """Return x with `values` at the indices of its last axis. An index past the end is left out."""
    return x.at[index].set(values, mode="drop")


def places_of(mask: jax.Array) -> jax.Array:
    """Return the places in the last axis where `mask` is True, in rising order, and then the size of the axis. int32.

    Example: [False, True, True] gives [1, 2, 3].
    """
    size = mask.shape[-1]
    return jnp.sort(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size))
