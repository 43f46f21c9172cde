"""What four forced CPU devices hold and exchange, and what a step takes there. `forced_devices.FOUR` runs it.

`measure`: for each mesh and policy, the bytes of a state by device and memory, how each array is split, and what a
compiled step sends over links. `compile_all`: the bytes of a step as XLA compiles it from shapes alone.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshadow.cache.rows import layer_splits
from jshadow.cache.spec import Shards, local_spec, whole_shape
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.step import step_writes
from jshadow.evaluation.laws.law import TINY
from jshadow.models.config import ModelConfig
from jshadow.models.partition import AXES, sharding_of
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend
from jshadow.policies import Full, Policy, Quest, ShadowKV, ShadowKVPlus, SnapKV
from jshadow.policies.settings import with_settings
from jshadow.weights.params import Params, init_params, spread

CONFIG = dataclasses.replace(TINY, num_layers=1, q_heads=8, kv_heads=4, head_dim=16, vocab_size=96, eos_ids=())
LENGTHS, CAPACITY, ROWS = (60, 41), 112, 2
SMALL: dict[str, Any] = {"chunk_size": 4, "outlier_chunks": 2, "local_chunks": 2, "budget": 16}
PLUS: dict[str, Any] = {"rank": 12, "extra_outlier_chunks": 2, "extend_piece": 6} | SMALL
POLICIES = {
    "full": Full(),
    "quest": Quest(budget=12, unit=4, dense_layers=0),
    "snapkv": SnapKV(max_capacity_prompt=14, observation_window=5, kernel=3),
    "shadowkv": ShadowKV(rank=12, **SMALL),
    "packed": dataclasses.replace(ShadowKV.packed(), **SMALL),
    "shadowkv_plus": ShadowKVPlus(later_keys="projected", **PLUS),
    "plus_int4": ShadowKVPlus(**PLUS),
}
# data, tp; and where left rows lie
MESHES = {
    "tp2": ((1, 2), "split"),
    "tp2 everywhere": ((1, 2), "everywhere"),
    "tp4": ((1, 4), "split"),
    "data2": ((2, 1), "split"),
    "data2 tp2": ((2, 2), "split"),
}
EXCHANGED = ("tp2", "tp4")  # the meshes whose compiled steps are read
OPERATION = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"(f32|s32|u8)\[([\d,]+)\]")
NUMBER = {"f32": 4, "s32": 4, "u8": 1}


def mesh_of(*sizes: int) -> Mesh:
    """A mesh of the axes data and tp."""
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), AXES)


def held(tree: Any) -> dict[str, dict[str, int]]:
    """Return the bytes of the parts of all arrays, by memory and device."""
    found: dict[str, dict[str, int]] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            own = found.setdefault(shard.data.sharding.memory_kind, {})
            own[str(shard.device.id)] = own.get(str(shard.device.id), 0) + shard.data.nbytes
    return found


def splits(state: KVState) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each array of the first layer, and of lengths and counters, and the axes that split it."""
    trees = {"": state.layers[0], "lengths": state.lengths, "last": state.last, "counters": state.counters}
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            spec = [axis for axes in leaf.sharding.spec for axis in (axes if isinstance(axes, tuple) else (axes,))]
            used = [axis for axis in spec if axis and leaf.sharding.mesh.shape[axis] > 1]
            parts = leaf.nbytes // leaf.addressable_shards[0].data.nbytes
            assert parts == np.prod([leaf.sharding.mesh.shape[axis] for axis in used], dtype=int), (path, used)
            yield name + jax.tree_util.keystr(path), sorted(used)


def exchanged(params: Params, state: KVState) -> int:
    """Return the bytes that a device sends in a compiled step, as a ring exchanges them.

    Counters, which are integers of one axis or without sign, are left out, and so is what makes the logits.
    """

    def step(weights: Any, token: Any, reads: Any, writes: Any) -> Any:
        out, after = decode.step(weights, CONFIG, token, KVState.of(reads, writes))
        return out, after.split()[1]

    token, shards, sent = np.zeros(ROWS, np.int32), state.specs[0].shards, 0
    assert shards is not None
    program = jax.jit(step, donate_argnums=3).lower(params.weights, token, *state.split()).compile().as_text()
    for line in program.splitlines():
        if (found := OPERATION.search(line)) is None:
            continue
        arrays = [(kind, [int(size) for size in sizes.split(",")]) for kind, sizes in ARRAY.findall(found[1])]
        arrays = [(kind, sizes) for kind, sizes in arrays if len(sizes) > 1 and CONFIG.vocab_size not in sizes]
        size = sum(NUMBER[kind] * int(np.prod(sizes)) for kind, sizes in arrays)
        parts = shards.tp
        share = {"all-reduce": 2 * (parts - 1) / parts, "all-gather": (parts - 1) / parts}
        sent += round(size * share.get(found[2], parts - 1))
    return sent


