"""prefill, extend and decode_step: the steps that make and change a KV state.

Two layers of functions. The public ones take Params, check their arguments, and keep compiled programs; the cores
(`step`, `extend_steps`, `generate_steps`) are plain traceable functions of weights, config and state, for a user's
own jit, scan or vmap. A core cannot raise on a value: a row that is given an impossible token or has no room left
gets NaN logits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow import offload
from jshadow.attention import causal_attention
from jshadow.config import ModelConfig
from jshadow.errors import CapacityError, ConfigError, PromptError, StateMismatch
from jshadow.models.transformer import Heads, apply_block, block_query, embed
from jshadow.models.transformer import logits as model_logits
from jshadow.policies import Policy, ShadowKV
from jshadow.rope import cos_sin, inverse_frequencies, rotate
from jshadow.sampling import Sampler, sample
from jshadow.state import (
    CacheSpec,
    Counters,
    Fetched,
    HostTier,
    KVState,
    LayerState,
    PromptKV,
    Reads,
    RopeTable,
    Selection,
    StepKV,
    Writes,
)  # fmt: skip

Logits = str | Callable[[Array], Any]


# Specs


@functools.lru_cache(maxsize=256)
def cache_specs(
    config: ModelConfig, policy: Policy, batch: int, capacity: int, shortest: int, dtype: str, fetch: str
) -> tuple[CacheSpec, ...]:
    """Static description of every layer's cache.

    Args:
        config: the model.
        policy: resolved for this capacity.
        batch: rows.
        capacity: tokens that a row may ever hold.
        shortest: tokens of the shortest prompt, which decides how many tokens the windows must hold.
        dtype: dtype of keys and values.
        fetch: resolved fetch mode.
    """
    specs = []
    for layer in range(config.num_layers):
        own = policy.for_layer(layer, config)
        specs.append(
            CacheSpec(
                layer=layer, num_layers=config.num_layers, batch=batch, capacity=capacity,
                window=own.window_slots(capacity, shortest), q_heads=config.q_heads, kv_heads=config.kv_heads,
                head_dim=config.head_dim, model_dim=config.model_dim, dtype=dtype,
                scale=float(1 / np.sqrt(config.head_dim)), rope=config.rope, sliding_window=None, fetch=fetch,
                policy=own,
            )
        )  # fmt: skip
    return tuple(specs)


def empty_state(specs: tuple[CacheSpec, ...], policy: Policy, fitted: Any = None) -> KVState:
    """A state that holds nothing, host tiers as ShapeDtypeStructs: to be traced by eval_shape, not to be stepped."""
    layers = []
    for spec in specs:
        layer = spec.policy.init(spec, fitted)
        layers.append(layer.replace(host=offload.tier_shapes(spec.policy.host_layout(spec), spec)))
    lengths, counters = jnp.zeros(specs[0].batch, jnp.int32), Counters.zeros(specs[0].batch)
    return KVState(tuple(layers), policy.init_shared(specs, fitted), lengths, counters, fitted, specs, policy)


def abstract_state(
    config: ModelConfig, policy: Policy, *, batch: int, capacity: int, prompt: int, dtype: str, fetch: str
) -> KVState:
    """The state of `batch` prompts of `prompt` tokens as ShapeDtypeStructs: nothing is allocated, no weights needed."""
    policy = policy.resolve(config, capacity)
    specs = cache_specs(config, policy, batch, capacity, prompt, dtype, offload.resolve_fetch(fetch))
    layers = []
    for spec in specs:
        layer = jax.eval_shape(lambda spec=spec: spec.policy.init(spec))
        layers.append(layer.replace(host=offload.tier_shapes(spec.policy.host_layout(spec), spec)))
    rest = jax.eval_shape(
        lambda: (policy.init_shared(specs), jnp.zeros(batch, jnp.int32), Counters.zeros(batch))
    )
    return KVState(tuple(layers), *rest, None, specs, policy)


def rope_table(config: ModelConfig, length: int) -> RopeTable:
    """Cosines and sines of positions 0 .. length - 1."""
    # The barrier keeps the compiler from evaluating the whole table while it compiles.
    positions = lax.optimization_barrier(jnp.arange(length, dtype=jnp.int32))
    return RopeTable(*cos_sin(positions, jnp.asarray(inverse_frequencies(config.rope, config.head_dim))))


# Prefill: layer by layer, each compiled once


@functools.partial(jax.jit, static_argnames=("config", "needs_all", "q_tail"))
def _prefill_layer(
    weights: dict, x: Array, lengths: Array, *, config: ModelConfig, needs_all: bool, q_tail: int
) -> tuple[Array, PromptKV]:
    """One block over the whole prompt: hidden states [B, S, D] on, and the prompt's keys and values."""
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    cos, sin = cos_sin(positions, jnp.asarray(inverse_frequencies(config.rope, config.head_dim)))
    cos, sin = cos[:, None], sin[:, None]

    def cache(heads: Heads) -> tuple[Array, PromptKV]:
        q, k = rotate(heads.q_pre, cos, sin), rotate(heads.k_pre, cos, sin)
        out, lse = prompt_attention(q, k, heads.v, needs_all)
        tail = None
        if q_tail:
            index = jnp.maximum(lengths[:, None] - q_tail + jnp.arange(q_tail), 0)
            tail = jnp.take_along_axis(q, index[:, :, None, None], axis=1, mode="clip")
        prompt = PromptKV(
            heads.k_pre, k, heads.v, lengths, jnp.broadcast_to(positions, x.shape[:2]), tail,
            q if needs_all else None, lse if needs_all else None,
        )  # fmt: skip
        return out, prompt

    return apply_block({"layer_0": weights}, config, 0, x, cache)


