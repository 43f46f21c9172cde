"""The order of a selection: what stays selected keeps its place, so that its values can stay where they are.

A fetch then writes into the places of what was dropped alone, in the buffer that the step before filled.
"""

import jax.numpy as jnp
from jax import Array, lax


def in_turn(ids: Array, valid: Array, asked: Array, resident: Array) -> tuple[Array, Array, Array, Array]:
    """Selections of queries that follow each other, each ordered so that what stays selected keeps its place.

    Args:
        ids: int32 [B, h, Q, k], distinct in each selection.
        valid: bool, likewise; what is not valid is not selected.
        asked: bool [B, Q]; a query that did not ask leaves everything as it is.
        resident: what was selected before, int32 [B, h, k]; -1: nothing at that place.

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
    same = valid[..., :, None] & (new[..., :, None] == resident[..., None, :])  # [B, h, new, place]
    found, taken = same.any(axis=-1), same.any(axis=-2)
    # The n-th unit without a place takes the n-th free one; 0 and -1 never meet.
    number = jnp.where(found, 0, jnp.cumsum(~found, axis=-1, dtype=jnp.int32))
    place = jnp.where(taken, -1, jnp.cumsum(~taken, axis=-1, dtype=jnp.int32))
    pair = same | (number[..., :, None] == place[..., None, :])
    # One of each column is true; summing its index is several times cheaper than argmax on a CPU.
    return jnp.where(pair, jnp.arange(new.shape[2], dtype=jnp.int32)[:, None], 0).sum(axis=-2)
