"""What a decode step on four forced CPU devices takes, as XLA compiles it from shapes alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshadow.cache.shards import Shards, local_spec, whole_shape
from jshadow.cache.state import KVState
from jshadow.cache.state_splits import layer_splits
from jshadow.engine.step import step_writes
from jshadow.evaluation.laws.inputs import TINY
from jshadow.models.partition import AXES, sharding_of
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend
from jshadow.policies import Full, Policy, ShadowKV
from jshadow.policies.settings import with_settings

MIDDLE = dataclasses.replace(
    TINY, num_layers=2, model_dim=128, ffn_dim=256, q_heads=8, kv_heads=4, head_dim=32, vocab_size=512, context=8192
)
CONTEXT, NEW, ROWS, SP, TP = 4096, 64, 3, 2, 2
BUDGET = {"budget": 512, "outlier_chunks": 8}
POLICIES = {
    "full": Full(),
    "shadowkv": ShadowKV(rank=64, **BUDGET),
    "packed": with_settings(ShadowKV.packed(), BUDGET | {"keys.bits": None, "keys.profile": (32, 64, 32)}),
}


def abstract(policy: Policy, mesh: Mesh) -> KVState:
    """Return the global state of a mesh, with ShapeDtypeStructs that have shardings in place of arrays."""
    shards = Shards(mesh)
    specs = cache_specs(MIDDLE, policy, ROWS, CONTEXT + NEW, CONTEXT, "float32", "resident")
    state = abstract_of(on_backend(tuple(local_spec(spec, shards) for spec in specs), "gpu"), policy)

    def whole(leaf: Any, split: PartitionSpec) -> Any:
        shape = whole_shape(shards, split, leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, split))

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: whole(leaf, PartitionSpec()), tree)

    layers = [
        jax.tree.map(whole, layer, layer_splits(spec)) for layer, spec in zip(state.layers, state.specs, strict=True)
    ]
    return state.replace(
        layers=tuple(layers),
        lengths=everywhere(state.lengths),
        last=everywhere(state.last),
        counters=everywhere(state.counters),
    )


def compiled(policy: Policy) -> dict[str, int]:
    """Return the bytes that one device needs for the arguments and the temporaries of a step."""
    mesh = Mesh(np.array(jax.devices()[: SP * TP]).reshape(1, SP, TP), AXES)
    reads, writes = abstract(policy.resolve(MIDDLE, CONTEXT + NEW), mesh).split()
    weights = {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding_of(mesh, path, leaf.shape))
        for path, leaf in traverse_util.flatten_dict(abstract_weights(MIDDLE), sep="/").items()
    }
    program = jax.jit(
        lambda weights, reads, writes, tokens, new: step_writes(weights, MIDDLE, tokens, new, reads, writes),
        donate_argnums=2,
        keep_unused=True,
    )
    tokens, new = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    lowered = program.lower(traverse_util.unflatten_dict(weights, sep="/"), reads, writes, tokens, new)
    needed = lowered.compile().memory_analysis()
    return {"arguments": needed.argument_size_in_bytes, "temporaries": needed.temp_size_in_bytes}


def compile_all() -> dict[str, dict[str, int]]:
    """Return `compiled` of each policy."""
    return {name: compiled(policy) for name, policy in POLICIES.items()}
