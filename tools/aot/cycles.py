"""Cycles of speculation as one program each, and the check that they copy nothing of the target's keys and values."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from aot.compiler import Program, place
from aot.models import LLAMA, ONE_LAYER
from aot.programs import Task, weights_of
from jshadow.cache.state import KVState
from jshadow.engine.sampling import Sampler
from jshadow.engine.speculation import CompressedDraft, SelfDraft
from jshadow.engine.speculation.drafter import Progress
from jshadow.engine.speculation.drafters import all_summaries
from jshadow.engine.speculation.run import CyclePlan, run_cycle
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend
from jshadow.policies import Full, Offloaded, Policy, ShadowKV

HOST = ShadowKV(budget=2048)


def target_of(config: ModelConfig, policy: Policy, batch: int, context: int, fetch: str) -> KVState:
    """Return the abstract state of a target after prompts of `context` tokens, with room for 64 more."""
    specs = cache_specs(config, policy.resolve(config, context + 64), batch, context + 64, context, "bfloat16", fetch)
    return abstract_of(on_backend(specs, "gpu"), specs[0].policy)


def cycle_task(name: str, gpu: str, config: ModelConfig, drafter: Any, target: KVState, memory: Any) -> Task:
    """Return the program of a cycle. `memory` has the fixed and the live arrays of the drafter, without weights."""
    batch = target.batch
    rows = Shape((batch,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    weights, (fixed, live) = weights_of(config), memory
    reads, writes = target.split()
    plan = CyclePlan(drafter.traced, drafter.tokens, Sampler())

    def cycle(models: Any, reads: Any, writes: Any, live: Any, far: Any) -> Any:
        return run_cycle.__wrapped__(models, reads, writes, live, far, config=config, plan=plan)

    arguments = ((weights, fixed), reads, writes, live, (Progress(rows, rows, rows), key))
    arguments = tuple(map(place, arguments))
    shown = f"{name}, {batch} x {target.capacity - 64:,}, {target.fetch}"
    return Task(shown, gpu, cycle, arguments, (2, 3), target=target)


def self_cycle(gpu: str, config: ModelConfig, name: str) -> Task:
    """Return a cycle of eight drafts over full attention, whose keys and values are on the device."""
    drafter, target = SelfDraft(), target_of(config, Full(), 7, 122_880, "resident")
    layers = (True,) * config.num_layers
    summaries = jax.eval_shape(lambda state: all_summaries.__wrapped__(state, drafter=drafter, layers=layers), target)
    return cycle_task(name, gpu, config, drafter, target, (None, summaries))


def host_cycle(gpu: str, config: ModelConfig, name: str) -> Task:
    """Return a cycle of 32 drafts over a million tokens whose keys and values are in host memory."""
    drafter = CompressedDraft(tokens=32, policy=HOST)
    target = target_of(config, Offloaded(), 1, 1_000_000, "device_put")
    reads, writes = target_of(config, HOST, 1, 1_000_000, "device_put").split()
    return cycle_task(name, gpu, config, drafter, target, ((None, reads), writes))


def cycle_tasks(gpu: str) -> Iterator[Task]:
    """Yield the cycles of one layer, and that of the whole model."""
    yield self_cycle(gpu, ONE_LAYER, "cycle layer, self")
    yield host_cycle(gpu, ONE_LAYER, "cycle layer, compressed over offloaded")
    if gpu == "h200":
        yield self_cycle(gpu, LLAMA, "Llama-3.1-8B, cycle, self")


def target_faults(target: KVState, program: Program) -> Iterator[str]:
    """Yield a line for each sign that a program copies keys and values of its target.

    Every array is on the device or in host memory, and has a name of its shape in the program.
    """
    layer = target.layers[0]
    arrays = [layer.live.cache.k] if isinstance(target.policy, Full) else [layer.host.prompt.array]
    for array in arrays:
        size = math.prod(array.shape) * array.dtype.itemsize
        if program.memory.temp_size_in_bytes >= size:
            yield f"temporaries {program.memory.temp_size_in_bytes:,} could hold keys of a layer, {size:,}"
        text = "[" + ",".join(map(str, array.shape)) + "]"
        bad = {i.operation for i in program.everything() if text in i.result and i.operation.startswith("copy")}
        if bad:
            yield f"keys and values {text} are the result of {sorted(bad)}"
        if isinstance(target.policy, Offloaded) and not overlaps_attention(text, program):
            yield f"no copy of a block of {text} overlaps with the attention to the block before it"


def overlaps_attention(text: str, program: Program) -> bool:
    """Return whether, in a loop, a copy from the array with this shape begins before an attention and ends after it."""
    copy, attended = None, False
    for one in program.everything():
        if one.operation.endswith("-start") and text in one.result:
            copy, attended = one.name, False
        elif one.operation == "while" and copy:
            attended = True
        elif one.operation.endswith("-done") and copy and f"%{copy})" in one.line:
            if attended:
                return True
            copy = None
        elif one.operation == "parameter":  # the next computation
            copy = None
    return False
