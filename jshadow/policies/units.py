"""The state of retrieval policies: summaries on the device of units of tokens that lie in the host tier."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.cache.spec import HostLayout
from jshadow.ops.layout import write_rows


def within_share(weights: Array, share: float) -> Array:
    """Mark the fewest leading weights whose sum reaches a share of the total (Twilight, arXiv 2502.02770, section 4).

    Args:
        weights: float32 [..., k], falling along the last axis.
        share: the share, in (0, 1]. 1 marks all weights.

    Returns:
        A mask, bool [..., k].
    """
    if share >= 1:
        return jnp.ones(weights.shape, bool)
    before = jnp.cumsum(weights, axis=-1) - weights
    return before < share * weights.sum(axis=-1, keepdims=True)


class UnitFrozen(struct.PyTreeNode):
    """The prompt's part of a retrieval policy's state.

    Example: B = 1, 2 KV heads, units of 4 tokens, a capacity of 12 tokens and a prompt of 10. The prompt part of the
    host tier has room for 3 units. units is [2], since the prompt has 2 whole units; its last 2 tokens are only in the
    ring of `UnitLive`. With Quest, summaries are two arrays [1, 2, 3, d], whose last entry is unused.

    Attributes:
        units: whole units of each row's prompt, int32 [B].
        summaries: a pytree of arrays [B, h_kv, U, ...] with one summary for each unit, or None if the policy reads
            summaries from the units themselves.
        basis: arrays that the summaries are computed with, if the policy learns them from the prompt; else None.
    """

    units: Array
    summaries: Any
    basis: Any


class UnitLive(struct.PyTreeNode):
    """The part of a retrieval policy's state that decoding changes.

    Attributes:
        recent: a ring buffer of the newest tokens' keys after RoPE and values [B, h_kv, R, d]. The token at position p
            is in slot p % R.
        summaries: a pytree of arrays [B, h_kv, T, ...] with the summaries of units after the prompt, or None. In row b,
            entry j is unit units[b] + j of the sequence. A unit that is not complete yet is summarized from its first
            tokens.
        selected: the units that the last query selected, int32 [B, h_kv, k], with -1 in unused entries. Units of the
            tail follow those of the prompt, as in `Selection.ids`.
    """

    recent: KeyValues
    summaries: Any
    selected: Array


def put_units(old: Array, new: Array, *, place: Array, valid: Array) -> Array:
    """Write entries along axis 2 of an array.

    Args:
        old: [B, h, T, ...].
        new: the entries to write [B, h, n, ...].
        place: where each entry is written, int32 [B, n].
        valid: which entries are written, bool [B, n].

    Returns:
        The new array [B, h, T, ...].
    """
    batch, heads, count = old.shape[:3]
    rows = new.reshape(batch, heads, new.shape[2], -1).swapaxes(1, 2)
    return write_rows(old.reshape(batch, heads, count, -1), rows, place, valid).reshape(old.shape)


def unit_of_place(layout: HostLayout, units: Array) -> Array:
    """Return the number in the sequence of each stored unit, int32 [B, U + T]: the prompt's, then the tail's.

    -1 marks a place in the prompt's part that holds no unit. Example: the prompt's part has 3 places, the tail has
    2, and row 0 has units[0] = 2. Then the result for row 0 is [0, 1, -1, 2, 3].
    """
    start = units[:, None]
    places, count = jnp.arange(layout.units + layout.tail_units), layout.units
    unit = jnp.where(places < count, places, places - count + start)
    return jnp.where((places < start) | (places >= count), unit, -1)
