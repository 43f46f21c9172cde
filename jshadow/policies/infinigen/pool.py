"""InfiniGen's bounded pool of tokens: which ones may still be fetched (arXiv 2406.19707, section 4.4).

A head that holds more tokens than the pool drops one at each step: the one selected least often ("counter"), longest
ago ("lru"), or that came first ("fifo"). A mark of each token says so: its count, or a position; -1 once it is dropped.
Host rows stay where they are, for forks share the prompt's; a dropped token is no candidate any more.
"""

import jax.numpy as jnp
from jax import Array

EVICTIONS = ("counter", "lru", "fifo")
MOST = 255  # a counter that reaches it halves all of its head's


def first_marks(positions: Array, lengths: Array, heads: int, pool: int, eviction: str) -> Array:
    """Marks int32 [B, h, n] of a prompt's tokens, at positions [B, n]: its newest `pool` tokens are held."""
    mark = jnp.zeros_like(positions) if eviction == "counter" else positions
    first, end = jnp.maximum(lengths[:, None] - pool, 0), lengths[:, None]
    mark = jnp.where((positions >= first) & (positions < end), mark, -1)
    return jnp.broadcast_to(mark[:, None], (mark.shape[0], heads, mark.shape[1]))


def take_in(marks: Array, positions: Array, new: Array, valid: Array, recent: int, pool: int, eviction: str) -> Array:
    """Marks [B, h, n] with each row's new token, at position new [B, 1], and without one that has to go for it.

    Args:
        marks: int32 [B, h, n].
        positions: of the token in each place, int32 [B, n].
        new: position of the token that comes.
        valid: bool [B, 1]; nothing comes to rows that are False.
        recent: newest tokens that never go.
        pool: tokens that a head holds.
        eviction: one of EVICTIONS.
    """
    here = (positions == new)[:, None]
    fresh = jnp.where(here, 0 if eviction == "counter" else new[..., None], marks)
    there = (positions <= new)[:, None] & (fresh >= 0)
    over = there.sum(axis=2, keepdims=True) > pool
    old = there & (positions <= new - recent)[:, None]
    worth = jnp.where(old, fresh, jnp.iinfo(jnp.int32).max)
    tied = old & (worth == worth.min(axis=2, keepdims=True))
    age = jnp.where(tied, positions[:, None], jnp.iinfo(jnp.int32).max)  # the older one of equals
    gone = tied & (age == age.min(axis=2, keepdims=True)) & over
    return jnp.where(valid[..., None], jnp.where(gone, -1, fresh), marks)


def mark_selected(marks: Array, places: Array, good: Array, position: Array, eviction: str) -> Array:
    """Marks [B, h, n] after `good` places [B, h, k] were selected by the query at position [B, 1]."""
    if eviction == "fifo":
        return marks
    row, head = jnp.arange(marks.shape[0])[:, None, None], jnp.arange(marks.shape[1])[:, None]
    where = jnp.where(good, places, marks.shape[2])
    if eviction == "lru":
        return marks.at[row, head, where].set(jnp.broadcast_to(position[..., None], where.shape), mode="drop")
    marks = marks.at[row, head, where].add(1, mode="drop")
    full = marks.max(axis=2, keepdims=True) >= MOST
    return jnp.where(full & (marks > 0), marks // 2, marks)
