"""The devices on which the state of a prefill lies."""

from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jshadow.cache.state import KVState


def replicated_sharding(weights: dict) -> Sharding | None:
    """Return the sharding that copies an array to every device of the weights, or None if one device has them all."""
    sharding = jax.tree.leaves(weights)[0].sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if len(sharding.device_set) > 1 else None


def commit(state: KVState, everywhere: Sharding | None = None) -> KVState:
    """Return the state with every array committed to its device and memory, like the arrays that a step returns.

    A new array is uncommitted. JAX compiles one program for committed arrays and another for uncommitted arrays.
    Without this function, the first and the second step after a prefill would each be compiled. Nothing is copied,
    unless `everywhere` is given: then an array that lies on one device is copied to all devices.
    """

    def bind(leaf: Any) -> Any:
        if not isinstance(leaf, Array):
            return leaf
        alone = everywhere is not None and len(leaf.sharding.device_set) == 1
        return jax.device_put(leaf, everywhere if alone else leaf.sharding)

    return jax.tree.map(bind, state)
