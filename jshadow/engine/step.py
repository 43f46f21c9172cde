"""One decode step as traceable code: the order of the whole system, layer by layer. Compiles and checks nothing."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache import offload
from jshadow.cache.records import Fetched, HostTier, LayerState, Selection, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters, KVState, Reads, Writes, of_layer
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.models.transformer import Heads, apply_block, block_query, embed
from jshadow.models.transformer import logits as model_logits
from jshadow.ops.rope import Rotation, inverse_frequencies, rotation
from jshadow.policies.base import LayerCache
from jshadow.policies.capabilities import Foresees, PlansAhead, Speculates, capability

# For jax.jit around a step: without it XLA's GPU compiler may let the host's work and the rebuilding of keys follow
# each other instead of overlapping. Other backends take it and do nothing.
COMPILER_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}


@dataclasses.dataclass
class LayerWork:
    """What one layer moved.

    Attributes:
        moved: bytes of each row.
        missed: what moved beside them, uint32 [B] in offload.FETCH_QUANTUM bytes: rows differ in what was kept.
        fetches: what arrived.
        followed: the selections whose hits are counted.
        later: target layer, selection and arrival of what is for the next step.
    """

    moved: int = 0
    missed: int | Array = 0
    fetches: list[Fetched] = dataclasses.field(default_factory=list)
    followed: list[Selection] = dataclasses.field(default_factory=list)
    later: list[tuple[int, Selection, Fetched]] = dataclasses.field(default_factory=list)

    def add(self, spec: CacheSpec, selection: Selection, layout: Any, fetched: Fetched) -> None:
        """Note one fetch."""
        self.fetches.append(fetched)
        self.moved += offload.fetched_bytes(spec, selection, layout)
        self.missed = self.missed + offload.missed_quanta(spec, selection, layout)
        if selection.hit is not None:
            self.followed.append(selection)


def step_layer(
    spec: CacheSpec, state: LayerState, step: StepKV, inbox: dict[int, Fetched],
    specs: tuple[CacheSpec, ...], tiers: list[HostTier],
) -> tuple[Array, LayerState, LayerWork]:  # fmt: skip
    """One layer of one step: append, select, fetch, receive, attend, plan. The order of the whole system.

    Args:
        spec: this layer.
        state: its state.
        step: queries, keys and values of the step.
        inbox: what earlier layers fetched for later ones.
        specs, tiers: all layers, for fetches on behalf of others.

    Returns:
        out [B, T, h_q, d], the layer's new state, and what was moved.
    """
    policy: LayerCache = spec.policy
    layout = policy.host_layout(spec)
    state, rows = policy.append(spec, state, step)
    state = state.replace(host=offload.write(state.host, rows))
    selection, state = policy.select(spec, state, step)
    index = spec.layer
    assert index is not None
    fetched, work = inbox.pop(index, None), LayerWork()
    if selection is not None:
        assert layout is not None
        fetched = offload.fetch(spec, state.host, selection, layout)
        state = policy.receive(spec, state, selection, fetched)
        work.add(spec, selection, layout, fetched)
    out, state = policy.attend(spec, state, step, fetched)
    for planned in policy.plan(spec, state, step) if isinstance(policy, PlansAhead) else ():
        target = index if planned.layer is None else planned.layer
        other = specs[target]
        other_layout = other.policy.host_layout(other)
        tier = state.host if target == index else tiers[target]
        brought = offload.fetch(other, tier, planned, other_layout)
        work.add(other, planned, other_layout, brought)
        if planned.when == "now":
            assert target > index, f"layer {index} plans for layer {target}, which has attended already"
            inbox[target] = brought
        else:
            work.later.append((target, planned, brought))
    return out, state, work


def turn_piece(source: Reads | KVState, count: int) -> int:
    """How many of a turn's `count` tokens pass the model at once: as many as every layer takes, one beside a guess."""
    if capability(source.policy, Speculates) is not None:
        return 1
    return min(count, *(spec.policy.reads.piece for spec in source.specs))


