"""The memories of a stored state: its sizes, and its way between device memory and pinned host memory."""

from collections.abc import Callable
from typing import Any

import jax

from jshadow.cache.accounting import leaf_bytes
from jshadow.cache.records import HostArray
from jshadow.cache.state import KVState
from jshadow.engine.saved.state import is_place
from jshadow.library.tiers import Size

PINNED = "pinned_host"


def size_of(state: KVState) -> Size:
    """Return the bytes of a state that is ready for a step. It may be abstract."""
    sizes = {False: 0, True: 0}
    for leaf in jax.tree.leaves(state, is_leaf=is_place):
        sizes[is_place(leaf) and leaf.memory == PINNED] += sum(map(leaf_bytes, jax.tree.leaves(leaf)))
    return Size(device=sizes[False], host=sizes[True])


def to_host(state: KVState) -> KVState:
    """Copy all arrays of a state to pinned host memory. Offloaded rows stay where they are.

    The result is not ready for a step.
    """
    return moved(state, lambda leaf: copied(leaf, PINNED))


def to_device(state: KVState) -> KVState:
    """Undo `to_host`. Offloaded rows stay in host memory."""
    return moved(state, lambda leaf: copied(leaf, "device"))


def moved(state: KVState, move: Callable[[Any], Any]) -> KVState:
    """Return a state with every array moved, except offloaded rows. The copies are complete when this returns."""

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, HostArray):
            return move(leaf)
        return leaf if leaf.memory == PINNED else HostArray(move(leaf.array), leaf.memory)

    result: KVState = jax.block_until_ready(jax.tree.map(of_leaf, state, is_leaf=is_place))
    return result


def copied(leaf: jax.Array, memory: str) -> jax.Array:
    """Copy an array to a memory of its device, or return it if it is there."""
    if leaf.sharding.memory_kind == memory:
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(memory))
