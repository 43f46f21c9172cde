"""Prefill: a ragged batch of prompts through the model, layer by layer, within a bound of device memory.

A layer is compiled once for all of them. In it the prompt passes piece by piece; then the policy compresses the
layer's keys and values, its host rows leave while the next layer computes, and keys and values are freed.
"""

import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jshadow.cache import host_memory, offload
from jshadow.cache.records import HostTier, LayerState, PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters, KVState, Reads, Writes, of_layer
from jshadow.engine.checks import check_capacity, check_logits, check_piece, check_policy, check_tokens
from jshadow.engine.step import step_writes
from jshadow.errors import ConfigError
from jshadow.models.config import AttentionKind, ModelConfig
from jshadow.models.transformer import Heads, apply_block, embed
from jshadow.models.transformer import logits as model_logits
from jshadow.ops.attention import causal_attention
from jshadow.ops.layout import fit_tokens
from jshadow.ops.rope import inverse_frequencies, rotation
from jshadow.planner.bytes import cache_specs, pieces_of
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.base import innermost
from jshadow.policies.capabilities import OwnPrefill, Speculates, attention_of, capability, first_shared
from jshadow.policies.checks import check_fitted, reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece

Logits = str | Callable[[Array], Any]
LIMITING = threading.Lock()  # held by the prefill that limits BLAS
LOGITS_PIECE = 256  # tokens of float32 logits that exist at once for a callable


@functools.partial(
    jax.jit, static_argnames=("config", "kind", "needs_all", "q_tail", "size", "attention"), donate_argnames=("x",)
)  # fmt: skip
def _prefill_layer(
    weights: dict, x: Array, lengths: Array, inverse: np.ndarray, learned: Any = None, *, config: ModelConfig,
    kind: AttentionKind, needs_all: bool, q_tail: int, size: int, attention: PrefillAttention | None = None,
) -> tuple[Array, PromptKV]:  # fmt: skip
    """One block over the prompt, piece after piece: hidden states [B, S, D] on, and the prompt's keys and values.

    What is larger than a piece is written in place: the hidden states, and the layer's keys and values, which the
    pieces that follow attend to.
    """
    batch, tokens = x.shape[:2]
    count = tokens // size
    assert count * size == tokens, f"{tokens} tokens are no pieces of {size}"

    def zeros(*shape: int, dtype: Any = x.dtype) -> Array:
        return jnp.zeros((batch, *shape), dtype)

    rows, queries = (tokens, config.kv_heads, config.head_dim), (config.q_heads, config.head_dim)
    prompt = PromptKV(
        k_pre=zeros(*rows), k_post=zeros(*rows), v=zeros(*rows), lengths=lengths,
        positions=jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens)),
        q_tail=zeros(q_tail, *queries) if q_tail else None,
        q_post=zeros(tokens, *queries) if needs_all else None,
        lse=zeros(config.q_heads, tokens, dtype=jnp.float32) if needs_all else None,
    )  # fmt: skip

    def run_piece(index: Array, x: Array, prompt: PromptKV, attend: Callable[..., Any]) -> tuple[Array, Any]:
        first = index * size
        positions = first + jnp.arange(size, dtype=jnp.int32)
        turn = rotation(kind.rope, jnp.asarray(inverse), positions[None])
        real = (positions < lengths[:, None])[..., None, None]

        def cache(heads: Heads) -> tuple[Array, Any]:
            q, k = turn.queries(heads.q_pre), turn.keys(heads.k_pre)
            # Padding leaves zeros, so that a state does not depend on how far a prompt was padded.
            k_pre, k, v = (jnp.where(real, rows, 0) for rows in (heads.k_pre, k, heads.v))
            held = prompt.replace(
                k_pre=put(prompt.k_pre, k_pre, first), k_post=put(prompt.k_post, k, first),
                v=put(prompt.v, v, first), q_tail=tail_queries(prompt.q_tail, q, lengths, first),
            )  # fmt: skip
            return attend(PrefillPiece(heads.q_pre, q, first, turn.inverse), held)

        return apply_block({"layer_0": weights}, config, 0, lax.dynamic_slice_in_dim(x, first, size, axis=1), cache)

    def exact(piece: PrefillPiece, held: PromptKV) -> tuple[Array, Array | None]:
        return piece_attention(
            piece.q_post, held.k_post, held.v, piece.first, needs_all, scale=config.attention_scale, window=kind.window
        )  # fmt: skip

    def one(index: Array, carry: tuple[Array, PromptKV, Any]) -> tuple[Array, PromptKV, Any]:
        x, prompt, aux = carry

        def attend(piece: PrefillPiece, held: PromptKV) -> tuple[Array, Any]:
            if attention is None or needs_all:
                out, lse = exact(piece, held)
                if held.q_post is not None and held.lse is not None and lse is not None:
                    held = held.replace(
                        q_post=put(held.q_post, piece.q_post, piece.first),
                        lse=lax.dynamic_update_slice_in_dim(held.lse, lse, piece.first, 2),
                    )  # fmt: skip
                if attention is None:
                    return out, (held, aux)
            out, after = attention.attend(config, kind, piece, held, aux)
            return out, (held, after)

        out, (prompt, aux) = run_piece(index, x, prompt, attend)
        return put(x, out, index * size), prompt, aux

    aux = None
    if attention is not None:
        tail = None
        if attention.ahead:
            tail = zeros(attention.tail, *queries) if attention.tail else None

            def look(index: Array, known: PromptKV) -> PromptKV:
                # what the block makes of this is dropped: no attention and no MLP is computed
                return run_piece(index, x, known, lambda piece, held: (piece.q_post, held))[1]

            known = lax.fori_loop(0, count, look, prompt.replace(q_tail=tail))
            tail = known.q_tail
            prompt = known.replace(q_tail=prompt.q_tail)
        aux = attention.begin(config, kind, prompt, tail, learned)
    x, prompt, aux = lax.fori_loop(0, count, one, (x, prompt, aux))
    return x, prompt.replace(extra=aux)


