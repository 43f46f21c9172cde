"""The counters of a state."""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array


class Counters(struct.PyTreeNode):
    """Counts of what the decode steps did. Every field is an array [B], one number for each row.

    Attributes:
        steps: steps in which the row was active, uint32.
        attended: tokens attended to, float32. It is the mean over heads, summed over steps and layers.
        selected: valid units that were selected, uint32, summed over steps, layers and heads. Only selections that have
            `counts` or a `hit` mask are counted.
        hits: units in `selected` that the previous step had also selected, or that were in the policy's cache, uint32.
        fetched: data moved from the host tier, in units of 64 bytes, uint32. The count wraps around, so compare two
            counts by their difference.
        reached: the most tokens that the row held before it gave some back (`KVState.rewind`), int32, or 0.
    """

    steps: Array
    attended: Array
    selected: Array
    hits: Array
    fetched: Array
    reached: Array

    @classmethod
    def zeros(cls, batch: int) -> "Counters":
        """Return the counts before the first step, for `batch` rows."""
        kinds = {"attended": jnp.float32, "reached": jnp.int32}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: jnp.zeros(batch, kinds.get(name, jnp.uint32)) for name in names})
