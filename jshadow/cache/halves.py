"""The two halves of a KVState: the arrays that steps only read, and those that they replace."""

from typing import Any

from flax import struct
from jax import Array

from jshadow.cache.counters import Counters
from jshadow.cache.records import HostArray
from jshadow.cache.spec import CacheSpec


class Reads(struct.PyTreeNode):
    """The half of a KVState that a step reads and never returns; see KVState.

    Attributes:
        layers: for each layer, its frozen part and the host rows of the prompt (None if there are no such rows).
        fitted: arrays that the policy learned beforehand, or None.
        specs: the static description of each layer.
        policy: the policy of the whole model, resolved.
    """

    layers: tuple[tuple[Any, HostArray | None], ...]
    fitted: Any
    specs: tuple[CacheSpec, ...] = struct.field(pytree_node=False)
    policy: Any = struct.field(pytree_node=False)


class Writes(struct.PyTreeNode):
    """The half of a KVState that a step replaces; see KVState. A step donates these buffers to the compiled program.

    Attributes:
        layers: for each layer, its live part and the host rows written after the prompt (None if there are none).
        shared: arrays that the policy carries across layers and steps, or None.
        lengths: tokens held by each row, int32 [B].
        last: the last token of each row, int32 [B].
        counters: counts of the tokens attended to, the units selected and the bytes fetched.
    """

    layers: tuple[tuple[Any, HostArray | None], ...]
    shared: Any
    lengths: Array
    last: Array
    counters: Counters