def put(whole: Array, piece: Array, first: Array) -> Array:
    """whole [B, S, ...] with piece [B, P, ...] at tokens first .. first + P - 1."""
    return lax.dynamic_update_slice_in_dim(whole, piece.astype(whole.dtype), first, axis=1)


def tail_queries(tail: Array | None, q: Array, lengths: Array, first: Array) -> Array | None:
    """tail [B, w, h_q, d] with those of each row's last w real queries that lie in this piece's q [B, P, h_q, d]."""
    if tail is None:
        return None
    w = tail.shape[1]
    index = jnp.maximum(lengths[:, None] - w + jnp.arange(w), 0) - first
    inside = (index >= 0) & (index < q.shape[1])
    own = jnp.take_along_axis(q, index[:, :, None, None], axis=1, mode="clip")
    return jnp.where(inside[:, :, None, None], own, tail)


def piece_attention(
    q: Array, k: Array, v: Array, first: Array, with_lse: bool, *, scale: float, window: int | None = None
) -> tuple[Array, Array | None]:
    """Causal attention of a piece; of a prompt in one piece by cuDNN on a GPU, where it applies.

    cuDNN's causal mask begins at the first key, and JAX gives its log-sum-exps in the output's dtype, too coarse to
    merge what lies before a piece with the piece itself.
    """
    fused = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
    if fused and q.shape[1] == k.shape[1] and not with_lse:
        reach = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, scale=scale, local_window_size=reach, implementation="cudnn"
        ), None
    return causal_attention(q, k, v, scale, first, window)


def needed(prompt: PromptKV, spec: CacheSpec) -> PromptKV:
    """What one policy asked for of a prompt that several share, so that none sees another's needs."""
    reads = spec.policy.reads
    tail = prompt.q_tail[:, -reads.last_queries :] if prompt.q_tail is not None and reads.last_queries else None
    everything = reads.all_queries
    return prompt.replace(
        q_tail=tail, q_post=prompt.q_post if everything else None, lse=prompt.lse if everything else None,
        extra=prompt.extra if isinstance(spec.policy, OwnPrefill) else None,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("spec",))
