"""Decode steps of rows that share the prompt half of one state, and the check that they copy nothing of it."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from aot.compiler import SHAPE, SIZES, Program, place
from aot.models import ONE_LAYER
from aot.programs import Task, weights_of
from jshadow.cache.state import Reads
from jshadow.engine.step import step_writes
from jshadow.planner.bytes import abstract_of, on_backend
from jshadow.planner.machine import abstract_state
from jshadow.policies import Policy, ShadowKV

ROWS, CAPACITY, ROOM = 8, 131_072, 1024
SMALLEST = 1 << 18  # bytes of the prompt's arrays that are looked for; masks and counts are smaller
# Operations that allocate no array. A custom call can return its arguments, so its results are looked at.
NO_ARRAYS = {"parameter", "tuple", "get-tuple-element", "bitcast"}


def shared_tasks(gpu: str) -> Iterator[Task]:
    """Yield the step of eight rows on one prompt: the paper's codes in host memory, and packed codes on the device."""
    for told, policy, fetch in (
        ("paper", ShadowKV(), "zero_copy"),
        ("packed small", ShadowKV.packed(small=True), "resident"),
    ):
        yield shared_task(f"shared step, {told}, {fetch}", gpu, policy, fetch)


def shared_task(name: str, gpu: str, policy: Policy, fetch: str) -> Task:
    """Return the program of a step of `ROWS` rows on one prompt."""
    sizes: dict[str, Any] = {"batch": 1, "capacity": CAPACITY, "prompt": CAPACITY - ROOM, "dtype": "bfloat16"}
    state = abstract_state(ONE_LAYER, policy, **sizes, fetch=fetch, room=ROOM)
    reads, writes = abstract_of(on_backend(state.specs, "gpu"), state.policy).split()
    writes = jax.tree.map(lambda leaf: Shape((ROWS, *leaf.shape[1:]), leaf.dtype), writes)
    token, new = Shape((ROWS, 1), jnp.int32), Shape((ROWS,), jnp.int32)

    def step(weights: Any, token: Any, new: Any, reads: Any, writes: Any) -> Any:
        return step_writes(weights, ONE_LAYER, token, new, reads, writes)

    arguments = tuple(place(tree) for tree in (weights_of(ONE_LAYER), token, new, reads, writes))
    return Task(name, gpu, step, arguments, (4,), prompt=reads)


def copies_of(reads: Reads, program: Program) -> Iterator[str]:
    """Yield one line for each large array of the prompt half that has the shape of a result or fits the temporaries.

    Axes of size 1, and an axis of the rows at the front, do not count.
    """
    for leaf in jax.tree.leaves(reads):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if size < SMALLEST:
            continue
        wanted = size // math.prod(leaf.shape), essential(leaf.shape)
        for one in program.everything():
            shapes = [] if one.operation in NO_ARRAYS else re.findall(SHAPE, one.result)
            found = [(SIZES[kind], essential(map(int, filter(None, dims.split(","))))) for kind, dims in shapes]
            if wanted in found or (wanted[0], (ROWS, *wanted[1])) in found:
                yield f"an array {leaf.shape} of the prompt half is the result of {one.operation} {one.name}"
    temporaries = program.memory.temp_size_in_bytes + program.memory.host_temp_size_in_bytes
    largest = max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(reads))
    if temporaries >= largest:
        yield f"temporaries {temporaries:,} could hold an array of the prompt half, {largest:,}"


def essential(shape: Any) -> tuple[int, ...]:
    """Return the sizes of a shape without those that are 1."""
    return tuple(size for size in shape if size != 1)
