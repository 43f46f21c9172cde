"""Times of the stages of one layer's decode step. Each stage is a separate program on the same state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jshadow.cache import offload
from jshadow.cache.records import HostTier, LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.evaluation.speed import Shape, Times, compiled, layer_state, measure, random_step, timed
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.base import step_flops
from jshadow.policies.shadowkv.key_codecs import Sizes

# Each stage in order -> the stage that contains it, or None. For example, "fetch" contains "keys" and "values".
STAGES = {
    "append": None,
    "scores": "select",
    "select": None,
    "keys": "fetch",
    "values": "fetch",
    "fetch": None,
    "attend": None,
}
# Part of a state (a key of `step_bytes`) -> the stage that reads it. All other parts are read by "attend".
READ_BY = {
    "landmarks": "scores",
    "spread": "scores",
    "candidates": "scores",
    "left": "keys",
    "right": "keys",
    "values": "values",
}


def bench_stages(shape: Shape, policy: Policy, fetch: str = "auto", repeats: int = 10) -> list[dict[str, Any]]:
    """Time the stages of one decode step of one layer.

    The sum of their times is larger than the time of a step, because a step overlaps and fuses its stages. The times
    show which stage is slow.

    Returns:
        One row for each stage: stage, part_of (the stage that contains it, or None), step_seconds (median), least,
        most, bytes_read, bytes_fetched and flops. The bytes that one stage passes to the next are not counted.
    """
    spec, state = layer_state(shape, policy, fetch)
    step = random_step(shape, 1, spec.policy.query_rows)
    runs, costs = programs(spec, state, step), stage_costs(spec, state)
    fetching = runs.pop("fetch", None) if spec.fetch == "zero_copy" else None
    times = {name: timed(run, *args, repeats=repeats) for name, (run, args) in runs.items()}
    if fetching is not None:
        times["fetch"] = time_kept_fetch(*fetching, repeats=repeats)
    times["append"] = time_append(spec, state, step, repeats)  # last, because it consumes the state
    return [
        {
            "stage": name,
            "part_of": outer,
            "step_seconds": times[name].median,
            "least": times[name].least,
            "most": times[name].most,
            **dict(zip(("bytes_read", "bytes_fetched", "flops"), costs[name], strict=True)),
        }
        for name, outer in STAGES.items()
        if name in times
    ]


def programs(spec: CacheSpec, state: LayerState, step: StepKV) -> dict[str, tuple[Callable[..., Any], tuple]]:
    """Return the function and the arguments of each stage of the policy that does not change the state."""
    policy, layout = spec.policy, spec.policy.host_layout(spec)
    runs: dict[str, tuple[Callable[..., Any], tuple]] = {}

    def select(state: LayerState, step: StepKV) -> Any:
        return policy.select(spec, state, step)[0]

    def attend(state: LayerState, step: StepKV, fetched: Any) -> Any:
        return policy.attend(spec, state, step, fetched)[0]

    selection = jax.jit(select)(state, step)
    fetched = None
    if selection is not None:
        assert layout is not None
        ids = jnp.broadcast_to(selection.ids, (spec.batch, layout.heads, selection.ids.shape[2]))

        def choose(state: LayerState, step: StepKV) -> Any:
            return select(state, step).replace(rebuild=None, kept=None)  # without this, both would be copied

        runs["select"] = (choose, (state, step))
        if isinstance(policy, ShadowKV):
            runs["scores"] = (lambda state, step: policy.scores(spec, state, step), (state, step))

        def fetch(tier: HostTier, selection: Any) -> Any:
            return offload.fetch(spec, tier, selection, layout)

        runs["fetch"] = (fetch, (state.host, selection))
        if selection.rebuild is not None and spec.fetch != "zero_copy":  # with zero_copy, one kernel does both
            runs["keys"] = (lambda rebuild, ids: rebuild.keys(ids), (selection.rebuild, ids))
            runs["values"] = (fetch, (state.host, selection.replace(rebuild=None, kept=None)))
        fetched = jax.jit(fetch)(state.host, selection)
    runs["attend"] = (attend, (state, step, fetched))
    return runs


def time_kept_fetch(fetch: Callable[..., Any], args: tuple[HostTier, Any], *, repeats: int) -> Times:
    """Time a fetch that writes into the donated buffers of the previous fetch, as in a step."""
    tier, selection = args
    rows = [(jnp.array(selection.kept.values), jnp.array(selection.kept.keys))]

    def run(rows: Any, tier: HostTier, selection: Any) -> Any:
        values, keys = rows
        fetched = fetch(tier, selection.replace(kept=selection.kept.replace(values=values, keys=keys)))
        return fetched.v.reshape(values.shape), fetched.k.reshape(keys.shape)

    program, seconds = compiled(run, rows[0], tier, selection, donate=(0,))

    def once() -> None:
        rows[0] = jax.block_until_ready(program(rows[0], tier, selection))

    return measure(once, repeats, seconds)


def time_append(spec: CacheSpec, state: LayerState, step: StepKV, repeats: int) -> Times:
    """Time appending a token to the state that the previous call returned. Changed arrays are donated, as in a step."""

    def append(writes: Any, reads: Any, step: StepKV) -> Any:
        layer, rows = spec.policy.append(spec, LayerState(reads[0], writes[0], HostTier(reads[1], writes[1])), step)
        return layer.live, offload.write(layer.host, rows).tail

    latest, reads = [(state.live, state.host.tail)], (state.frozen, state.host.prompt)
    program, seconds = compiled(append, latest[0], reads, step, donate=(0,))

    def once() -> None:
        latest[0] = jax.block_until_ready(program(latest[0], reads, step))

    return measure(once, repeats, seconds)


def stage_costs(spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int, int]]:
    """Return the bytes read, the bytes fetched from the host, and the operations of each stage."""
    policy, item = spec.policy, jnp.dtype(spec.dtype).itemsize
    read, moved, flops = (dict.fromkeys(STAGES, 0) for _ in range(3))
    for part, (device, host) in policy.step_bytes(spec, state).items():
        stage = READ_BY.get(part, "attend")
        read[stage] += device
        moved[stage] += host
    if isinstance(policy, ShadowKV):
        numbers, size = policy.landmark_reads(spec, state)
        flops["scores"] = 2 * spec.group * (read["scores"] // item + numbers - size // item)
        flops["keys"] = 2 * policy.selected_numbers(spec, spec.head_dim) * policy.codec.products(Sizes.of(spec))
    flops["attend"] = step_flops(spec, state) - flops["scores"] - flops["keys"]
    for table in (read, moved, flops):
        table["select"] += table["scores"]
        table["fetch"] += table["keys"] + table["values"]
    return {name: (read[name], moved[name], flops[name]) for name in STAGES}