def compress_layer(prompt: PromptKV, fitted: Any, *, spec: CacheSpec) -> tuple[LayerState, Any]:
    """A policy's state of a prompt without its host tier, and the write that fills that; `spec.layer` is None."""
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


@contextlib.contextmanager
def one_blas_thread() -> Iterator[list[Any]]:
    """On a CPU, keep LAPACK to one thread until what is appended to the list is computed.

    The compression's eigenvectors come from OpenBLAS, whose threads spin between calls and take the cores from XLA's:
    prefill took a fifth longer. The limit is the whole process's, so of prefills at once the first alone sets and lifts
    it; and threadpoolctl lets one thread set it, so a prefill in another thread may go without.
    """
    results: list[Any] = []
    if jax.default_backend() != "cpu" or not LIMITING.acquire(blocking=False):
        yield results
        return
    try:
        importlib.import_module("scipy.linalg.cython_lapack")  # JAX's own; only what is loaded is limited
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            yield results
            jax.block_until_ready(results)
    finally:
        LIMITING.release()


def prefill_many(
    params: Any, tokens: Any, lengths: Any, policies: Sequence[Policy | None], *, capacity: int,
    fetch: str | Sequence[str] = "auto", fitted: Any = None, logits: Logits = "last", prefill_chunk: int = 2048,
    shortest: int | None = None, progress: Callable[[int, int], None] | None = None,
    attention: PrefillAttention | None = None,
) -> list[tuple[Any, KVState]]:  # fmt: skip
    """Prefill once and let every policy compress each layer.

    Args:
        params: Params.
        tokens, lengths: as in `prefill`.
        policies: one state is made for each.
        capacity, fitted, logits, prefill_chunk: as in `prefill`.
        fetch: one mode for all, or one for each policy.
        shortest: size the windows as if the shortest prompt had this many tokens (a bucket, so that near lengths
            share one compiled step); None: its real length.
        progress: called with (layers done, layers) as they finish.
        attention: as in `prefill`.

    Returns:
        (logits, state) for each policy; the logits are the same array.
    """
    config: ModelConfig = params.config
    tokens, lengths = check_tokens(config, tokens, lengths, least=1)
    check_logits(logits)
    check_capacity(config, capacity, int(lengths.max()))
    check_piece("prefill_chunk", prefill_chunk)
    capacity, dtype = int(capacity), str(params.dtype)
    modes: list[Any] = list(fetch) if isinstance(fetch, tuple | list) else [fetch] * len(policies)
    if not policies or len(modes) != len(policies):
        raise ConfigError(f"policies must be some, with a fetch mode each, got {len(policies)} and {len(modes)} modes")
    given = [ShadowKV() if policy is None else policy for policy in policies]
    for policy in given:
        check_policy(policy)
    resolved = [policy.resolve(config, capacity) for policy in given]
    floor = int(lengths.min()) if shortest is None else min(shortest, int(lengths.min()))
    plans = [
        cache_specs(config, policy, len(lengths), capacity, floor, dtype, offload.resolve_fetch(mode))
        for policy, mode in zip(resolved, modes, strict=True)
    ]  # fmt: skip
    everywhere = spread(params.weights)
    if everywhere is not None and any(spec.fetch != "resident" for plan in plans for spec in plan):
        raise ConfigError(f"fetch must be 'resident' with weights on several devices, got {modes}")
    readers = [policy for policy in resolved if reads_fitted(policy)]
    for policy in readers or resolved[:1]:
        check_fitted(policy, config, fitted)
    host_memory.check_host_memory(plans)
    row_lengths = jnp.asarray(lengths)
    own, learned = prepared_attention(resolved, attention, config)
    count, size = pieces_of(tokens.shape[1], prefill_chunk, own.multiple if own else 1)
    x = _embed(params.weights, fit_tokens(jnp.asarray(tokens), count * size), config=config)
    layers: list[list[LayerState]] = [[] for _ in resolved]
    travelling: list[LayerState] = []
    with one_blas_thread() as results:
        for index in range(config.num_layers):
            specs, kind = [plan[index] for plan in plans], config.attention_kind(index)
            inverse = inverse_frequencies(kind.rope, config.head_dim, capacity)  # of NumPy: nothing stays on the device
            x, prompt = _prefill_layer(
                params.weights[f"layer_{index}"], x, row_lengths, inverse, of_layer(learned, index), config=config,
                kind=kind, needs_all=any(spec.policy.reads.all_queries for spec in specs),
                q_tail=max(spec.policy.reads.last_queries for spec in specs), size=size,
                attention=(own if kind.window is None else None) if attention else attention_of(specs[0].policy),
            )  # fmt: skip
            # The layer before may still be on its way to the host, never two: that bounds the rows in flight.
            host_memory.settle(travelling, plans)
            for done, spec in zip(layers, specs, strict=True):
                state, write = compress_layer(
                    needed(prompt, spec), of_layer(fitted, index) if reads_fitted(spec.policy) else None,
                    spec=dataclasses.replace(spec, layer=None),
                )  # fmt: skip
                with host_memory.placing(plans):
                    done.append(state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write)))
            travelling = [done[-1] for done in layers]
            del prompt, write  # or they would live on beside the next layer's
            if progress is not None:
                jax.block_until_ready(x)
                progress(index + 1, config.num_layers)
        results.append((x, layers))
    out = _prompt_logits(params.weights, x[:, : tokens.shape[1]], row_lengths, config=config, want=logits)
    host_memory.settle(travelling, plans)
    batch = len(lengths)
    last = tokens[np.arange(batch), lengths - 1]
    states = [
        commit(
            KVState(tuple(done), first_shared(policy, plan, fitted), jnp.array(lengths), jnp.array(last),
                    Counters.zeros(batch), fitted if reads_fitted(policy) else None, plan, policy), everywhere,
        )
        for done, policy, plan in zip(layers, resolved, plans, strict=True)
    ]  # fmt: skip
    if any(tries_a_step(policy) for policy in resolved):
        final = _prompt_logits(params.weights, x[:, : tokens.shape[1]], row_lengths, config=config, want="last")
        token = final.argmax(-1).astype(jnp.int32)
        states = [foresee(params.weights, config, token, state) for state in states]
    return [(out, state) for state in states]


