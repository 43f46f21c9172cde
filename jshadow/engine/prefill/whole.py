"""Prefill: run a ragged batch of prompts through the model, layer by layer, in bounded device memory.

The prompts pass through a layer piece by piece. Then the policy compresses the layer's keys and values, and these are
freed. The layer's host rows are copied while the next layer computes. Layers with equal plans share one program.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine.blas_threads import one_blas_thread
from jshadow.engine.prefill.job import PrefillJob, PrefillOptions, check_job
from jshadow.engine.prefill.partial import advance, begin, end
from jshadow.engine.types import (
    Fitted,
    Joined,
    PrefillKeywords,
    PrefillManyKeywords,
    Progress,
    Tokens,
    WholeLogits,
)
from jshadow.policies import Policy
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.weights.params import Params


def run(job: PrefillJob) -> list[tuple[Any, KVState]]:
    """Run a prefill from its begin to its end, and return (logits, state) for each policy."""
    partial, tell = begin(job), job.options.progress
    begun, start = 0.0, time.monotonic()
    with one_blas_thread() as results:
        while not partial.done:
            partial = advance(partial)
            if tell is None:
                continue
            jax.block_until_ready(partial.work)
            now, progress = time.monotonic(), partial.progress
            tell(progress.timed(begun, now - start))
            if progress.layers == 1 and begun == 0:
                begun, start = progress.share, now  # the programs are compiled in the first layer
        results.append((partial.work, partial.layers))
    return end(partial)


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
    room: int | None = None,
) -> list[tuple[Array, KVState]] | list[tuple[Joined, KVState]]:
    """Prefill a batch of prompts once, and make one state for each policy.

    Args:
        params: the model.
        tokens, lengths: as in `prefill`.
        policies: one state is made for each policy.
        capacity, fitted, logits, prefill_chunk: as in `prefill`.
        fetch: one mode for all, or one for each policy.
        shortest: number of tokens of the shortest prompt, by which windows are sized. A number that is rounded down
            lets prompts of similar lengths share one compiled step. None means the real number. With `room` it has no
            effect.
        progress: called with a `PrefillProgress` after each unit of the prefill.
        attention, room: as in `prefill`.

    Returns:
        (logits, state) for each policy. All have the same logits array.

    Raises:
        PromptError, CapacityError, ConfigError, HostMemoryError: as in `prefill`.
    """
    options = PrefillOptions(capacity, fitted, logits, prefill_chunk, shortest, progress, attention, room)
    return run(check_job(params, tokens, lengths, policies, fetch, options))


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
    room: int | None = None,
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
        room: number of tokens that each row may take after its prompt, within the capacity. It sizes the exact keys
            and values that the policy keeps beside the compressed prompt, for prompts of any length. A step past
            `state.room()` is refused. None: a row may grow to the capacity, and the shortest prompt of the batch
            sizes them.

    Returns:
        The float32 logits, or the joined results of the callable, and the state.

    Raises:
        PromptError: the batch or a row is empty, the shapes are wrong, or a token id is out of range.
        CapacityError: a prompt exceeds the capacity, the capacity exceeds the model's context, or room is not an
            integer of at least 0.
        ConfigError: a policy setting, fetch mode, logits choice or prefill_chunk is out of range; `fitted` does not fit
            the policy; or `attention` is not a PrefillAttention, was found on another model, or is given although the
            policy has its own.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    options = PrefillOptions(capacity, fitted, logits, prefill_chunk, None, None, attention, room)
    return run(check_job(params, tokens, lengths, [policy], fetch, options))[0]