def measure() -> dict[str, Any]:
    """What the devices of each mesh hold for each policy."""
    plain = init_params(CONFIG, seed=1)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTHS[0]), np.int32)
    asked, policies = (tokens, np.array(LENGTHS, np.int32)), list(POLICIES.values())
    results: dict[str, Any] = {}
    for name, (sizes, left) in MESHES.items():
        params = spread(plain, mesh_of(*sizes), left)
        made = decode.prefill_many(params, *asked, policies, capacity=CAPACITY, fetch="device_put")
        results[name] = {"weights": held(params.weights), "policies": {}}
        for policy, (_, state) in zip(POLICIES, made, strict=True):
            found = {"held": held((state.layers, state.shared, state.fitted)), "splits": dict(splits(state))}
            if name in EXCHANGED:
                found["sent"] = exchanged(params, state)
            results[name]["policies"][policy] = found
    return results


# A step from shapes alone


MIDDLE = dataclasses.replace(
    TINY, num_layers=2, model_dim=128, ffn_dim=256, q_heads=8, kv_heads=4, head_dim=32, vocab_size=512, context=8192
)
CONTEXT, NEW, BATCH, TP = 4096, 64, 3, 4
BUDGET = {"budget": 512, "outlier_chunks": 8}
MIDDLE_POLICIES = {
    "full": Full(),
    "shadowkv": ShadowKV(rank=64, **BUDGET),
    "packed": with_settings(ShadowKV.packed(), BUDGET | {"keys.bits": None, "keys.profile": (32, 64, 32)}),
}


def abstract(policy: Policy, mesh: Mesh) -> KVState:
    """The global state of a mesh, with ShapeDtypeStructs that have shardings in place of arrays."""
    shards = Shards(mesh)
    specs = cache_specs(MIDDLE, policy, BATCH, CONTEXT + NEW, CONTEXT, "float32", "resident")
    state = abstract_of(on_backend(tuple(local_spec(spec, shards) for spec in specs), "gpu"), policy)

    def whole(leaf: Any, split: PartitionSpec = PartitionSpec()) -> Any:  # noqa: B008
        shape = whole_shape(shards, split, leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, split))

    layers = zip(state.layers, state.specs, strict=True)
    everywhere = {name: jax.tree.map(whole, getattr(state, name)) for name in ("lengths", "last", "counters")}
    return state.replace(
        layers=tuple(jax.tree.map(whole, layer, layer_splits(spec)) for layer, spec in layers), **everywhere
    )


def step_memory(config: ModelConfig, weights: Any, state: KVState) -> tuple[int, int]:
    """The bytes that XLA takes for the arguments and for the temporaries of a step from shapes alone."""
    reads, writes = state.split()
    program = jax.jit(
        lambda weights, reads, writes, tokens, new: step_writes(weights, config, tokens, new, reads, writes),
        donate_argnums=2,
        keep_unused=True,  # a step does not read the quantizers' steps, which later keys are coded with
    )
    tokens, new = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    needed = program.lower(weights, reads, writes, tokens, new).compile().memory_analysis()
    return needed.argument_size_in_bytes, needed.temp_size_in_bytes


def compile_all() -> dict[str, tuple[int, int]]:
    """`step_memory` of each policy on one device of four."""
    mesh = mesh_of(1, TP)
    weights = {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding_of(mesh, path, leaf.shape))
        for path, leaf in traverse_util.flatten_dict(abstract_weights(MIDDLE), sep="/").items()
    }
    tree = traverse_util.unflatten_dict(weights, sep="/")
    resolved = {name: policy.resolve(MIDDLE, CONTEXT + NEW) for name, policy in MIDDLE_POLICIES.items()}
    return {name: step_memory(MIDDLE, tree, abstract(policy, mesh)) for name, policy in resolved.items()}
