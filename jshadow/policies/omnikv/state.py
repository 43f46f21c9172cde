"""The state of OmniKV's layers. B rows, h_kv KV heads, h_q query heads, d head width."""

from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues


class FilterFrozen(struct.PyTreeNode):
    """The frozen part of filter layers and of sparse layers.

    Attributes:
        lengths: tokens of the prompt, int32 [B]. Only these can be chosen.
    """

    lengths: Array


class FilterLive(struct.PyTreeNode):
    """The live part of a filter layer.

    Attributes:
        cache: keys after RoPE and values of all tokens [B, h_kv, capacity, d].
        queries: the last w queries after RoPE [B, w, h_q, d], or None with selector="last". The query at position p is
            in slot p % w.
    """

    cache: KeyValues
    queries: Array | None


class SparseLive(struct.PyTreeNode):
    """The live part of a sparse layer.

    Attributes:
        window: keys after RoPE and values of the tokens after the prompt [B, h_kv, W, d], in order.
    """

    window: KeyValues
