"""The order of a selection: what stays selected keeps its place, so that its values can stay where they are.

A fetch then writes into the places of what was dropped alone, in the buffer that the step before filled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 256  # places that are compared with all units at once: what exists at a time is [B, h, k, BLOCK]


def in_turn(ids: Array, valid: Array, asked: Array, resident: Array) -> tuple[Array, Array, Array, Array]:
    """Selections of queries that follow each other, each ordered so that what stays selected keeps its place.

    Args:
        ids: int32 [B, h, Q, k], distinct in each selection.
        valid: bool, likewise; what is not valid is not selected.
        asked: bool [B, Q]; a query that did not ask leaves everything as it is.
        resident: what was selected before, int32 [B, h, k], distinct; -1: nothing at that place.

    Returns:
        ids and valid in that order, whether each was selected by the query before it too, and the new resident.
    """

    def follow(resident: Array, one: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        ids, valid, asked = one
        order = in_place(ids, valid, resident)
        ids, valid = (jnp.take_along_axis(x, order, axis=2) for x in (ids, valid))
        held = jnp.where(asked[:, None, None], jnp.where(valid, ids, -1), resident)
        return held, (ids, valid, valid & (ids == resident))

    if ids.shape[2] == 1:
        held, parts = follow(resident, (ids[:, :, 0], valid[:, :, 0], asked[:, 0]))
        return *(part[:, :, None] for part in parts), held  # type: ignore[return-value]
    first = (ids.transpose(2, 0, 1, 3), valid.transpose(2, 0, 1, 3), asked.T)
    held, parts = lax.scan(follow, resident, first)
    return *(part.transpose(1, 2, 0, 3) for part in parts), held  # type: ignore[return-value]


def in_place(new: Array, valid: Array, resident: Array) -> Array:
    """Which of the new units [B, h, k] each place gets, int32 [B, h, k]: its own again, or in turn what is new."""
    count = new.shape[2]
    size = min(count, BLOCK)
    blocks = -(-count // size)
    # Places past the last take nothing that is looked for.
    padded = jnp.pad(resident, ((0, 0), (0, 0), (0, blocks * size - count)), constant_values=-1)
    tiles = padded.reshape(*resident.shape[:2], blocks, size).transpose(2, 0, 1, 3)

    def same(tile: Array) -> Array:
        return valid[..., :, None] & (new[..., :, None] == tile[..., None, :])  # [B, h, new, place]

    def look(found: Array, tile: Array) -> tuple[Array, Array]:
        there = same(tile)
        return found | there.any(axis=-1), there.any(axis=-2)

    found, taken = over_blocks(look, jnp.zeros_like(valid), tiles)
    free = ~taken.transpose(1, 2, 0, 3).reshape(padded.shape)
    # The n-th unit without a place takes the n-th free one; 0 and -1 never meet.
    number = jnp.where(found, 0, jnp.cumsum(~found, axis=-1, dtype=jnp.int32))
    turn = jnp.where(free, jnp.cumsum(free, axis=-1, dtype=jnp.int32), -1)
    index = jnp.arange(count, dtype=jnp.int32)[:, None]

    def take(nothing: None, one: tuple[Array, Array]) -> tuple[None, Array]:
        tile, turn = one
        pair = same(tile) | (number[..., :, None] == turn[..., None, :])
        # One of each column is true; summing its index is several times cheaper than argmax on a CPU.
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
