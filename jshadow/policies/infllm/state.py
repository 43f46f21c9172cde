"""The state of InfLLM in one layer. All keys are before RoPE.

Blocks are numbered after the sinks: block u is tokens sinks + u * unit to sinks + (u + 1) * unit - 1. A block is stored
on the host once all its tokens have left the window.

Example: B = 1, 2 KV heads, 2 sinks, a window of 6, units of 4 tokens, and a prompt of 15 tokens. The last window is
tokens 9 to 14. Of the tokens 2 to 8 before it, tokens 2 to 5 are block 0, so units is [1]. Block 1 (tokens 6 to 9) has
not left the window yet: its tokens stay in the ring until token 15 comes. With C = 2, held [[0, -1]] means that slot 0
of the pool holds block 0 and slot 1 is empty.
"""

from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues


class InfLLMFrozen(struct.PyTreeNode):
    """The blocks of the prompt.

    Attributes:
        units: number of the prompt's blocks that are on the host, int32 [B].
        representatives: mean keys of the blocks' representative tokens [B, h_kv, U, d].
    """

    units: Array
    representatives: Array


class InfLLMLive(struct.PyTreeNode):
    """The part that decoding changes.

    Attributes:
        sinks: keys and values of the first tokens [B, h_kv, sinks, d].
        ring: a ring buffer of the newest tokens' keys and values [B, h_kv, R, d]. The token at position p is in slot
            p % R.
        mass: sum of the attention probabilities that each token in the ring got while it was in the window, float32
            [B, h_kv, R].
        representatives: mean keys of the blocks after the prompt [B, h_kv, T, d]. In row b, entry j is block
            units[b] + j.
        pool: keys and values of the C blocks on the device [B, h_kv, C * unit, d].
        held: id of the block in each slot of the pool, int32 [B, C]; -1 in an empty slot. Ids are those of
            `Selection.ids`: blocks of the tail follow those of the prompt.
        used: position of the last query that attended to the block in each slot, int32 [B, C]; -1 if none did.
    """

    sinks: KeyValues
    ring: KeyValues
    mass: Array
    representatives: Array
    pool: KeyValues
    held: Array
    used: Array