def tries_a_step(policy: Policy) -> bool:
    """Whether a prompt ends with a trial step."""
    speculation = capability(policy, Speculates)
    return speculation is not None and speculation.trial_step


def foresee(weights: dict, config: ModelConfig, token: Array, state: KVState) -> KVState:
    """The state with what its policy keeps of a step on a token, [B], that is taken back."""
    if not tries_a_step(state.policy):
        return state
    reads, writes = state.split()
    shared, lives = _foresee(weights, token, reads, writes, config=config)
    layers = tuple((live, tail) for live, (_, tail) in zip(lives, writes.layers, strict=True))
    return commit(state.join(writes.replace(layers=layers, shared=shared)))


@functools.partial(jax.jit, static_argnames=("config",))
def _foresee(weights: dict, token: Array, reads: Reads, writes: Writes, *, config: ModelConfig) -> tuple[Any, Any]:
    speculation = capability(reads.policy, Speculates)
    assert speculation is not None
    begun = writes.replace(shared=speculation.before_trial(writes.shared, token))
    _, after = step_writes(weights, config, token[:, None], jnp.ones_like(writes.lengths), reads, begun)
    lives = [
        spec.policy.adopt(before[0], now[0]) if isinstance(spec.policy, Speculates) else before[0]
        for spec, before, now in zip(reads.specs, writes.layers, after.layers, strict=True)
    ]
    return after.shared, lives


