"""The devices on which the state of a prefill lies, and its fetch mode."""

import dataclasses
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jshadow.cache.spec import CacheSpec, Shards
from jshadow.cache.state import KVState
from jshadow.planner.bytes import Workload
from jshadow.planner.fetch_choice import FetchChoice
from jshadow.planner.machine import fetch_here
from jshadow.policies import Policy
from jshadow.policies.checks import check_split
from jshadow.weights.params import Params


def shards_of(params: Params, rows: int) -> Shards | None:
    """Return how the states of `rows` rows are split over the devices of the weights. None: one device has all.

    If the number of rows is not a multiple of the mesh's axis `data`, every part of that axis has all rows.
    """
    sharding = jax.tree.leaves(params.weights)[0].sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return Shards(sharding.mesh, params.left, rows % sharding.mesh.shape["data"] == 0)


def commit(state: KVState) -> KVState:
    """Return the state with every array committed to its device and memory, like the arrays that a step returns.

    A new array is uncommitted. JAX compiles one program for committed arrays and another for uncommitted arrays.
    Without this function, the first and the second step after a prefill would each be compiled. Nothing is copied. On
    a mesh, an array that lies on one device is copied to all devices.
    """
    committed: KVState = commit_arrays(state, state.specs[0].shards)
    return committed


def commit_arrays(tree: Any, shards: Shards | None) -> Any:
    """Do what `commit` does for a pytree of arrays beside a state. `shards` is how that state is split."""

    def bind(leaf: Any) -> Any:
        if not isinstance(leaf, Array):
            return leaf
        if shards is not None:
            return leaf if len(leaf.sharding.device_set) > 1 else _to_all(leaf, shards)
        return jax.device_put(leaf, leaf.sharding)

    return jax.tree.map(bind, tree)


def _to_all(leaf: Array, shards: Shards) -> Array:
    """Return an array with a copy on every device of the mesh. All processes must have equal arrays."""
    sharding = shards.sharding(PartitionSpec())
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: jax.device_get(leaf)[index])


def fetch_for(params: Params, policy: Policy, workload: Workload, *, states: int = 1) -> FetchChoice:
    """Return the fetch mode of a workload, and why it was chosen if its setting is "auto".

    Args:
        params: the model, whose weights lie on the devices already.
        policy: the resolved policy.
        states: number of states of this size that the call makes.

    Raises:
        ConfigError: the setting is neither "auto" nor a fetch mode.
    """
    shards = shards_of(params, workload.batch or 1)
    return fetch_here(params.config, policy, dataclasses.replace(workload, shards=shards), states=states)


def check_shards(plans: list[tuple[CacheSpec, ...]]) -> None:
    """Raise ConfigError if a layer's cache cannot run on its mesh. Each plan has the spec of every layer."""
    for spec in {spec.policy: spec for plan in plans for spec in plan}.values():
        check_split(spec, gpu=jax.default_backend() == "gpu")