def prompt_attention(q: Array, k: Array, v: Array, with_lse: bool) -> tuple[Array, Array | None]:
    """Causal attention of a prompt: cuDNN's on a GPU where it applies, blockwise elsewhere."""
    scale = float(1 / np.sqrt(q.shape[-1]))
    if jax.default_backend() == "gpu" and not with_lse and q.dtype in (jnp.bfloat16, jnp.float16):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale, implementation="cudnn"), None
    return causal_attention(q, k, v, scale)


def needed(prompt: PromptKV, spec: CacheSpec) -> PromptKV:
    """What one policy asked for of a prompt that several share, so that none sees another's needs."""
    tail = None if prompt.q_tail is None or not spec.policy.q_tail else prompt.q_tail[:, -spec.policy.q_tail :]
    everything = "q_all" in spec.policy.needs
    return prompt.replace(
        q_tail=tail, q_post=prompt.q_post if everything else None, lse=prompt.lse if everything else None
    )


@functools.partial(jax.jit, static_argnames=("spec",))
def _compress(prompt: PromptKV, fitted: Any, *, spec: CacheSpec) -> tuple[LayerState, Any]:
    state, write = spec.policy.compress(spec, spec.policy.init(spec, fitted), prompt, fitted)
    return state.replace(host=HostTier()), write


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(weights: dict, tokens: Array, *, config: ModelConfig) -> Array:
    return embed(weights, config, tokens)


@functools.partial(jax.jit, static_argnames=("config", "want"))
def _prompt_logits(weights: dict, x: Array, lengths: Array, *, config: ModelConfig, want: Logits) -> Any:
    if want == "last":
        x = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return model_logits(weights, config, x)
    if want == "all":
        return model_logits(weights, config, x)
    assert callable(want)
    pieces = [x[:, start : start + LOGITS_PIECE] for start in range(0, x.shape[1], LOGITS_PIECE)]
    results = [want(model_logits(weights, config, piece)) for piece in pieces]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


LOGITS_PIECE = 256  # tokens of float32 logits that exist at once for a callable


