"""One step as traceable code, layer by layer, on one device and on each device of a mesh. It checks nothing.

A layer can take all tokens of a piece of a turn before the next layer starts, because the tokens do not depend on the
layers above them. Its products read the weights once for the whole piece. Its hooks take the piece in blocks of
`HookInputs.piece` tokens, one after the other, so each query selects and attends as it does in a single step. If a
policy permits it (`SplitsTurns`), all tokens of a piece are stored and attended to at once. Only the selection and the
attention to selected units take blocks, which are larger.

On a mesh, `jax.shard_map` gives each device its rows and heads, so the hooks run there as they do on one device. The
model's matrix products stay with the compiler, which cannot split the kernels of this project.

B rows, T tokens of a step, b tokens of a block, D model width, h_q query heads, h_kv KV heads, d head width, V
vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jshadow.cache import accounting, offload
from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import Fetched, HostArray, HostTier, HostWrite, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.rows import layer_splits
from jshadow.cache.spec import CacheSpec, Shards, everywhere, gathered
from jshadow.cache.state import Counters, KVState, Reads, Writes, of_layer
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.models.transformer import Heads, apply_block, block_query, embed
from jshadow.models.transformer import logits as model_logits
from jshadow.ops.attention import add_rows, attend_prefixes
from jshadow.ops.rope import Rotation, inverse_frequencies, rotation
from jshadow.planner.pieces import block_tokens, split_of, turn_piece
from jshadow.policies.base import LayerCache
from jshadow.policies.capabilities import Foresees, PlansAhead, Speculates, SplitsTurns, Streams, capability


@dataclasses.dataclass
class LayerWork:
    """The units that one layer fetched in a step.

    Attributes:
        missed: (bytes of a unit, number of units in each head, int32 [B, heads]) of each fetch that skips units on the
            device. These units were moved in addition, and rows differ.
        later: (target layer, selection, fetched units) of each fetch that is for the next step.
        counted: the layer's own counters of these tokens if it took them in several blocks, else None.
    """

    moved: int = 0
    missed: list[tuple[int, Array]] = dataclasses.field(default_factory=list)
    fetches: list[Fetched] = dataclasses.field(default_factory=list)
    followed: list[Selection] = dataclasses.field(default_factory=list)
    later: list[tuple[int, Selection, Fetched]] = dataclasses.field(default_factory=list)
    counted: Counters | None = None

    def add(self, spec: CacheSpec, selection: Selection, layout: Any, fetched: Fetched) -> None:
        """Record the fetch of the units `selection` from the layer with this spec and host layout."""
        self.fetches.append(fetched)
        self.moved += accounting.fetched_bytes(spec, selection, layout)
        if selection.kept is not None and spec.fetch != "resident":
            self.missed.append((unit_bytes(spec, layout), selection.kept.count))
        if selection.hit is not None or selection.counts is not None:
            self.followed.append(selection)


def _attended(spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
    """Return the number of tokens that a query attends to, including its own, as a mean over heads, float32 [B].

    `lengths` is the number of tokens that each row holds at this query, int32 [B].
    """
    return functools.reduce(jnp.add, spec.policy.attended_parts(spec, state, lengths).values())


def _count_step(
    counters: Counters,
    specs: tuple[CacheSpec, ...],
    layers: list[LayerState],
    works: list[LayerWork],
    visible: Array,
    valid: Array,
) -> Counters:
    """Return the counters after a step.

    Args:
        visible: number of tokens up to and including each query's own, int32 [B, T].
        valid: which queries are real, bool [B, T].
    """
    queries = valid.sum(axis=1, dtype=jnp.uint32)
    one = (queries > 0).astype(jnp.uint32)
    seen = [
        jax.vmap(functools.partial(_attended, spec, layer), in_axes=1, out_axes=1)(visible)
        for spec, layer in zip(specs, layers, strict=True)
    ]
    units = [_unit_counts(selection) for work in works for selection in work.followed]
    # The layers are added first. So a GPU needs no kernel in each layer to add up the heads.
    selected, hits = (one * _summed((pair[which] for pair in units), len(one)) for which in (0, 1))
    missed = jnp.zeros_like(one)
    for unit, count in _in_one(pair for work in works for pair in work.missed):
        missed += accounting.missed_quanta(count.sum(axis=1), unit)
    return Counters(
        steps=counters.steps + queries,
        attended=counters.attended + jnp.where(valid, functools.reduce(jnp.add, seen), 0.0).sum(axis=1),
        selected=counters.selected + selected,
        hits=counters.hits + hits,
        fetched=counters.fetched
        + one * (jnp.uint32(sum(work.moved for work in works) // accounting.FETCH_QUANTUM) + missed),
        reached=counters.reached,
    )


def _counted(
    counters: Counters,
    specs: tuple[CacheSpec, ...],
    layers: list[LayerState],
    works: list[LayerWork],
    positions: Array,
    valid: Array,
) -> Counters:
    """Do what `_count_step` does for a step whose layers may have counted their work themselves (`LayerWork.counted`).

    The queries are at `positions`, int32 [B, T]. The layers are added before the devices of a mesh, so a step has one
    sum over devices.
    """
    counts = [work.counted for work in works if work.counted is not None]
    if not counts:
        return _count_step(counters, specs, layers, works, positions + 1, valid)
    total: Counters = jax.tree.map(lambda *parts: functools.reduce(jnp.add, parts), *counts)
    total = total.replace(steps=counts[0].steps)  # every layer has counted the same queries
    shards = specs[0].shards
    both: Counters = jax.tree.map(jnp.add, counters, total if shards is None else _joined_counters(shards, total))
    return both


def _unit_counts(selection: Selection) -> tuple[Array, Array]:
    """Return the number of valid units of a selection, and that of its hits, int32 [B, heads] each."""
    if selection.counts is not None:
        return selection.counts
    assert selection.hit is not None
    valid, hits = (mask.sum(axis=2, dtype=jnp.int32) for mask in (selection.valid, selection.valid & selection.hit))
    return valid, hits


def _summed(counts: Iterable[Array], rows: int) -> Array:
    """Add up counts of heads, int32 [B, heads] each, for `rows` rows: uint32 [B]."""
    total: Array = jnp.zeros(rows, jnp.uint32)
    for _, count in _in_one((0, count) for count in counts):
        total = total + count.astype(jnp.uint32).sum(axis=1)
    return total


def _in_one(pairs: Iterable[tuple[int, Array]]) -> list[tuple[int, Array]]:
    """Add up the arrays of those pairs whose number and shape are equal."""
    sums: dict[tuple[int, tuple[int, ...]], Array] = {}
    for number, array in pairs:
        key = number, array.shape
        sums[key] = sums[key] + array if key in sums else array
    return [(number, array) for (number, _), array in sums.items()]


def append_tokens(spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, StepKV]:
    """Store the new tokens, and write the units that leave the device."""
    state, rows = spec.policy.append(spec, state, step)
    if state.q_post is not None:
        step = step.replace(q_post=state.q_post)
    return state.replace(host=offload.write(state.host, rows), q_post=None), step


def _fetch_units(spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Fetched | None, LayerState, LayerWork]:
    """Select units, fetch them, and let the policy receive them."""
    policy, work = spec.policy, LayerWork()
    selection, state = policy.select(spec, state, step)
    if selection is None:
        return None, state, work
    layout = policy.host_layout(spec)
    assert layout is not None
    fetched = offload.fetch(spec, state.host, selection, layout)
    state = policy.receive(spec, state, selection, fetched)
    work.add(spec, selection, layout, fetched)
    return fetched, state, work


_TOKEN_FIELDS = ("q_pre", "q_post", "k_pre", "k_post", "v", "cos", "sin", "valid", "gates")  # [B, T, ...] each


def _in_blocks(
    run_layer: Callable[..., tuple[Array, LayerState, LayerWork]],
    spec: CacheSpec,
    state: LayerState,
    step: StepKV,
    everyone: Any,
) -> tuple[Array, LayerState, LayerWork]:
    """Run one layer for the T tokens of a piece, in blocks of `block_tokens` tokens.

    Returns:
        The attention's output [B, T, h_q, d], the layer's new state, and the work, which has only its counters.
    """
    split = split_of(spec)
    if split is None:
        return _over_blocks(lambda before, block, _: run_layer(spec, before, block, everyone), spec, state, step)
    state, step = append_tokens(spec, state, step)
    pieces = [(piece.k, piece.v, piece.valid) for piece in split.exact_pieces(spec, state, step)]
    exact = attend_prefixes(step.q_post, pieces, spec.scale, sinks=step.sinks)
    return _over_blocks(functools.partial(_add_selected, spec, split), spec, state, step, exact)


def _add_selected(
    spec: CacheSpec, split: SplitsTurns, state: LayerState, block: StepKV, exact: tuple[Array, Array]
) -> tuple[Array, LayerState, LayerWork]:
    """Let each query of a block, whose tokens are stored, select units and attend to them.

    Args:
        exact: their attention to the exact tokens [B, b, h_q, d], and its log-sum-exp, float32 [B, b, h_q].

    Returns:
        The attention's output [B, b, h_q, d], the layer's new state, and the units that were fetched.
    """
    fetched, state, work = _fetch_units(spec, state, block)
    if fetched is None:
        return exact[0], state, work
    piece, state = split.selected_piece(spec, state, block, fetched)
    return add_rows(block.q_post, (piece.k, piece.v, piece.valid), spec.scale, exact), state, work


def _over_blocks(
    run_block: Callable[[LayerState, StepKV, Any], tuple[Array, LayerState, LayerWork]],
    spec: CacheSpec,
    state: LayerState,
    step: StepKV,
    more: Any = (),
) -> tuple[Array, LayerState, LayerWork]:
    """Cut the tokens of a piece into blocks, and run the blocks one after the other.

    Args:
        more: a pytree of arrays [B, T, ...], which are cut in the same way.
    """
    count = step.valid.shape[1]
    size = block_tokens(spec, count)
    blocks = -(-count // size)
    names = _TOKEN_FIELDS + (() if step.q_foreseen is None else ("q_foreseen",))

    def cut(x: Array) -> Array:  # [B, T, ...] -> [blocks, B, size, ...]
        x = jnp.pad(x, [(0, 0), (0, blocks * size - count), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(x.shape[0], blocks, size, *x.shape[2:]).swapaxes(0, 1)

    def body(carry: tuple[Any, Any, Array, Counters], parts: tuple[dict[str, Array], Any]) -> tuple[Any, Array]:
        live, tail, lengths, counters = carry
        positions = lengths[:, None] + jnp.arange(size, dtype=jnp.int32)
        block = step.replace(**parts[0], positions=positions, lengths=lengths)
        before = state.replace(live=live, host=HostTier(state.host.prompt, tail))
        out, after, work = run_block(before, block, parts[1])
        assert not work.later, "a layer that plans ahead takes no blocks"
        counters = _count_step(counters, (spec,), [after], [work], positions + 1, block.valid)
        lengths = lengths + block.valid.sum(axis=1, dtype=jnp.int32)
        return (after.live, after.host.tail, lengths, counters), out

    start = state.live, state.host.tail, step.lengths, Counters.zeros(spec.batch)
    parts = jax.tree.map(cut, ({name: getattr(step, name) for name in names}, more))
    if blocks == 1:
        (live, tail, _, counters), out = body(start, jax.tree.map(functools.partial(jnp.squeeze, axis=0), parts))
    else:
        (live, tail, _, counters), outs = lax.scan(body, start, parts)
        out = outs.swapaxes(0, 1).reshape(outs.shape[1], blocks * size, *outs.shape[3:])[:, :count]
    return out, state.replace(live=live, host=HostTier(state.host.prompt, tail)), LayerWork(counted=counters)


RunLayer = Callable[..., tuple[Array, LayerState, LayerWork]]


def _step_splits(shards: Shards, step: StepKV) -> StepKV:
    """Return the PartitionSpecs of the arrays of a step."""
    rows, heads = shards.spec("data"), shards.spec("data", None, "tp")
    names = ("q_pre", "q_post", "k_pre", "k_post", "v", "q_foreseen", "gates")
    by_name: dict[str, Any] = {name: heads if name in names else rows for name in StepKV.__dataclass_fields__}
    by_name |= {"inverse": PartitionSpec(), "learned": PartitionSpec(), "sinks": PartitionSpec("tp")}
    by_name |= {"taps": PartitionSpec(None, "tp"), "skip": PartitionSpec("tp")}
    given: dict[str, Any] = {name: split for name, split in by_name.items() if getattr(step, name) is not None}
    return StepKV(**given)


def _layer_on_devices(
    run_layer: RunLayer, spec: CacheSpec, state: LayerState, step: StepKV, everyone: Any
) -> tuple[Array, LayerState, LayerWork]:
    """Run one layer of one step on every device of the mesh.

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
            counters = _count_step(Counters.zeros(spec.batch), (spec,), [after], [work], visible, step.valid)
        return out, after.live, after.host.tail, jax.tree.map(lambda x: x[None], counters)

    where = layer_splits(spec)
    inputs = LayerState(where.frozen, where.live, where.host)
    outputs = (shards.spec("data", None, "tp"), where.live, where.host.tail, PartitionSpec("tp", *shards.spec("data")))
    run = jax.shard_map(
        one, mesh=shards.mesh, in_specs=(inputs, _step_splits(shards, step)), out_specs=outputs, check_vma=False
    )
    out, live, tail, counters = run(state, step)
    return out, state.replace(live=live, host=state.host.replace(tail=tail)), LayerWork(counted=counters)


