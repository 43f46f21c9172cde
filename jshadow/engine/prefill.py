"""Prefill: run a ragged batch of prompts through the model, layer by layer, in bounded device memory.

The prompts pass through a layer piece by piece. Then the policy compresses the layer's keys and values, and these are
freed. The layer's host rows are copied while the next layer computes. Layers with equal plans share one program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache import host_memory, offload
from jshadow.cache.records import LayerState, PromptKV
from jshadow.cache.state import Counters, KVState, Reads, Writes, of_layer
from jshadow.engine.blas_threads import one_blas_thread
from jshadow.engine.placement import commit
from jshadow.engine.prefill_job import PrefillJob, PrefillOptions, check_job
from jshadow.engine.prefill_layer import compress_layer, needed, prefill_layer
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.engine.turn import LOGITS_PIECE
from jshadow.engine.types import (
    Fitted,
    Joined,
    Logits,
    PrefillKeywords,
    PrefillManyKeywords,
    Progress,
    Tokens,
    WholeLogits,
)
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import embed
from jshadow.models.transformer import logits as model_logits
from jshadow.ops.layout import fit_tokens
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.prefill_pieces import pieces_of
from jshadow.policies import Policy
from jshadow.policies.capabilities import Speculates, capability, first_shared
from jshadow.policies.checks import reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.weights.params import Params


def run_job(job: PrefillJob) -> list[tuple[Any, KVState]]:
    """Run a prefill, and return (logits, state) for each policy."""
    params, config, options = job.params, job.params.config, job.options
    row_lengths, width = jnp.asarray(job.lengths), job.tokens.shape[1]
    count, size = pieces_of(width, options.prefill_chunk, job.attention.multiple if job.attention else 1)
    x = _embed(params.weights, fit_tokens(jnp.asarray(job.tokens), count * size), config=config)
    layers: list[list[LayerState]] = []  # for each layer the state of each policy
    with one_blas_thread() as results:
        for index in range(config.num_layers):
            plan = job.layer_plan(index, count, size)
            # NumPy computes the angles, so that they take no device memory between layers.
            inverse = inverse_frequencies(plan.kind.rope, config.head_dim, options.capacity)
            weights, learned = params.weights[f"layer_{index}"], of_layer(job.learned, index)
            x, prompt = prefill_layer(weights, x, row_lengths, inverse, learned, plan=plan)
            # The rows of at most one layer are on their way to the host: wait for those of the layer before.
            host_memory.settle(layers[-1] if layers else [], job.plans)
            layers.append(compress_all(job, index, prompt))
            del prompt  # else it would be held while the next layer's is made
            if options.progress is not None:
                jax.block_until_ready(x)
                options.progress(index + 1, config.num_layers)
        results.append((x, layers))
    out = _prompt_logits(params.weights, x[:, :width], row_lengths, config=config, want=options.logits)
    host_memory.settle(layers[-1], job.plans)
    states = first_states(job, layers)
    if any(tries_a_step(policy) for policy in job.policies):
        final = _prompt_logits(params.weights, x[:, :width], row_lengths, config=config, want="last")
        token = final.argmax(-1).astype(jnp.int32)
        states = [foresee(params.weights, config, token, state) for state in states]
    return [(out, state) for state in states]


def compress_all(job: PrefillJob, index: int, prompt: PromptKV) -> list[LayerState]:
    """Compress the prompt in layer `index`, and return the layer's state for each policy.

    The host rows may not have been copied completely yet.
    """
    states = []
    for plan in job.plans:
        spec = plan[index]
        fitted = of_layer(job.options.fitted, index) if reads_fitted(spec.policy) else None
        state, write = compress_layer(needed(prompt, spec), fitted, spec=dataclasses.replace(spec, layer=None))
        with host_memory.placing(job.plans):
            states.append(state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write)))
    return states


def first_states(job: PrefillJob, layers: list[list[LayerState]]) -> list[KVState]:
    """Return the state of each policy after the prompt, before any step."""
    batch, fitted = len(job.lengths), job.options.fitted
    last = job.tokens[np.arange(batch), job.lengths - 1]
    states = []
    for policy, plan, full_layers in zip(job.policies, job.plans, zip(*layers, strict=True), strict=True):
        state = KVState(
            layers=tuple(full_layers),
            shared=first_shared(policy, plan, fitted),
            lengths=jnp.array(job.lengths),
            last=jnp.array(last),
            counters=Counters.zeros(batch),
            fitted=fitted if reads_fitted(policy) else None,
            specs=plan,
            policy=policy,
        )
        states.append(commit(state, job.everywhere))
    return states


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(weights: dict, tokens: Array, *, config: ModelConfig) -> Array:
    return embed(weights, config, tokens)


@functools.partial(jax.jit, static_argnames=("config", "want"))
def _prompt_logits(weights: dict, x: Array, lengths: Array, *, config: ModelConfig, want: Logits[Any]) -> Any:
    if want == "last":
        x = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return model_logits(weights, config, x)
    if want == "all":
        return model_logits(weights, config, x)
    assert callable(want)
    pieces = [x[:, start : start + LOGITS_PIECE] for start in range(0, x.shape[1], LOGITS_PIECE)]
    results = [want(model_logits(weights, config, piece)) for piece in pieces]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def tries_a_step(policy: Policy) -> bool:
    """Whether the policy needs a trial step at the end of a prompt."""
    speculation = capability(policy, Speculates)
    return speculation is not None and speculation.trial_step


def foresee(weights: dict, config: ModelConfig, token: Array, state: KVState) -> KVState:
    """Return the state after a trial step on `token`, int32 [B], if its policy needs one.

    The step is then undone. Only the parts that the policy adopts are kept.
    """
    if not tries_a_step(state.policy):
        return state
    reads, writes = state.split()
    shared, lives = _foresee(weights, token, reads, writes, config=config)
    layers = tuple((live, tail) for live, (_, tail) in zip(lives, writes.layers, strict=True))
    return commit(state.join(writes.replace(layers=layers, shared=shared)))


@functools.partial(jax.jit, static_argnames=("config",), compiler_options=COMPILER_OPTIONS)
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


@overload
def prefill_many(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policies: Sequence[Policy | None],
    *,
    capacity: int,
    logits: WholeLogits = "last",
    **options: Unpack[PrefillManyKeywords],
) -> list[tuple[Array, KVState]]: ...
@overload
def prefill_many(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policies: Sequence[Policy | None],
    *,
    capacity: int,
    logits: Callable[[Array], Joined],
    **options: Unpack[PrefillManyKeywords],
) -> list[tuple[Joined, KVState]]: ...
def prefill_many(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policies: Sequence[Policy | None],
    *,
    capacity: int,
    fetch: str | Sequence[str] = "auto",
    fitted: Fitted | None = None,
    logits: WholeLogits | Callable[[Array], Joined] = "last",
    prefill_chunk: int = 2048,
    shortest: int | None = None,
    progress: Progress | None = None,
    attention: PrefillAttention | None = None,
) -> list[tuple[Array, KVState]] | list[tuple[Joined, KVState]]:
    """Prefill a batch of prompts once, and make one state for each policy.

    Args:
        params: the model.
        tokens, lengths: as in `prefill`.
        policies: one state is made for each policy.
        capacity, fitted, logits, prefill_chunk: as in `prefill`.
        fetch: one mode for all, or one for each policy.
        shortest: number of tokens of the shortest prompt, by which windows are sized. A number that is rounded down
            lets prompts of similar lengths share one compiled step. None means the real number.
        progress: called with (layers done, number of layers) after each layer.
        attention: as in `prefill`.

    Returns:
        (logits, state) for each policy. All have the same logits array.

    Raises:
        PromptError, CapacityError, ConfigError, HostMemoryError: as in `prefill`.
    """
    options = PrefillOptions(capacity, fitted, logits, prefill_chunk, shortest, progress, attention)
    return run_job(check_job(params, tokens, lengths, policies, fetch, options))


@overload
def prefill(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policy: Policy | None = None,
    *,
    capacity: int,
    logits: WholeLogits = "last",
    **options: Unpack[PrefillKeywords],
) -> tuple[Array, KVState]: ...
@overload
def prefill(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policy: Policy | None = None,
    *,
    capacity: int,
    logits: Callable[[Array], Joined],
    **options: Unpack[PrefillKeywords],
) -> tuple[Joined, KVState]: ...
def prefill(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policy: Policy | None = None,
    *,
    capacity: int,
    fetch: str = "auto",
    fitted: Fitted | None = None,
    logits: WholeLogits | Callable[[Array], Joined] = "last",
    prefill_chunk: int = 2048,
    attention: PrefillAttention | None = None,
) -> tuple[Array, KVState] | tuple[Joined, KVState]:
    """Run a ragged batch of prompts through the model. Return logits and the KV state of the prompts.

    Args:
        params: the model.
        tokens: token ids, int32 [B, S], right padded.
        lengths: number of real tokens of each row, int32 [B], at least 1.
        policy: how keys and values are kept. None means ShadowKV().
        capacity: maximum number of tokens that a row can ever hold, prompt included.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        fitted: arrays that the policy learned, or None.
        logits: which logits to return. "last": [B, V], for each row's last real token. "all": [B, S, V]. A callable:
            it is called with the float32 logits [B, P, V] of each piece of P tokens, and its results [B, P, ...] are
            concatenated.
        prefill_chunk: number of tokens that go through a layer at once. Smaller pieces take less device memory
            (`planning.prefill_peak` computes how much) and give the same result.
        attention: the sparse attention of the prompt (`VerticalSlash()` and others). None means exact attention, or the
            policy's own. Keys and values of all tokens are computed in any case. A policy that chooses tokens by
            attention scores also computes the scores of all tokens.

    Returns:
        The float32 logits, or the joined results of the callable, and the state.

    Raises:
        PromptError: the batch or a row is empty, the shapes are wrong, or a token id is out of range.
        CapacityError: a prompt exceeds the capacity, or the capacity exceeds the model's context.
        ConfigError: a policy setting, fetch mode, logits choice or prefill_chunk is out of range; `fitted` does not fit
            the policy; or `attention` is not a PrefillAttention, was found on another model, or is given although the
            policy has its own.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    options = PrefillOptions(capacity, fitted, logits, prefill_chunk, None, None, attention)
    return run_job(check_job(params, tokens, lengths, [policy], fetch, options))[0]