def prefill_many(
    params: Any, tokens: Any, lengths: Any, policies: Sequence[Policy | None], *, capacity: int, fetch: str = "auto",
    fitted: Any = None, logits: Logits = "last", shortest: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[Any, KVState]]:  # fmt: skip
    """Prefill once, exactly, and let every policy compress each layer.

    Args:
        params: Params.
        tokens, lengths: as in `prefill`.
        policies: one state is made for each.
        capacity, fetch, fitted, logits: as in `prefill`.
        shortest: size the windows as if the shortest prompt had this many tokens (a bucket, so that near lengths
            share one compiled step); None: its real length.
        progress: called with (layers done, layers) as they finish.

    Returns:
        (logits, state) for each policy; the logits are the same array.
    """
    config: ModelConfig = params.config
    tokens, lengths = check_tokens(config, tokens, lengths, least=1)
    check_logits(logits)
    check_capacity(config, capacity, int(lengths.max()))
    dtype, mode = str(params.dtype), offload.resolve_fetch(fetch)
    resolved = [(policy or ShadowKV()).resolve(config, capacity) for policy in policies]
    floor = int(lengths.min()) if shortest is None else min(shortest, int(lengths.min()))
    plans = [cache_specs(config, policy, len(lengths), capacity, floor, dtype, mode) for policy in resolved]
    offload.check_host_memory(sum(offload.host_bytes(specs) for specs in plans))
    row_lengths = jnp.asarray(lengths)
    x = _embed(params.weights, jnp.asarray(tokens), config=config)
    layers: list[list[LayerState]] = [[] for _ in resolved]
    for index in range(config.num_layers):
        specs = [plan[index] for plan in plans]
        x, prompt = _prefill_layer(
            params.weights[f"layer_{index}"], x, row_lengths, config=config,
            needs_all=any("q_all" in spec.policy.needs for spec in specs),
            q_tail=max(spec.policy.q_tail for spec in specs),
        )  # fmt: skip
        for done, spec in zip(layers, specs, strict=True):
            state, write = _compress(needed(prompt, spec), fitted, spec=dataclasses.replace(spec, layer=None))
            done.append(state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write)))
        if progress is not None:
            jax.block_until_ready(x)
            progress(index + 1, config.num_layers)
    out = _prompt_logits(params.weights, x, row_lengths, config=config, want=logits)
    batch = len(lengths)
    return [
        (out, KVState(tuple(done), policy.init_shared(plan, fitted), jnp.array(lengths), Counters.zeros(batch),
                      fitted, plan, policy))
        for done, policy, plan in zip(layers, resolved, plans, strict=True)
    ]  # fmt: skip