def _joined_counters(shards: Shards, counters: Counters) -> Counters:
    """Return the counters of all devices together, from those of each device [devices, B].

    The numbers of tokens attended to are means over heads, so the mean over the devices is taken. All others are sums.
    """
    sums = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), counters)
    steps = counters.steps[0]
    total = sums.replace(steps=steps, attended=sums.attended / shards.tp)
    counted: Counters = everywhere(total, shards)
    return counted


def compress_on_devices(
    compress: Callable[..., tuple[LayerState, HostWrite | None]], prompt: PromptKV, fitted: Any, spec: CacheSpec
) -> tuple[LayerState, HostWrite | None]:
    """Compress the prompt of one layer on every device of the mesh.

    Args:
        fitted: arrays that the policy learned for this layer, or None.
        spec: the spec of the layer on one device.
    """
    shards = spec.shards
    assert shards is not None
    rows, heads = shards.spec("data"), shards.spec("data", None, "tp")
    by_name: dict[str, Any] = {name: heads for name in ("k_pre", "k_post", "v", "q_tail", "q_post")}
    by_name |= {"lengths": rows, "positions": rows, "extra": rows}
    by_name |= {name: shards.spec("data", "tp") for name in ("lse", "second_pass")} | {"sinks": PartitionSpec("tp")}
    given: dict[str, Any] = {name: split for name, split in by_name.items() if getattr(prompt, name) is not None}
    inputs = PromptKV(**given)
    where = layer_splits(spec)
    if prompt.extra is not None and spec.policy.is_recurrent:
        inputs = inputs.replace(extra=where.live.recurrent)
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