def step_writes(
    weights: dict, config: ModelConfig, tokens: Array, new: Array, reads: Reads, writes: Writes, *, every: bool = False,
    run_layer: Callable[..., tuple[Array, LayerState, LayerWork]] = step_layer,
) -> tuple[Array, Writes]:  # fmt: skip
    """One step on the two halves of a state.

    Args:
        weights, config: the model.
        tokens: int32 [B, T], right padded; T > 1 only up to `turn_piece`.
        new: how many of them are real, int32 [B], 0 .. T.
        reads, writes: the state.
        every: logits of all tokens, not only of each row's last real one.
        run_layer: what passes a layer; `step_layer`, or something around it that looks on.

    Returns:
        float32 logits [B, V], or [B, T, V], and the new changing half.
    """
    specs, policy, lengths = reads.specs, reads.policy, writes.lengths
    count = tokens.shape[1]
    speculation, foresees = capability(policy, Speculates), capability(policy, Foresees) is not None
    assert count == 1 or speculation is None, "a guess follows one token, not a piece of a turn"
    asked = jnp.concatenate([tokens, writes.shared.guess[:, None]], axis=1) if speculation else tokens
    positions = lengths[:, None] + jnp.arange(asked.shape[1], dtype=jnp.int32)
    # a guessed token is asked about, never remembered
    valid = jnp.arange(asked.shape[1]) < new[:, None]
    turns = rotations(specs, positions)
    state = KVState.of(reads, writes)
    layers = list(state.layers)
    tiers = [layer.host for layer in layers]
    x, works = embed(weights, config, asked), []
    inbox: dict[int, Fetched] = {}
    foreseen: Array | None = None
    for index, spec in enumerate(specs):

        def cache(
            heads: Heads, index: int = index, spec: CacheSpec = spec, foreseen: Array | None = foreseen
        ) -> tuple[Array, Any]:
            turn = turns[spec.rope]
            step = StepKV(
                heads.q_pre, turn.queries(heads.q_pre), heads.k_pre, turn.keys(heads.k_pre), heads.v, positions, valid,
                lengths, turn.inverse, foreseen,
                of_layer(reads.fitted, index),
            )  # fmt: skip
            out, layer, work = run_layer(spec, layers[index], step, inbox, specs, tiers)
            ahead = None
            if foresees and index + 1 < len(specs):
                ahead = turns[specs[index + 1].rope].queries(block_query(weights, config, index + 1, heads.x_in))
            return out, (layer, ahead, work)

        x, (layers[index], foreseen, work) = apply_block(weights, config, index, x, cache)
        tiers[index] = layers[index].host
        works.append(work)
    for target, selection, brought in (item for work in works for item in work.later):
        layers[target] = specs[target].policy.receive(specs[target], layers[target], selection, brought)
    if not (every or speculation):
        x = jnp.take_along_axis(x, jnp.maximum(new - 1, 0)[:, None, None], axis=1)
    out = model_logits(weights, config, x)
    impossible = (valid[:, :count] & ((tokens < 0) | (tokens >= config.vocab_size))).any(axis=1) | (state.room() < new)
    out = jnp.where(impossible[:, None, None], jnp.nan, out)
    held = lengths + new
    newest = jnp.take_along_axis(tokens, jnp.maximum(new - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(new > 0, newest, writes.last)
    counters = count_step(writes.counters, specs, layers, works, positions + 1, valid)
    changed = tuple((layer.live, layer.host.tail) for layer in layers)
    shared = writes.shared
    if speculation is not None:
        shared = jax.tree.map(
            lambda fresh, old: jnp.where((new > 0).reshape(-1, *[1] * (old.ndim - 1)), fresh, old),
            speculation.after_step(shared, out, held),
            shared,
        )
    return out[:, :count] if every else out[:, 0], Writes(changed, shared, held, last, counters)


def rotations(specs: tuple[CacheSpec, ...], positions: Array) -> dict[RopeConfig, Rotation]:
    """The rotation at positions [B, T] of each kind of layer."""
    capacity, width = specs[0].capacity, specs[0].head_dim
    return {
        rope: rotation(rope, jnp.asarray(inverse_frequencies(rope, width, capacity)), positions)
        for rope in dict.fromkeys(spec.rope for spec in specs)
    }


def attended(spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
    """Tokens that a query attends to when rows hold `lengths`, its own included, mean over heads: float32 [B]."""
    return functools.reduce(jnp.add, spec.policy.attended_parts(spec, state, lengths).values())


def count_step(
    counters: Counters, specs: tuple[CacheSpec, ...], layers: list[LayerState], works: list[LayerWork], held: Array,
    valid: Array,
) -> Counters:  # fmt: skip
    """Add one step to the counters; held, int32 [B, T]: tokens that each query sees behind it, itself included."""
    queries = valid.sum(axis=1, dtype=jnp.uint32)
    one = (queries > 0).astype(jnp.uint32)
    seen = [
        jax.vmap(functools.partial(attended, spec, layer), in_axes=1, out_axes=1)(held)
        for spec, layer in zip(specs, layers, strict=True)
    ]
    followed = [selection for work in works for selection in work.followed]

    def total(masks: list[Array]) -> Array:
        counts = [mask.sum(axis=(1, 2), dtype=jnp.uint32) for mask in masks]
        return functools.reduce(jnp.add, counts, jnp.zeros_like(one)) * one

    missed = jnp.asarray(sum(work.missed for work in works), jnp.uint32)
    return Counters(
        steps=counters.steps + queries,
        attended=counters.attended + jnp.where(valid, functools.reduce(jnp.add, seen), 0.0).sum(axis=1),
        selected=counters.selected + total([selection.valid for selection in followed]),
        hits=counters.hits
        + total([selection.valid & hit for selection in followed if (hit := selection.hit) is not None]),
        fetched=counters.fetched
        + one * (jnp.uint32(sum(work.moved for work in works) // offload.FETCH_QUANTUM) + missed),
    )
