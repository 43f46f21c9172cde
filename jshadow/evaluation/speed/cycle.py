"""The time of one cycle of self-drafting in one layer's attention, beside that of one step of full attention.

Keys, values and queries are random. The weights of a model take no part, and neither do its other layers.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import HostTier, KeyValues, LayerState
from jshadow.engine.speculation import SelfDraft
from jshadow.engine.step import AllLayers, step_layer
from jshadow.errors import ConfigError
from jshadow.evaluation.speed.layer import LEFT, QUERIES, Shape, layer_state, random_step
from jshadow.evaluation.speed.timing import compiled
from jshadow.planner.bytes import abstract_state
from jshadow.policies import Full
from jshadow.policies.full import OneCache

PROGRAMS = ("step", "draft", "check")  # a step of full attention; all drafts of a cycle; their check


def bench_cycle(shape: Shape, drafter: SelfDraft, acceptance: float, repeats: int = 10) -> dict[str, Any]:
    """Time the drafts and the check of a cycle, and one step of full attention.

    Args:
        shape: the shape of the layer.
        drafter: how tokens are drafted.
        acceptance: probability that a draft is accepted if those before it were.
        repeats: number of timed calls of each, in turn.

    Returns:
        context, batch, dtype, step_seconds, draft_seconds (all drafts of a cycle), check_seconds (each the median),
        tokens_a_cycle, and ratio: the tokens per second of cycles to those of steps, with its least and its most.

    Raises:
        ConfigError: acceptance is not in [0, 1], or a setting of the drafter is out of range.
    """
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"acceptance must lie in [0, 1], got {acceptance!r}")
    sizes: dict[str, Any] = {
        "batch": shape.batch,
        "capacity": shape.context + LEFT,
        "prompt": shape.context,
        "dtype": shape.dtype,
    }
    drafter.check_target(shape.config(), abstract_state(shape.config(), Full(), **sizes, fetch="resident"))
    run = cycle_programs(shape, drafter)
    for name in PROGRAMS:
        run(name)
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(repeats):
        for name, seconds in times.items():
            start = time.perf_counter()
            run(name)
            seconds.append(time.perf_counter() - start)
    tokens = sum(acceptance**place for place in range(drafter.tokens + 1))
    ratios = [tokens * step / (draft + check) for step, draft, check in zip(*times.values(), strict=True)]
    return {
        "context": shape.context,
        "batch": shape.batch,
        "dtype": shape.dtype,
        **{f"{name}_seconds": statistics.median(seconds) for name, seconds in times.items()},
        "tokens_a_cycle": tokens,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def cycle_programs(shape: Shape, drafter: SelfDraft) -> Callable[[str], None]:
    """Compile the programs of a layer on one random cache. Return a function that runs one of PROGRAMS and waits."""
    spec, state = layer_state(shape, Full(), "resident")
    policy, unit, count = drafter.policy, drafter.policy.unit, spec.capacity // drafter.policy.unit
    keys = state.live.cache.k[:, :, : count * unit].reshape(*state.live.cache.k.shape[:2], count, unit, -1)
    there = jnp.broadcast_to(jnp.arange(count * unit) < shape.context, (shape.batch, count * unit))
    summaries = jax.jit(lambda keys: policy.summarize(spec, keys, there.reshape(-1, count, unit), None))(keys)
    held = jnp.full(shape.batch, shape.context, jnp.int32)

    def layer_of(cache: KeyValues) -> LayerState:
        return LayerState(None, OneCache(cache), HostTier())

    def check(cache: KeyValues, step: Any) -> tuple[Array, KeyValues]:
        out, layer, _ = step_layer(spec, layer_of(cache), step, AllLayers((spec,), [HostTier()]))
        return out, layer.live.cache

    def drafts(cache: KeyValues, summaries: Any, step: Any) -> tuple[Array, KeyValues]:
        def one(cache: KeyValues, place: Array) -> tuple[KeyValues, Array]:
            moved = step.replace(positions=step.positions + place, lengths=step.lengths + place)
            layer, _ = spec.policy.append(spec, layer_of(cache), moved)
            seen = moved.replace(q_post=moved.q_post if layer.q_post is None else layer.q_post)
            return layer.live.cache, drafter.attend(spec, layer, seen, summaries, held)

        cache, outs = jax.lax.scan(one, cache, jnp.arange(drafter.tokens))
        return outs, cache

    def valid(step: Any) -> Any:
        return step.replace(valid=jnp.ones_like(step.valid))

    steps = itertools.cycle([valid(random_step(shape, seed)) for seed in range(1, 1 + QUERIES)])
    turns = itertools.cycle([valid(random_step(shape, seed, drafter.tokens + 1)) for seed in range(1, 1 + QUERIES)])
    cache = state.live.cache
    programs = {
        "step": compiled(check, cache, next(steps), donate=(0,))[0],
        "draft": compiled(drafts, cache, summaries, next(steps), donate=(0,))[0],
        "check": compiled(check, cache, next(turns), donate=(0,))[0],
    }
    latest = [cache]

    def run(name: str) -> None:
        more = {"step": (next(steps),), "draft": (summaries, next(steps)), "check": (next(turns),)}[name]
        out, latest[0] = programs[name](latest[0], *more)
        jax.block_until_ready((out, latest[0]))

    return run
