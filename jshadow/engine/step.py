"""One decode step as traceable code, layer by layer. It checks nothing and compiles nothing.

B rows, T tokens of a step, D model width, h_q query heads, d head width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache import offload
from jshadow.cache.records import Fetched, HostTier, LayerState, StepKV
from jshadow.cache.spec import CacheSpec, everywhere, gathered
from jshadow.cache.state import KVState, Reads, Writes, of_layer
from jshadow.engine.layer_hooks import append_tokens, fetch_units
from jshadow.engine.mesh.layer import joined, on_devices
from jshadow.engine.step_work import LayerWork as LayerWork
from jshadow.engine.step_work import add_counted, count_step
from jshadow.engine.turn import in_blocks
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.models.transformer import Heads, apply_block, block_query, embed
from jshadow.models.transformer import logits as model_logits
from jshadow.ops.rope import Rotation, inverse_frequencies, rotation
from jshadow.planner.turn_pieces import turn_piece
from jshadow.policies.base import LayerCache
from jshadow.policies.capabilities import Foresees, PlansAhead, Speculates, Streams, capability

# For jax.jit around a step. Other backends accept these options and ignore them. Without the first, XLA's GPU compiler
# may run the fetch and the rebuilding of keys one after the other instead of at the same time. The second is a size in
# megabytes. Matrix products of one input become one product if they are smaller, such as those of an MLP's gate and up.
COMPILER_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_dot_merger_threshold_mb": 1024}


@dataclasses.dataclass(frozen=True)
class AllLayers:
    """The data of all layers. A layer needs it to fetch units for another layer.

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
        spec: the spec of this layer.
        state: the state of this layer.
        step: queries, keys and values of the step.
        everyone: specs, host tiers and inbox of all layers.

    Returns:
        The attention's output [B, T, h_q, d], the layer's new state, and the units that were fetched.
    """
    policy: LayerCache = spec.policy
    state, step = append_tokens(spec, state, step)
    index = spec.layer
    assert index is not None
    brought, state, work = fetch_units(spec, state, step)
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
    weights: dict,
    config: ModelConfig,
    tokens: Array,
    new: Array,
    reads: Reads,
    writes: Writes,
    **options: Any,
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
        weights, config: the model.
        tokens: token ids, int32 [B, T], right padded. T is at most `turn_tokens`.
        new: number of real tokens of each row, int32 [B], from 0 to T.
        state: the state before the step.
        every: whether to return the logits of all tokens, and not only those of each row's last real token.
        run_layer: runs one layer. It is `step_layer`, or a function that calls `step_layer` and checks its results.

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
    x, layers, works = run_layers(weights, config, asked, state, positions, valid, run_layer)
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
    if works[0].counted is None:
        counters = count_step(writes.counters, specs, layers, works, positions + 1, valid)
    else:
        counters = add_counted(writes.counters, works, None if shards is None else functools.partial(joined, shards))
    held, last = everywhere((held, last), shards)
    changed = tuple((layer.live, layer.host.tail) for layer in layers)
    shared = writes.shared
    if speculation is not None:
        shared = jax.tree.map(
            lambda fresh, old: jnp.where((new > 0).reshape(-1, *[1] * (old.ndim - 1)), fresh, old),
            speculation.after_step(shared, out, held),
            shared,
        )
    return out[:, :count] if every else out[:, 0], state.join(Writes(changed, shared, held, last, counters))


def run_layers(
    weights: dict,
    config: ModelConfig,
    tokens: Array,
    state: KVState,
    positions: Array,
    valid: Array,
    run_layer: Callable[..., tuple[Array, LayerState, LayerWork]],
) -> tuple[Array, list[LayerState], list[LayerWork]]:
    """Run the tokens of a step through all layers.

    Args:
        weights, config: the model.
        tokens: token ids, int32 [B, T], including a guessed token.
        state: the state before the step.
        positions: positions of the tokens, int32 [B, T].
        valid: which tokens are stored, bool [B, T].
        run_layer: as in `step_state`.

    Returns:
        The hidden states [B, T, D] after the last layer, the new state of each layer, and the units that each fetched.
    """
    reads, specs = state.reads(), state.specs
    foresees = capability(state.policy, Foresees) is not None
    turns = rotations(specs, positions)
    layers = list(state.layers)
    everyone = AllLayers(specs, [layer.host for layer in layers])
    x, works = embed(weights, config, tokens), []
    foreseen: Array | None = None
    if capability(state.policy, Speculates) is None and tokens.shape[1] > turn_piece(state, tokens.shape[1]):
        run_layer = functools.partial(in_blocks, run_layer)
    if specs[0].shards is not None:
        run_layer = functools.partial(on_devices, run_layer)
    for index, spec in enumerate(specs):

        def cache(
            heads: Heads, index: int = index, spec: CacheSpec = spec, foreseen: Array | None = foreseen
        ) -> tuple[Array, Any]:
            turn = turns[spec.rope]
            step = StepKV(
                q_pre=heads.q_pre,
                q_post=turn.queries(heads.q_pre),
                k_pre=heads.k_pre,
                k_post=turn.keys(heads.k_pre),
                v=heads.v,
                positions=positions,
                valid=valid,
                lengths=state.lengths,
                inverse=turn.inverse,
                cos=turn.cos[:, :, 0],
                sin=turn.sin[:, :, 0],
                q_foreseen=foreseen,
                learned=of_layer(reads.fitted, index),
            )
            out, layer, work = run_layer(spec, layers[index], step, everyone)
            ahead = None
            if foresees and index + 1 < len(specs):
                ahead = turns[specs[index + 1].rope].queries(block_query(weights, config, index + 1, heads.x_in))
            return out, (layer, ahead, work)

        x, (layers[index], foreseen, work) = apply_block(weights, config, index, x, cache)
        everyone.tiers[index] = layers[index].host
        works.append(work)
    return x, layers, works


def rotations(specs: tuple[CacheSpec, ...], positions: Array) -> dict[RopeConfig, Rotation]:
    """Return the rotation at `positions`, int32 [B, T], for each different RopeConfig of the layers."""
    capacity, width, turns = specs[0].capacity, specs[0].head_dim, {}
    for rope in dict.fromkeys(spec.rope for spec in specs):
        turn = rotation(rope, jnp.asarray(inverse_frequencies(rope, width, capacity)), positions)
        # The barrier makes XLA compute the tables once. Its GPU compiler would compute them again in each layer.
        cos, sin = lax.optimization_barrier((turn.cos, turn.sin))
        turns[rope] = turn._replace(cos=cos, sin=sin)
    return turns