# For jax.jit around a step. Other backends accept these options and ignore them. Without the first, XLA's GPU compiler
# may run the fetch and the rebuilding of keys one after the other instead of at the same time. The second is a size in
# megabytes. Matrix products of one input become one product if they are smaller, such as those of an MLP's gate and up.
COMPILER_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_dot_merger_threshold_mb": 1024}


@dataclasses.dataclass(frozen=True)
class AllLayers:
    """The data of all layers. A layer needs it to fetch rows of host memory (units) for another layer.

    Attributes:
        specs: the spec of each layer.
        tiers: the host tier of each layer.
        inbox: layer -> units that an earlier layer fetched for it. The layer removes them.
    """

    specs: tuple[CacheSpec, ...]
    tiers: list[HostTier]
    inbox: dict[int, Fetched] = dataclasses.field(default_factory=dict)


def step_layer(
    spec: CacheSpec, state: LayerState, step: StepKV, everyone: AllLayers
) -> tuple[Array, LayerState, LayerWork]:
    """Run one layer of one step: append, select, fetch, receive, attend, plan. Every policy has this order.

    Args:
        step: queries, keys and values of the step.
        everyone: specs, host tiers and inbox of all layers.

    Returns:
        The attention's output [B, T, h_q, d], the layer's new state, and the units that were fetched.
    """
    policy: LayerCache = spec.policy
    state, step = append_tokens(spec, state, step)
    index = spec.layer
    assert index is not None
    brought, state, work = _fetch_units(spec, state, step)
    inbox = everyone.inbox.pop(index, None)
    fetched = inbox if brought is None else brought
    out, state = policy.attend(spec, state, step, fetched)
    if isinstance(policy, Streams) and spec.fetch != "resident":
        work.missed.append(policy.streamed(spec, state))
    for planned in policy.plan(spec, state, step) if isinstance(policy, PlansAhead) else ():
        target = index if planned.layer is None else planned.layer
        other = everyone.specs[target]
        other_layout = other.policy.host_layout(other)
        tier = state.host if target == index else everyone.tiers[target]
        brought = offload.fetch(other, tier, planned, other_layout)
        work.add(other, planned, other_layout, brought)
        if planned.when == "now":
            assert target > index, f"layer {index} plans for layer {target}, which has attended already"
            everyone.inbox[target] = brought
        else:
            work.later.append((target, planned, brought))
    return out, state, work


