"""What InfLLM remembers of one layer."""

from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues


class InfLLMFrozen(struct.PyTreeNode):
    """The prompt.

    Attributes:
        units: blocks that its window has left, int32 [B].
        representatives: of them, mean keys before RoPE [B, h_kv, U, d].
    """

    units: Array
    representatives: Array


class InfLLMLive(struct.PyTreeNode):
    """What decoding changes. Keys are before RoPE.

    Attributes:
        sinks: the first tokens [B, h_kv, sinks, d].
        ring: the newest tokens, token p in slot p % R [B, h_kv, R, d].
        mass: attention that each of those got from the windows it was in, float32 [B, h_kv, R].
        representatives: of later blocks, block units_b + j in place j [B, h_kv, T, d].
        pool: C blocks on the device [B, h_kv, C * unit, d].
        held: place of the block in each slot of the pool, int32 [B, C]; -1 for none.
        used: position of the query that last attended to it, int32 [B, C].
    """

    sinks: KeyValues
    ring: KeyValues
    mass: Array
    representatives: Array
    pool: KeyValues
    held: Array
    used: Array
