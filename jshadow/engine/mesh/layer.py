"""The hooks of a layer on every device of a mesh. The model's matrix products stay with the compiler.

`jax.shard_map` gives each device its rows and heads, so the hooks run there as they do on one device. The
compiler cannot split the kernels of this project. It would also gather the scores of all chunks in every layer.

B rows, T tokens of a step, h_q query heads, h_kv KV heads, d head width.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from jshadow.cache.records import HostArray, HostTier, HostWrite, LayerState, PromptKV, StepKV
from jshadow.cache.rows import layer_splits
from jshadow.cache.spec import CacheSpec, Shards, everywhere
from jshadow.cache.state import Counters
from jshadow.engine.step_work import LayerWork, count_step

RunLayer = Callable[..., tuple[Array, LayerState, LayerWork]]


def step_splits(shards: Shards, step: StepKV) -> StepKV:
    """Return the PartitionSpecs of the arrays of a step."""
    rows, heads = shards.spec("data"), shards.spec("data", None, "tp")
    names = ("q_pre", "q_post", "k_pre", "k_post", "v", "q_foreseen")
    by_name: dict[str, Any] = {name: heads if name in names else rows for name in StepKV.__dataclass_fields__}
    by_name |= {"inverse": PartitionSpec(), "learned": PartitionSpec()}
    given: dict[str, Any] = {name: split for name, split in by_name.items() if getattr(step, name) is not None}
    return StepKV(**given)


def on_devices(
    run_layer: RunLayer, spec: CacheSpec, state: LayerState, step: StepKV, everyone: Any
) -> tuple[Array, LayerState, LayerWork]:
    """Run one layer of one step on every device of the mesh.

    Args:
        run_layer: runs the layer on one device, as in `step_state`.
        spec: the spec of the layer on one device.
        state, step: the global arrays.
        everyone: specs and host tiers of all layers. The layers of a mesh do not use each other's.

    Returns:
        The attention's output [B, T, h_q, d], the layer's new state, and the work, which has only its counters. Each
        device has counted its own heads: axis 0 of the counters is the device.
    """
    shards = spec.shards
    assert shards is not None

    def one(state: LayerState, step: StepKV) -> tuple[Array, Any, HostArray | None, Counters]:
        out, after, work = run_layer(spec, state, step, everyone)
        assert not work.later, "a layer that plans ahead runs on one device"
        counters = work.counted
        if counters is None:
            visible = step.positions + 1
            counters = count_step(Counters.zeros(spec.batch), (spec,), [after], [work], visible, step.valid)
        return out, after.live, after.host.tail, jax.tree.map(lambda x: x[None], counters)

    where = layer_splits(spec)
    inputs = LayerState(where.frozen, where.live, where.host)
    outputs = (
        shards.spec("data", None, "tp"),
        where.live,
        where.host.tail,
        PartitionSpec("tp", *shards.spec("data")),
    )
    run = jax.shard_map(
        one,
        mesh=shards.mesh,
        in_specs=(inputs, step_splits(shards, step)),
        out_specs=outputs,
        check_vma=False,
    )
    out, live, tail, counters = run(state, step)
    return out, state.replace(live=live, host=state.host.replace(tail=tail)), LayerWork(counted=counters)


def joined(shards: Shards, counters: Counters) -> Counters:
    """Return the counters of all devices together, from those of each device [devices, B].

    The numbers of tokens attended to are means over heads, so the mean over the devices is taken. All others are sums.
    """
    sums = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), counters)
    steps = counters.steps[0]
    total = sums.replace(steps=steps, attended=sums.attended / shards.tp)
    counted: Counters = everywhere(total, shards)
    return counted


def compress_on_devices(
    compress: Callable[..., tuple[LayerState, HostWrite | None]],
    prompt: PromptKV,
    fitted: Any,
    spec: CacheSpec,
) -> tuple[LayerState, HostWrite | None]:
    """Compress the prompt of one layer on every device of the mesh.

    Args:
        compress: compresses the prompt on one device. It maps a prompt and learned arrays to a state and a write.
        prompt: the global arrays of the prompt.
        fitted: arrays that the policy learned for this layer, or None.
        spec: the spec of the layer on one device.
    """
    shards = spec.shards
    assert shards is not None
    rows, heads = shards.spec("data"), shards.spec("data", None, "tp")
    by_name: dict[str, Any] = {name: heads for name in ("k_pre", "k_post", "v", "q_tail", "q_post")}
    by_name |= {"lengths": rows, "positions": rows, "extra": rows}
    by_name |= {name: shards.spec("data", "tp") for name in ("lse", "second_pass")}
    given: dict[str, Any] = {name: split for name, split in by_name.items() if getattr(prompt, name) is not None}
    inputs = PromptKV(**given)
    where = layer_splits(spec)
    wrote: Any = shards.spec("data", "tp")
    has_rows = where.host.prompt is not None
    run = jax.shard_map(
        compress,
        mesh=shards.mesh,
        in_specs=(inputs, PartitionSpec()),
        out_specs=(where.replace(host=HostTier()), HostWrite(wrote) if has_rows else None),
        check_vma=False,
    )
    result: tuple[LayerState, HostWrite | None] = run(prompt, fitted)
    return result
