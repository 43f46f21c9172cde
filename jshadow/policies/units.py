"""Units of tokens on the host, as retrieval policies hold them: what is remembered of them, and small operations."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.ops.layout import write_rows


def within_share(weights: Array, share: float) -> Array:
    """The fewest leading entries that make up a share of all: bool mask of float32 weights [..., k], falling.

    The budget of Twilight (arXiv 2502.02770, section 4): as many as it takes, not a fixed number.
    """
    if share >= 1:
        return jnp.ones(weights.shape, bool)
    before = jnp.cumsum(weights, axis=-1) - weights
    return before < share * weights.sum(axis=-1, keepdims=True)


class UnitFrozen(struct.PyTreeNode):
    """The prompt.

    Attributes:
        units: whole units of it, int32 [B].
        summaries: of them, a tree of [B, h_kv, U, ...].
        basis: what summaries are made with, where a policy learns that from the prompt; None otherwise.
    """

    units: Array
    summaries: Any
    basis: Any


class UnitLive(struct.PyTreeNode):
    """What decoding changes.

    Attributes:
        recent: the ring: keys after RoPE and values, token p in slot p % R [B, h_kv, R, d].
        summaries: of later units, as far as they are there, a tree of [B, h_kv, T, ...]; unit units_b + j in place j.
        selected: units of the last query, int32 [B, h_kv, k]; -1 for none.
    """

    recent: KeyValues
    summaries: Any
    selected: Array


def put_units(old: Array, new: Array, *, place: Array, valid: Array) -> Array:
    """old [B, h, T, ...] with new [B, h, n, ...] at places [B, n]."""
    batch, heads, count = old.shape[:3]
    rows = new.reshape(batch, heads, new.shape[2], -1).swapaxes(1, 2)
    return write_rows(old.reshape(batch, heads, count, -1), rows, place, valid).reshape(old.shape)