def step_writes(
    weights: dict, config: ModelConfig, tokens: Array, new: Array, reads: Reads, writes: Writes, **options: Any
) -> tuple[Array, Writes]:
    """Run `step_state` on the two halves of a state, with its options. Return the logits and the new `writes`."""
    out, state = step_state(weights, config, tokens, new, KVState.of(reads, writes), **options)
    return out, state.split()[1]


def step_state(
    weights: dict,
    config: ModelConfig,
    tokens: Array,
    new: Array,
    state: KVState,
    *,
    every: bool = False,
    run_layer: Callable[..., tuple[Array, LayerState, LayerWork]] = step_layer,
) -> tuple[Array, KVState]:
    """Feed up to T tokens to each row.

    Args:
        tokens: token ids, int32 [B, T], right padded. T is at most `turn_tokens`.
        new: number of real tokens of each row, int32 [B], from 0 to T.
        every: whether to return the logits of all tokens, and not only those of each row's last real token.

    Returns:
        float32 logits [B, V], or [B, T, V] with `every`, and the new state. The logits of a row are NaN if a token id
        is out of range or the row has no room.
    """
    if state.shares_prompt:

        def step(one: KVState, tokens: Array, new: Array) -> tuple[Array, Writes]:
            options: Any = {"every": every, "run_layer": run_layer}
            return step_writes(weights, config, tokens, new, *one.split(), **options)

        out, writes = state.each_row(step, tokens, new)
        return out, state.join(writes)
    reads, writes = state.split()
    specs, policy, lengths = reads.specs, reads.policy, writes.lengths
    count = tokens.shape[1]
    speculation = capability(policy, Speculates)
    assert count == 1 or speculation is None, "a guess follows one token, not a piece of a turn"
    asked = jnp.concatenate([tokens, writes.shared.guess[:, None]], axis=1) if speculation else tokens
    positions = lengths[:, None] + jnp.arange(asked.shape[1], dtype=jnp.int32)
    # The guessed token attends to the cache, but its key and value are not stored.
    valid = jnp.arange(asked.shape[1]) < new[:, None]
    routed = None
    if config.experts is not None:  # a guess too
        routed = valid if speculation is None else jnp.broadcast_to(valid[:, :1], valid.shape)
    x, layers, works = _run_layers(weights, config, asked, state, positions, (valid, routed), run_layer)
    for target, selection, brought in (item for work in works for item in work.later):
        layers[target] = specs[target].policy.receive(specs[target], layers[target], selection, brought)
    if not (every or speculation):
        x = jnp.take_along_axis(x, jnp.maximum(new - 1, 0)[:, None, None], axis=1)
    shards = specs[0].shards
    out = gathered(model_logits(weights, config, x), shards)
    impossible = (valid[:, :count] & ((tokens < 0) | (tokens >= config.vocab_size))).any(axis=1) | (state.room() < new)
    # XLA's GPU compiler of jax 0.10.2 fuses these comparisons into the product of the head. With one row that fusion is
    # invalid, and the step does not compile. The barrier keeps them apart.
    out = everywhere(jnp.where(lax.optimization_barrier(impossible)[:, None, None], jnp.nan, out), shards)
    held = lengths + new
    newest = jnp.take_along_axis(tokens, jnp.maximum(new - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(new > 0, newest, writes.last)
    counters = _counted(writes.counters, specs, layers, works, positions, valid)
    held, last = everywhere((held, last), shards)
    changed = tuple((layer.live, layer.host.tail) for layer in layers)
    shared = writes.shared if speculation is None else _foreseen(speculation, writes.shared, out, held, new)
    return out[:, :count] if every else out[:, 0], state.join(Writes(changed, shared, held, last, counters))


def _foreseen(speculation: Speculates, shared: Any, out: Array, held: Array, new: Array) -> Any:
    """Return the shared part of a state after the logits `out` of a step, in rows that have fed a token."""
    return jax.tree.map(
        lambda fresh, old: jnp.where((new > 0).reshape(-1, *[1] * (old.ndim - 1)), fresh, old),
        speculation.after_step(shared, out, held),
        shared,
    )


def _run_layers(
    weights: dict,
    config: ModelConfig,
    tokens: Array,
    state: KVState,
    positions: Array,
    real: tuple[Array, Array | None],
    run_layer: Callable[..., tuple[Array, LayerState, LayerWork]],
) -> tuple[Array, list[LayerState], list[LayerWork]]:
    """Run the tokens of a step through all layers.

    Args:
        tokens: token ids, int32 [B, T], including a guessed token.
        positions: positions of the tokens, int32 [B, T].
        real: which tokens are stored, bool [B, T], and which are routed to experts. None: all of them.

    Returns:
        The hidden states [B, T, D] after the last layer, the new state of each layer, and the units that each fetched.
    """
    (valid, routed), reads, specs = real, state.reads(), state.specs
    foresees = capability(state.policy, Foresees) is not None
    turns = _rotations(specs, positions)
    layers = list(state.layers)
    everyone = AllLayers(specs, [layer.host for layer in layers])
    x, works = embed(weights, config, tokens), []
    foreseen: Array | None = None
    if capability(state.policy, Speculates) is None and tokens.shape[1] > turn_piece(state, tokens.shape[1]):
        run_layer = functools.partial(_in_blocks, run_layer)
    if specs[0].shards is not None:
        run_layer = functools.partial(_layer_on_devices, run_layer)
    for index, spec in enumerate(specs):

        def cache(
            heads: Heads, index: int = index, spec: CacheSpec = spec, foreseen: Array | None = foreseen
        ) -> tuple[Array, Any]:
            step = _step_of(heads, turns[spec.rope, spec.head_dim], positions, valid, state.lengths)
            step = step.replace(q_foreseen=foreseen, learned=of_layer(reads.fitted, index))
            out, layer, work = run_layer(spec, layers[index], step, everyone)
            ahead = None
            if foresees and index + 1 < len(specs) and not config.attention_kind(index + 1).recurrent:
                later = specs[index + 1]
                queries = block_query(weights, config, index + 1, heads.x_in)
                ahead = turns[later.rope, later.head_dim].queries(queries)
            return out, (layer, ahead, work)

        x, (layers[index], foreseen, work) = apply_block(weights, config, index, x, cache, routed)
        everyone.tiers[index] = layers[index].host
        works.append(work)
    return x, layers, works


def _step_of(heads: Heads, turn: Rotation, positions: Array, valid: Array, lengths: Array) -> StepKV:
    """Return the queries, keys and values of a step of one layer."""
    return StepKV(
        q_pre=turn.tempered(heads.q_pre),
        q_post=turn.queries(heads.q_pre),
        k_pre=heads.k_pre,
        k_post=turn.keys(heads.k_pre),
        v=heads.v,
        positions=positions,
        valid=valid,
        lengths=lengths,
        inverse=turn.inverse,
        cos=turn.cos[:, :, 0],
        sin=turn.sin[:, :, 0],
        sinks=heads.sinks,
        gates=heads.gates,
        taps=heads.taps,
        skip=heads.skip,
    )


def _rotations(specs: tuple[CacheSpec, ...], positions: Array) -> dict[tuple[RopeConfig, int], Rotation]:
    """Return the rotation at `positions`, int32 [B, T], for each different RopeConfig and head width of the layers."""
    capacity, turns = specs[0].capacity, {}
    for rope, width in dict.fromkeys((spec.rope, spec.head_dim) for spec in specs):
        turn = rotation(rope, jnp.asarray(inverse_frequencies(rope, width, capacity)), positions)
        # The barrier makes XLA compute the tables once. Its GPU compiler would compute them again in each layer.
        cos, sin = lax.optimization_barrier((turn.cos, turn.sin))
        turns[rope, width] = turn._replace(cos=cos, sin=sin)
    return turns
