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
    """

    steps: Array
    attended: Array
    selected: Array
    hits: Array
    fetched: Array

    @classmethod
    def zeros(cls, batch: int) -> "Counters":
        """Return the counts before the first step, for `batch` rows."""
        names = [field.name for field in dataclasses.fields(cls)]
        kinds = {name: jnp.float32 if name == "attended" else jnp.uint32 for name in names}
        return cls(**{name: jnp.zeros(batch, kind) for name, kind in kinds.items()})
