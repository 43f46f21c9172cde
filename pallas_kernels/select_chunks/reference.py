"""select_chunks in plain jax.numpy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.select_chunks.operands import Candidates, Chosen

PLACES = 256  # `in_place` compares this many places at once, so its largest temporary is [B, h, k, PLACES]


def select_chunks(candidates: Candidates) -> Chosen:
    """See `pallas_kernels.select_chunks`."""
    scores, asked, resident, numbers = candidates
    count, size = resident.shape[2], scores.shape[2]
    best, at = lax.top_k(scores, min(count, size))
    there = asked[:, None, None] & (best >= 0)
    at = jnp.sort(jnp.where(there, at.astype(jnp.int32), size))
    at = jnp.pad(at, ((0, 0), (0, 0), (0, count - at.shape[2])), constant_values=size)
    valid = at < size
    ids = at if numbers is None else jnp.take_along_axis(numbers, jnp.minimum(at, size - 1), axis=2)
    order = in_place(ids, valid, resident)
    ids, valid = (jnp.take_along_axis(x, order, axis=2) for x in (ids, valid))
    hit = valid & (ids == resident)
    return Chosen(jnp.where(valid, ids, 0), valid, hit, places_of(valid & ~hit))


def places_of(mask: jax.Array) -> jax.Array:
    """Return the places in the last axis where `mask` is True, in rising order, and then the size of the axis. int32.

    Example: [False, True, True] gives [1, 2, 3].
    """
    size = mask.shape[-1]
    return jnp.sort(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size))


def in_place(new: jax.Array, valid: jax.Array, resident: jax.Array) -> jax.Array:
    """Return the index of the chunk in `new` that gets each place.

    A chunk that is already resident keeps its place. The n-th of the others gets the n-th free place.

    Args:
        new: chunks, int32 [B, h, k], distinct where valid.
        valid: which of them are chosen, bool [B, h, k].
        resident: the chunk in each place, int32 [B, h, k]; -1 in an empty place.

    Returns:
        int32 [B, h, k], a permutation of 0 .. k - 1 for each head.
    """
    count = new.shape[2]
    size = min(count, PLACES)
    blocks = -(-count // max(size, 1))
    # The padding is -1, which is no chunk's id.
    padded = jnp.pad(resident, ((0, 0), (0, 0), (0, blocks * size - count)), constant_values=-1)
    tiles = padded.reshape(*resident.shape[:2], blocks, size).transpose(2, 0, 1, 3)

    def same(tile: jax.Array) -> jax.Array:
        return valid[..., :, None] & (new[..., :, None] == tile[..., None, :])  # [B, h, new, place]

    def look(found: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = same(tile)
        return found | there.any(axis=-1), there.any(axis=-2)

    found, taken = over_blocks(look, jnp.zeros_like(valid), tiles)
    free = ~taken.transpose(1, 2, 0, 3).reshape(padded.shape)
    # The n-th chunk without a place gets the n-th free place. The fillers 0 (has a place) and -1 (taken) never match.
    number = jnp.where(found, 0, jnp.cumsum(~found, axis=-1, dtype=jnp.int32))
    turn = jnp.where(free, jnp.cumsum(free, axis=-1, dtype=jnp.int32), -1)
    index = jnp.arange(count, dtype=jnp.int32)[:, None]

    def take(nothing: None, one: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        tile, turn = one
        pair = same(tile) | (number[..., :, None] == turn[..., None, :])
        # One entry of each column is True. On a CPU, summing its index is several times cheaper than argmax.
        return nothing, jnp.where(pair, index, 0).sum(axis=-2)

    turns = turn.reshape(*resident.shape[:2], blocks, size).transpose(2, 0, 1, 3)
    _, order = over_blocks(take, None, (tiles, turns))
    return order.transpose(1, 2, 0, 3).reshape(padded.shape)[..., :count]


def over_blocks(function: Callable[..., Any], start: Any, blocks: Any) -> tuple[Any, Any]:
    """Run lax.scan over the leading axis. A single block is computed without a loop."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return lax.scan(function, start, blocks)
    last, out = function(start, jax.tree.map(lambda x: x[0], blocks))
    return last, jax.tree.map(lambda x: x[None], out)