def prefill(
    params: Any, tokens: Any, lengths: Any, policy: Policy | None = None, *, capacity: int, fetch: str = "auto",
    fitted: Any = None, logits: Logits = "last",
) -> tuple[Any, KVState]:  # fmt: skip
    """Run a ragged batch of prompts through the model and make its KV state.

    Args:
        params: Params.
        tokens: int32 [B, S], right padded.
        lengths: int32 [B], real tokens of each row, at least 1.
        policy: None: ShadowKV().
        capacity: tokens that a row may ever hold.
        fetch: "auto", "resident" or "device_put".
        fitted: arrays that the policy learned.
        logits: "last": [B, V] at each row's last real token; "all": [B, S, V]; or a callable that is given the
            float32 logits [B, P, V] of one piece of tokens after another and whose results [B, P, ...] are joined.

    Returns:
        float32 logits, and the state.

    Raises:
        PromptError: empty batch or row, misshaped tokens or lengths, a token id out of range.
        CapacityError: a prompt is longer than the capacity, or the capacity than the model's context.
        ConfigError: a policy setting, fetch mode or logits choice is out of range.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    return prefill_many(params, tokens, lengths, [policy], capacity=capacity, fetch=fetch, fitted=fitted, logits=logits)[0]


# The decode step


def step_layer(
    spec: CacheSpec, state: LayerState, step: StepKV, carry: Any, inbox: dict[int, Fetched], specs: tuple[CacheSpec, ...],
    tiers: list[HostTier],
) -> tuple[Array, LayerState, Any, "LayerWork"]:  # fmt: skip
    """One layer of one step: append, select, fetch, receive, attend, plan. The order of the whole system.

    Args:
        spec: this layer.
        state: its state.
        step: queries, keys and values of the step.
        carry: what the policy passes from layer to layer.
        inbox: what earlier layers fetched for later ones.
        specs, tiers: all layers, for fetches on behalf of others.

    Returns:
        out [B, T, h_q, d], the layer's new state, the carry, and what was moved.
    """
    policy: Policy = spec.policy
    layout = policy.host_layout(spec)
    state, rows = policy.append(spec, state, step)
    state = state.replace(host=offload.write(state.host, rows))
    selection, state, carry = policy.select(spec, state, step, carry)
    fetched, work = inbox.pop(spec.layer or 0, None), LayerWork()
    if selection is not None:
        assert layout is not None
        fetched = offload.fetch(spec, state.host, selection, layout)
        state = policy.receive(spec, state, selection, fetched)
        work.add(spec, selection, layout)
    out, state, carry = policy.attend(spec, state, step, fetched, carry)
    for planned in policy.plan(spec, state, step, carry):
        target = spec.layer if planned.layer is None else planned.layer
        assert target is not None
        other = specs[target]
        other_layout = other.policy.host_layout(other)
        tier = state.host if target == spec.layer else tiers[target]
        brought = offload.fetch(other, tier, planned, other_layout)
        work.add(other, planned, other_layout)
        if planned.when == "now":
            inbox[target] = brought
        else:
            work.later.append((target, planned, brought))
    return out, state, carry, work


@dataclasses.dataclass
class LayerWork:
    """What one layer moved: bytes a row, the selections whose hits are followed, arrivals for the next step."""

    moved: int = 0
    followed: list[Selection] = dataclasses.field(default_factory=list)
    later: list[tuple[int, Selection, Fetched]] = dataclasses.field(default_factory=list)

    def add(self, spec: CacheSpec, selection: Selection, layout: Any) -> None:
        """Count one fetch."""
        self.moved += offload.fetched_bytes(spec, selection, layout)
        if selection.hit is not None:
            self.followed.append(selection)


def step_writes(
    weights: dict, config: ModelConfig, policy: Policy, token: Array, reads: Reads, writes: Writes, active: Array
) -> tuple[Array, Writes]:
    """One decode step on the two halves of a state: float32 logits [B, V] and the new changing half."""
    specs, lengths = reads.specs, writes.lengths
    rows, capacity = policy.step_rows, specs[0].capacity
    guess = [] if rows == 1 else [writes.shared.guess]  # contract: two-row policies keep their guess there
    tokens = jnp.stack([token, *guess], axis=1)
    positions = lengths[:, None] + jnp.arange(rows, dtype=jnp.int32)
    # only the first row is real: a guessed token is asked about, never remembered
    valid = active[:, None] & (jnp.arange(rows) == 0)
    table = rope_table(config, capacity + rows)
    inverse = jnp.asarray(inverse_frequencies(config.rope, config.head_dim))
    cos, sin = (part[:, :, None] for part in cos_sin(positions, inverse))
    layers = [
        LayerState(frozen, live, HostTier(prompt, tail))
        for (frozen, prompt), (live, tail) in zip(reads.layers, writes.layers, strict=True)
    ]
    tiers = [layer.host for layer in layers]
    x, carry, works = embed(weights, config, tokens), None, []
    inbox: dict[int, Fetched] = {}
    for index, spec in enumerate(specs):

        def cache(heads: Heads, index: int = index, spec: CacheSpec = spec) -> tuple[Array, Any]:
            def q_next(x_in: Array) -> Array:
                return rotate(block_query(weights, config, index + 1, x_in), cos, sin)

            step = StepKV(
                heads.q_pre, rotate(heads.q_pre, cos, sin), heads.k_pre, rotate(heads.k_pre, cos, sin), heads.v,
                positions, valid, lengths, heads.x_in, table, q_next if index + 1 < len(specs) else None,
            )  # fmt: skip
            out, layer, after, work = step_layer(spec, layers[index], step, carry, inbox, specs, tiers)
            return out, (layer, after, work)

        x, (layers[index], carry, work) = apply_block(weights, config, index, x, cache)
        tiers[index] = layers[index].host
        works.append(work)
    for target, selection, brought in (item for work in works for item in work.later):
        layers[target] = specs[target].policy.receive(specs[target], layers[target], selection, brought)
    out = model_logits(weights, config, x)
    impossible = (token < 0) | (token >= config.vocab_size) | (lengths >= capacity)
    out = jnp.where((active & impossible)[:, None, None], jnp.nan, out)
    held = lengths + active.astype(jnp.int32)
    counters = count_step(writes.counters, specs, layers, works, held, active)
    new = tuple((layer.live, layer.host.tail) for layer in layers)
    shared = jax.tree.map(
        lambda fresh, old: jnp.where(active.reshape(-1, *[1] * (old.ndim - 1)), fresh, old),
        policy.after_step(writes.shared, out, held), writes.shared,
    )  # fmt: skip
    return out[:, 0], Writes(new, shared, held, counters)


def count_step(
    counters: Counters, specs: tuple[CacheSpec, ...], layers: list[LayerState], works: list[LayerWork], held: Array,
    active: Array,
) -> Counters:  # fmt: skip
    """Add one step to the counters of the active rows."""
    one = active.astype(jnp.uint32)
    seen = [spec.policy.attended(spec, layer, held) for spec, layer in zip(specs, layers, strict=True)]
    followed = [selection for work in works for selection in work.followed]

    def total(masks: list[Array]) -> Array:
        counts = [mask.sum(axis=(1, 2), dtype=jnp.uint32) for mask in masks]
        return functools.reduce(jnp.add, counts, jnp.zeros_like(one)) * one

    return Counters(
        steps=counters.steps + one,
        attended=counters.attended + jnp.where(active, functools.reduce(jnp.add, seen), 0.0),
        selected=counters.selected + total([selection.valid for selection in followed]),
        hits=counters.hits + total([selection.valid & selection.hit for selection in followed if selection.hit is not None]),
        fetched=counters.fetched + one * jnp.uint32(sum(work.moved for work in works) // offload.FETCH_QUANTUM),
    )


def step(
    weights: dict, config: ModelConfig, token: Array, state: KVState, active: Array | None = None
) -> tuple[Array, KVState]:
    """Traceable core of `decode_step`: no checks, no compilation of its own."""
    reads, writes = state.split()
    active = jnp.ones_like(state.lengths, bool) if active is None else active
    out, writes = step_writes(weights, config, state.policy, token, reads, writes, active)
    return out, state.join(writes)


@functools.partial(jax.jit, static_argnames=("config", "policy"), donate_argnames=("writes",))
def _step(
    weights: dict, token: Array, reads: Reads, writes: Writes, active: Array, *, config: ModelConfig, policy: Policy
) -> tuple[Array, Writes]:
    return step_writes(weights, config, policy, token, reads, writes, active)


def decode_step(
    params: Any, token: Any, state: KVState, policy: Policy | None = None, *, active: Any = None
) -> tuple[Array, KVState]:
    """Feed one token to each row. Consumes the state (fork it first to keep it).

    Args:
        params: the Params that made the state.
        token: int32 [B].
        state: from prefill, extend or decode_step.
        policy: None, or the policy that made the state.
        active: bool [B]; rows that are False neither change nor get meaningful logits. None: all.

    Returns:
        float32 logits [B, V], and the new state.

    Raises:
        PromptError: a token id out of range, or misshaped tokens.
        CapacityError: a row has no room for another token.
        StateMismatch: the state was consumed, or belongs to another model or policy.
    """
    check_state(params, state, policy)
    batch = state.batch
    token = check_ids(params.config, token, (batch,), "token")
    active = np.ones(batch, bool) if active is None else np.asarray(active, bool)
    if active.shape != (batch,):
        raise PromptError(f"active must have shape ({batch},), got {active.shape}")
    check_room(state, active.astype(np.int64))
    reads, writes = state.split()
    out, writes = _step(
        params.weights, jnp.asarray(token), reads, writes, jnp.asarray(active), config=params.config,
        policy=state.policy,
    )  # fmt: skip
    return out, state.join(writes)


# Many tokens


def extend_steps(
    weights: dict, config: ModelConfig, tokens: Array, lengths: Array, state: KVState, logits: Logits = "last"
) -> tuple[Any, KVState]:
    """Traceable core of `extend`."""
    reads, writes = state.split()
    out, writes = _scan_tokens(weights, config, state.policy, tokens, lengths, reads, writes, logits)
    return out, state.join(writes)


def _scan_tokens(
    weights: dict, config: ModelConfig, policy: Policy, tokens: Array, lengths: Array, reads: Reads, writes: Writes,
    want: Logits,
) -> tuple[Any, Writes]:  # fmt: skip
    def body(carry: tuple[Writes, Array], xs: tuple[Array, Array]) -> tuple[tuple[Writes, Array], Any]:
        writes, last = carry
        token, index = xs
        active = index < lengths
        out, writes = step_writes(weights, config, policy, token, reads, writes, active)
        if want == "last":
            return (writes, jnp.where(active[:, None], out, last)), None
        return (writes, last), out if want == "all" else want(out[:, None])  # type: ignore[operator]

    count = tokens.shape[1]
    shape = (tokens.shape[0], config.vocab_size) if want == "last" else (0,)
    start = (writes, jnp.zeros(shape, jnp.float32))
    (writes, last), pieces = lax.scan(body, start, (tokens.T, jnp.arange(count)))
    if want == "last":
        return last, writes
    if want == "all":
        return pieces.swapaxes(0, 1), writes
    return jax.tree.map(lambda part: jnp.concatenate(part, axis=1), pieces), writes


@functools.partial(jax.jit, static_argnames=("config", "policy", "want"), donate_argnames=("writes",))
def _extend(
    weights: dict, tokens: Array, lengths: Array, reads: Reads, writes: Writes, *, config: ModelConfig, policy: Policy,
    want: Logits,
) -> tuple[Any, Writes]:  # fmt: skip
    return _scan_tokens(weights, config, policy, tokens, lengths, reads, writes, want)


def extend(
    params: Any, tokens: Any, lengths: Any, state: KVState, policy: Policy | None = None, *, logits: Logits = "last"
) -> tuple[Any, KVState]:
    """Feed several tokens to each row, each with its own selection, as so many decode steps. Consumes the state.

    Args:
        params: the Params that made the state.
        tokens: int32 [B, T], right padded.
        lengths: int32 [B], new tokens of each row; 0 leaves a row unchanged.
        state: from prefill, extend or decode_step.
        policy: None, or the policy that made the state.
        logits: as in `prefill`; "last" is 0 for a row without new tokens.

    Returns:
        float32 logits, and the new state.

    Raises:
        PromptError, CapacityError, StateMismatch: as in `decode_step`.
    """
    check_state(params, state, policy)
    check_logits(logits)
    tokens, lengths = check_tokens(params.config, tokens, lengths, least=0, batch=state.batch)
    check_room(state, lengths.astype(np.int64))
    reads, writes = state.split()
    out, writes = _extend(
        params.weights, jnp.asarray(tokens), jnp.asarray(lengths), reads, writes, config=params.config,
        policy=state.policy, want=logits,
    )  # fmt: skip
    return out, state.join(writes)


def generate_steps(
    weights: dict, config: ModelConfig, token: Array, state: KVState, n: int, sampler: Sampler, key: Array,
    stop: tuple[int, ...] = (), active: Array | None = None,
) -> tuple[Array, KVState]:  # fmt: skip
    """Traceable core of `decode_steps`."""
    reads, writes = state.split()
    active = jnp.ones_like(state.lengths, bool) if active is None else active

    def body(carry: tuple[Writes, Array, Array], index: Array) -> tuple[tuple[Writes, Array, Array], Array]:
        writes, token, active = carry
        out, writes = step_writes(weights, config, state.policy, token, reads, writes, active)
        new = sample(sampler, out, jax.random.fold_in(key, index))
        emitted = jnp.where(active, new, -1)
        ended = functools.reduce(jnp.logical_or, [new == s for s in stop], jnp.zeros_like(active))
        return (writes, jnp.where(active, new, token), active & ~ended), emitted

    (writes, _, _), tokens = lax.scan(body, (writes, token, active), jnp.arange(n))
    return tokens.T, state.join(writes)


@functools.partial(jax.jit, static_argnames=("config", "n", "sampler", "stop", "rest"), donate_argnames=("writes",))
def _generate_steps(
    weights: dict, token: Array, reads: Reads, writes: Writes, key: Array, *, config: ModelConfig, n: int,
    sampler: Sampler, stop: tuple[int, ...], rest: "_Static",
) -> tuple[Array, Writes]:  # fmt: skip
    state = join_halves(reads, writes, rest.policy)
    tokens, state = generate_steps(weights, config, token, state, n, sampler, key, stop)
    return tokens, state.split()[1]


@dataclasses.dataclass(frozen=True)
class _Static:
    policy: Policy


def join_halves(reads: Reads, writes: Writes, policy: Policy) -> KVState:
    """A state from its two halves."""
    layers = tuple(
        LayerState(frozen, live, HostTier(prompt, tail))
        for (frozen, prompt), (live, tail) in zip(reads.layers, writes.layers, strict=True)
    )
    return KVState(layers, writes.shared, writes.lengths, writes.counters, reads.fitted, reads.specs, policy)


def decode_steps(
    params: Any, token: Any, state: KVState, n: int, *, sampler: Sampler | None = None, seed: int = 0,
    stop: Sequence[int] | None = None,
) -> tuple[Array, KVState]:  # fmt: skip
    """Generate n tokens in one compiled scan: feed `token`, sample the next, feed it. Consumes the state.

    Args:
        params: the Params that made the state.
        token: int32 [B], the first token to feed.
        state: from prefill, extend or decode_step.
        n: steps.
        sampler: None: greedy.
        seed: of the sampler.
        stop: token ids after which a row feeds and emits nothing more.

    Returns:
        New tokens int32 [B, n], -1 after a row's stop token; and the new state.

    Raises:
        PromptError, CapacityError, StateMismatch: as in `decode_step`.
        ConfigError: n below 1.
    """
    check_state(params, state, None)
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"n must be an integer of at least 1, got {n!r}")
    token = check_ids(params.config, token, (state.batch,), "token")
    check_room(state, np.full(state.batch, n, np.int64))
    reads, writes = state.split()
    tokens, writes = _generate_steps(
        params.weights, jnp.asarray(token), reads, writes, jax.random.key(seed), config=params.config, n=n,
        sampler=sampler or Sampler(), stop=tuple(stop or ()), rest=_Static(state.policy),
    )  # fmt: skip
    return tokens, state.join(writes)


# Checks, before anything is traced: JAX clamps an impossible index silently


def check_ids(config: ModelConfig, tokens: Any, shape: tuple[int | None, ...], name: str) -> np.ndarray:
    """Token ids as int32 of that shape. Raises PromptError naming the first id out of range."""
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu" or array.ndim != len(shape):
        raise PromptError(f"{name} must be integers with {len(shape)} axes, got {array.dtype} {array.shape}")
    if any(want is not None and want != got for want, got in zip(shape, array.shape, strict=True)):
        raise PromptError(f"{name} must have shape {shape}, got {array.shape}")
    bad = array[(array < 0) | (array >= config.vocab_size)]
    if bad.size:
        raise PromptError(f"{name} must lie in [0, vocab_size={config.vocab_size}), got {int(bad.flat[0])}")
    return array.astype(np.int32)


def check_tokens(
    config: ModelConfig, tokens: Any, lengths: Any, *, least: int, batch: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded tokens [B, T] and lengths [B], padding set to 0. Raises PromptError."""
    array, counts = np.asarray(tokens), np.asarray(lengths)
    if array.ndim != 2 or array.size == 0:
        raise PromptError(f"tokens must be a non-empty array [B, T], got shape {array.shape}")
    if counts.shape != array.shape[:1] or counts.dtype.kind not in "iu":
        raise PromptError(f"lengths must be integers of shape ({array.shape[0]},), got {counts.dtype} {counts.shape}")
    if batch is not None and array.shape[0] != batch:
        raise PromptError(f"tokens must have {batch} rows, as the state, got {array.shape[0]}")
    if counts.min() < least or counts.max() > array.shape[1]:
        raise PromptError(f"lengths must lie in [{least}, {array.shape[1]}], got {counts.tolist()}")
    real = np.arange(array.shape[1]) < counts[:, None]
    return check_ids(config, np.where(real, array, 0), (None, None), "tokens"), counts.astype(np.int32)