def own_attention(policies: Sequence[Policy], attention: PrefillAttention | None) -> PrefillAttention | None:
    """What attends while the prompt is taken in; None: exact attention.

    Raises:
        ConfigError: a policy has its own beside another's, for one prefill serves all.
    """
    own = [attention_of(policy) for policy in policies]
    changed = [innermost(policy).name for policy, its in zip(policies, own, strict=True) if its is not None]
    # layers of a wrapped policy may differ, so that only the very same policy attends alike
    if changed and (len(set(policies)) > 1 or attention is not None):
        raise ConfigError(
            f"{changed[0]} attends to a prompt in its own way: it takes no prefill= and shares its prefill with no "
            f"other policy, got {attention!r} and {[policy.name for policy in policies]}"
        )
    return own[0] if changed else attention


def prepared_attention(
    policies: Sequence[Policy], attention: PrefillAttention | None, config: ModelConfig
) -> tuple[PrefillAttention | None, Any]:
    """What attends while the prompt is taken in, and its arrays [L, ...]; (None, None): exact attention.

    Raises:
        ConfigError: no PrefillAttention, one for another model, or beside a policy that has its own.
    """
    if attention is not None and not isinstance(attention, PrefillAttention):
        raise ConfigError(f"prefill must be a PrefillAttention such as VerticalSlash(), or None, got {attention!r}")
    own = own_attention(policies, attention)
    return (None, None) if own is None else own.prepared(config)


def spread(weights: dict) -> Sharding | None:
    """Every device of weights that lie on several; None where one holds all."""
    sharding = jax.tree.leaves(weights)[0].sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if len(sharding.device_set) > 1 else None


def commit(state: KVState, everywhere: Sharding | None = None) -> KVState:
    """The state with every leaf bound to its device and memory, as a step returns it; nothing is copied.

    Fresh arrays are bound to no device, and JAX compiles one program for such and another for bound ones: without
    this, the first and the second step after a prefill would each be compiled. Where weights lie on several devices,
    what lies on one is copied to all.
    """

    def bind(leaf: Any) -> Any:
        if not isinstance(leaf, Array):
            return leaf
        alone = everywhere is not None and len(leaf.sharding.device_set) == 1
        return jax.device_put(leaf, everywhere if alone else leaf.sharding)

    return jax.tree.map(bind, state)


def prefill(
    params: Any, tokens: Any, lengths: Any, policy: Policy | None = None, *, capacity: int, fetch: str = "auto",
    fitted: Any = None, logits: Logits = "last", prefill_chunk: int = 2048, attention: PrefillAttention | None = None,
) -> tuple[Any, KVState]:  # fmt: skip
    """Run a ragged batch of prompts through the model and make its KV state.

    Args:
        params: Params.
        tokens: int32 [B, S], right padded.
        lengths: int32 [B], real tokens of each row, at least 1.
        policy: None: ShadowKV().
        capacity: tokens that a row may ever hold.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        fitted: arrays that the policy learned.
        logits: "last": [B, V] at each row's last real token; "all": [B, S, V]; or a callable that is given the
            float32 logits [B, P, V] of one piece of tokens after another and whose results [B, P, ...] are joined.
        prefill_chunk: tokens that go through a layer at once. Smaller pieces take less device memory
            (`planning.prefill_peak` tells how much), never another result.
        attention: how the prompt's queries attend to each other (`VerticalSlash()` and others); None: exactly, or as
            the policy itself says. Keys, values and the scores by which a policy chooses them stay dense.

    Returns:
        float32 logits, and the state.

    Raises:
        PromptError: empty batch or row, misshaped tokens or lengths, a token id out of range.
        CapacityError: a prompt is longer than the capacity, or the capacity than the model's context.
        ConfigError: a policy setting, fetch mode, logits choice or prefill_chunk is out of range, `fitted` is nothing
            that the policy learned, or `attention` is none, is for another model, or stands beside a policy with an
            attention of its own.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    return prefill_many(
        params, tokens, lengths, [policy], capacity=capacity, fetch=fetch, fitted=fitted, logits=logits,
        prefill_chunk=prefill_chunk, attention=attention,
    )[0]  # fmt: skip
