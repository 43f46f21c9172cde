"""What four forced CPU devices hold and exchange. `forced_devices.FOUR` runs it.

For each mesh and policy: the bytes of a state by device and memory, how each array is split, and what a compiled step
sends over links.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.evaluation.laws.inputs import TINY
from jshadow.policies import Full, Quest, ShadowKV, ShadowKVPlus, SnapKV
from jshadow.weights.params import Params, init_params, spread

CONFIG = dataclasses.replace(TINY, num_layers=1, q_heads=8, kv_heads=4, head_dim=16, vocab_size=96, eos_ids=())
LENGTHS, CAPACITY, ROWS = (60, 41), 112, 2
SMALL: dict[str, Any] = {"chunk_size": 4, "outlier_chunks": 2, "local_chunks": 2, "budget": 16}
POLICIES = {
    "full": Full(),
    "quest": Quest(budget=12, unit=4, dense_layers=0),
    "snapkv": SnapKV(max_capacity_prompt=14, observation_window=5, kernel=3),
    "shadowkv": ShadowKV(rank=12, **SMALL),
    "packed": dataclasses.replace(ShadowKV.packed(), **SMALL),
    "shadowkv_plus": ShadowKVPlus(rank=12, extra_outlier_chunks=2, extend_piece=6, later_keys="projected", **SMALL),
    "plus_int4": ShadowKVPlus(rank=12, extra_outlier_chunks=2, extend_piece=6, **SMALL),
}
# data, sp, tp; and where left rows lie
MESHES = {
    "tp2": ((1, 1, 2), "split"),
    "tp2 everywhere": ((1, 1, 2), "everywhere"),
    "tp4": ((1, 1, 4), "split"),
    "sp4": ((1, 4, 1), "split"),
    "data2": ((2, 1, 1), "split"),
    "tp2 sp2": ((1, 2, 2), "split"),
}
EXCHANGED = ("tp2 sp2",)  # the meshes whose compiled steps are read
ALONG_SP = ("replica_groups={{0,2}", "{'sp'}")  # in the text of such a step, as two versions of XLA write it
OPERATION = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"(f32|s32|u8)\[([\d,]+)\]")
NUMBER = {"f32": 4, "s32": 4, "u8": 1}


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


def exchanged(params: Params, state: KVState) -> dict[str, int]:
    """Return the bytes that a device sends in a compiled step, along tp and sp, as a ring exchanges them.

    Counters, which are integers of one axis or without sign, are left out, and so is what makes the logits.
    """

    def step(weights: Any, token: Any, reads: Any, writes: Any) -> Any:
        out, after = decode.step(weights, CONFIG, token, KVState.of(reads, writes))
        return out, after.split()[1]

    token, shards, sent = np.zeros(ROWS, np.int32), state.specs[0].shards, {"tp": 0, "sp": 0}
    assert shards is not None
    program = jax.jit(step, donate_argnums=3).lower(params.weights, token, *state.split()).compile().as_text()
    for line in program.splitlines():
        if (found := OPERATION.search(line)) is None:
            continue
        arrays = [(kind, [int(size) for size in sizes.split(",")]) for kind, sizes in ARRAY.findall(found[1])]
        arrays = [(kind, sizes) for kind, sizes in arrays if len(sizes) > 1 and CONFIG.vocab_size not in sizes]
        size = sum(NUMBER[kind] * int(np.prod(sizes)) for kind, sizes in arrays)
        axis = "sp" if any(text in line for text in ALONG_SP) else "tp"
        parts = shards.mesh.shape[axis]
        share = {"all-reduce": 2 * (parts - 1) / parts, "all-gather": (parts - 1) / parts}
        sent[axis] += round(size * share.get(found[2], parts - 1))
    return sent


def measure() -> dict[str, Any]:
    """Return what the devices of each mesh hold for each policy."""
    plain = init_params(CONFIG, seed=1)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTHS[0]), np.int32)
    results: dict[str, Any] = {}
    for name, (sizes, left) in MESHES.items():
        mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("data", "sp", "tp"))
        params = spread(plain, mesh, left)
        policies = list(POLICIES.values())
        made = decode.prefill_many(
            params, tokens, np.array(LENGTHS, np.int32), policies, capacity=CAPACITY, fetch="device_put"
        )
        results[name] = {"weights": held(params.weights), "policies": {}}
        for policy, (_, state) in zip(POLICIES, made, strict=True):
            found = {"held": held((state.layers, state.shared, state.fitted)), "splits": dict(splits(state))}
            if name in EXCHANGED:
                found["sent"] = exchanged(params, state)
            results[name]["policies"][policy] = found
    return results