def check_capacity(config: ModelConfig, capacity: Any, longest: int) -> None:
    """Raise CapacityError unless longest <= capacity <= the model's context."""
    if not isinstance(capacity, int | np.integer) or capacity < 1:
        raise CapacityError(f"capacity must be an integer of at least 1, got {capacity!r}")
    if capacity > config.context:
        raise CapacityError(f"capacity must be at most the model's context={config.context} tokens, got {capacity}")
    if longest > capacity:
        raise CapacityError(f"prompt must have at most capacity={capacity} tokens, got {longest}")


def check_room(state: KVState, new: np.ndarray) -> None:
    """Raise CapacityError where a row has no room for its new tokens, before any is lost."""
    if not new.any():
        return
    room = state.room()
    row = int(np.argmin(room - new))
    if new[row] > room[row]:
        held = int(np.asarray(state.lengths)[row])
        raise CapacityError(
            f"row {row} holds {held} tokens of capacity={state.capacity} (window={state.specs[0].window}) and has room "
            f"for {int(room[row])} more, got {int(new[row])}"
        )


def check_logits(want: Any) -> None:
    """Raise ConfigError unless want is "last", "all" or a callable."""
    if want not in ("last", "all") and not callable(want):
        raise ConfigError(f"logits must be 'last', 'all' or a callable, got {want!r}")


def check_state(params: Any, state: KVState, policy: Policy | None) -> None:
    """Raise StateMismatch unless the state is alive and was made by this model and policy."""
    state.check_alive()
    spec, config = state.specs[0], params.config
    want = (config.num_layers, config.q_heads, config.kv_heads, config.head_dim, config.model_dim, config.rope)
    got = (spec.num_layers, spec.q_heads, spec.kv_heads, spec.head_dim, spec.model_dim, spec.rope)
    if want != got or str(params.dtype) != spec.dtype:
        raise StateMismatch(f"state must come from a model like params {want} {params.dtype}, got {got} {spec.dtype}")
    if policy is not None and policy.resolve(config, state.capacity) != state.policy:
        raise StateMismatch(f"policy must be the state's own {state.policy}, got {policy}")
