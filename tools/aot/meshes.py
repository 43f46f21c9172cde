"""Decode steps for two GPUs whose heads are split, and what travels between the GPUs.

The function is lowered with the shardings of two CPU devices, and compiled as one program of two partitions.
"""

import collections
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import ShapeDtypeStruct as Shape
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aot.compiler import Program, compile_for
from aot.models import ONE_LAYER
from aot.programs import size, weights_of
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.records import HostArray
from jshadow.cache.rows import layer_splits
from jshadow.cache.spec import Shards, local_spec, whole_shape
from jshadow.cache.state import KVState
from jshadow.engine.step import step_writes
from jshadow.models.partition import check_mesh, sharding_of
from jshadow.planner.bytes import abstract_of, on_backend
from jshadow.planner.machine import abstract_state
from jshadow.policies import Policy, ShadowKV

DEVICES, ROWS, CAPACITY, ROOM = 2, 2, 131_072, 1024
SETTINGS = (("paper", ShadowKV()), ("packed", ShadowKV.packed()))
TRAVELS = re.compile(r"all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute")
# Those of a layer: the heads' outputs, the MLP's outputs, and the selected left rows.
OF_A_LAYER = {"all-reduce": 2, "reduce-scatter": 1}


def tp_mesh() -> Mesh:
    """Return a mesh of two CPU devices, over which heads are split."""
    mesh = check_mesh(Mesh(np.array(jax.devices("cpu")[:DEVICES]), ("tp",)))
    assert mesh is not None
    return mesh


def step_program(gpu: str, policy: Policy) -> tuple[Program, dict[str, int], int]:
    """Compile a step of one layer.

    Returns:
        The program, the plan's bytes of a device {"device", "host"}, and the bytes of its other arguments.
    """
    shards = Shards(tp_mesh())
    sizes: dict[str, Any] = {"batch": ROWS, "capacity": CAPACITY, "prompt": CAPACITY - ROOM, "dtype": "bfloat16"}
    whole = abstract_state(ONE_LAYER, policy, **sizes, fetch="device_put", room=ROOM)
    specs = tuple(local_spec(spec, shards) for spec in on_backend(whole.specs, "gpu"))
    local = abstract_of(specs, whole.policy)
    planned = {
        name: sum(part)
        for name, part in zip(("device", "host"), zip(*state_nbytes(local).values(), strict=True), strict=True)
    }

    def spread(leaf: Any, split: Any) -> Any:
        if isinstance(leaf, HostArray):
            return leaf.replace(array=placed(leaf.array, split.array, leaf.memory))
        return placed(leaf, split, "device")

    def placed(leaf: Any, split: PartitionSpec, memory: str) -> Shape:
        sharding = NamedSharding(shards.mesh, split, memory_kind=memory)
        return Shape(whole_shape(shards, split, leaf.shape), leaf.dtype, sharding=sharding)

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: placed(leaf, PartitionSpec(), "device"), tree)

    layers = tuple(
        jax.tree.map(spread, layer, layer_splits(spec), is_leaf=lambda leaf: isinstance(leaf, HostArray))
        for spec, layer in zip(specs, local.layers, strict=True)
    )
    state: KVState = local.replace(
        layers=layers,
        lengths=everywhere(local.lengths),
        last=everywhere(local.last),
        counters=everywhere(local.counters),
    )
    flat = traverse_util.flatten_dict(weights_of(ONE_LAYER), sep="/")
    split = {path: sharding_of(shards.mesh, path, leaf.shape) for path, leaf in flat.items()}
    weights = {path: Shape(leaf.shape, leaf.dtype, sharding=split[path]) for path, leaf in flat.items()}
    token, new = everywhere((Shape((ROWS, 1), jnp.int32), Shape((ROWS,), jnp.int32)))

    def step(weights: Any, token: Any, new: Any, reads: Any, writes: Any) -> Any:
        return step_writes(weights, ONE_LAYER, token, new, reads, writes)

    arguments = (traverse_util.unflatten_dict(weights, sep="/"), token, new, *state.split())
    program = compile_for(gpu, step, *arguments, donate=(4,), devices=DEVICES)
    own = [split[path].shard_shape(leaf.shape) for path, leaf in flat.items()]
    of_weights = sum(int(np.prod(shape)) for shape in own) * 2
    return program, planned, of_weights + size((token, new, state.lengths, state.last, state.counters))


def travels(program: Program) -> list[tuple[str, str, str]]:
    """Return (operation, result, where it comes from) of everything that travels between the devices."""
    found = []
    for one in program.everything():
        if TRAVELS.match(one.operation) and not one.operation.endswith("-done"):
            origin = re.search(r'op_name="([^"]*)"', one.line)
            found.append((one.operation.removesuffix("-start"), one.result, origin[1] if origin else ""))
    return found


def mesh_faults(program: Program, planned: dict[str, int], other: int) -> Iterator[str]:
    """Yield one line for each check that a step for two devices fails."""
    memory, found = program.memory, travels(program)
    real = {"device": memory.argument_size_in_bytes - other, "host": memory.host_argument_size_in_bytes}
    for name, plan in planned.items():
        if abs(real[name] - plan) > 0.01 * plan:
            yield f"a device's state takes {real[name]:,} {name} bytes, the plan says {plan:,}"
    layer = collections.Counter(kind for kind, _, origin in found if "/Block/" in origin)
    if {kind: layer[kind] for kind in OF_A_LAYER} != OF_A_LAYER:
        yield f"a layer has {dict(layer)}, not {OF_A_LAYER}"
    for kind, result, origin in found:
        if kind == "all-gather" and "/Block/" in origin and not result.lstrip("(").startswith("s32["):
            yield f"an all-gather of {result} in {origin}; only the numbers of selected chunks are gathered"
        if kind in ("all-to-all", "collective-permute"):
            yield f"{kind} of {result} in {origin}"


def mesh_row(arguments: tuple[str, str]) -> dict:
    """Compile one of SETTINGS for a GPU, and return its row."""
    gpu, name = arguments
    start = time.perf_counter()
    program, planned, other = step_program(gpu, dict(SETTINGS)[name])
    memory = program.memory
    return {
        "program": f"step of tp 2, {name}, {ROWS} x {CAPACITY:,}, device_put",
        "gpu": f"2 x {gpu}",
        "device_arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "host_arguments": memory.host_argument_size_in_bytes,
        "host_temporaries": memory.host_temp_size_in_bytes,
        "biggest_copy": 0,
        "overlap": "-",
        "ptx": sorted(program.architectures()),
        "compile_seconds": round(time.perf_counter() - start, 1),
        "travels": [f"{kind} {result}" for kind, result, _ in travels(program)],
        "faults": list(mesh_faults(program, planned, other)),
    }
