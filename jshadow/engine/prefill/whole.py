"""A limit on the number of threads that LAPACK uses while a prompt is compressed."""

import contextlib
import dataclasses
import functools
import importlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl
from jax import Array

from jshadow.cache import host_memory, offload
from jshadow.cache.records import LayerState, PromptKV
from jshadow.cache.spec import Shards, gathered
from jshadow.cache.state import Counters, KVState, Reads, Writes, is_deleted, of_layer
from jshadow.engine.agree import run_together
from jshadow.engine.checks import check_policy
from jshadow.engine.cores import LOGITS_PIECE
from jshadow.engine.placement import commit
from jshadow.engine.prefill.job import LayerWork, PrefillJob, PrefillOptions, Schedule, check_job, prompt_read, run_unit
from jshadow.engine.prefill.layer import Given, SecondWork, compress_layer, needed
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.engine.types import (
    Fitted,
    Joined,
    Logits,
    PrefillKeywords,
    PrefillProgress,
    Progress,
    Tokens,
    WholeLogits,
)
from jshadow.errors import StateMismatch
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import embed, sinks_of
from jshadow.models.transformer import logits as model_logits
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.pieces import pieces_of
from jshadow.policies import Policy
from jshadow.policies.capabilities import Speculates, capability, first_shared
from jshadow.policies.checks import reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.weights.params import Params

LIMITING = threading.Lock()  # held by the prefill that has set the limit


@contextlib.contextmanager
def one_blas_thread() -> Iterator[list[Any]]:
    """A context manager that limits LAPACK to one thread. On other backends than the CPU, it does nothing.

    It yields an empty list. At the end of the block, it waits for the arrays that the caller has put into the list, and
    then lifts the limit. OpenBLAS computes the eigenvectors of the compression. Its threads spin between calls and take
    the cores from XLA's threads. The limit holds for the whole process. When several prefills run at once, only the
    first sets and lifts it, so another prefill may run for a while without it.
    """
    results: list[Any] = []
    if jax.default_backend() != "cpu" or not LIMITING.acquire(blocking=False):
        yield results
        return
    try:
        with libraries().limit(limits=1, user_api="blas"):
            yield results
            jax.block_until_ready(results)
    finally:
        LIMITING.release()


@functools.cache
def libraries() -> threadpoolctl.ThreadpoolController:
    """Return what controls the threads of the libraries that are loaded. The search takes milliseconds."""
    # JAX would load this library later.
    importlib.import_module("scipy.linalg.cython_lapack")
    return threadpoolctl.ThreadpoolController()


def _end_prefill(job: PrefillJob, x: Array, layers: Sequence[Sequence[LayerState]]) -> list[tuple[Any, KVState]]:
    """Return (logits, state) for each policy.

    Args:
        x: hidden states [B, S, D] after the last layer.
        layers: for each layer, the state of each policy.
    """
    weights, config, row_lengths = job.params.weights, job.params.config, jnp.asarray(job.lengths)
    x = x[:, : job.tokens.shape[1]]
    out = run_together(
        prompt_logits, weights, x, row_lengths, config=config, want=job.options.logits, shards=job.shards
    )
    states = _first_states(job, layers)
    if any(_tries_a_step(policy) for policy in job.policies):
        final = run_together(prompt_logits, weights, x, row_lengths, config=config, want="last", shards=job.shards)
        token = final.argmax(-1).astype(jnp.int32)
        states = [foresee(weights, config, token, state) for state in states]
    return [(out, state) for state in states]


def _first_states(job: PrefillJob, layers: Sequence[Sequence[LayerState]]) -> list[KVState]:
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
        states.append(commit(state))
    return states


@functools.partial(jax.jit, static_argnames=("config",))
def embed_prompt(weights: dict, tokens: Array, *, config: ModelConfig) -> Array:
    """Return the embeddings of the tokens."""
    return embed(weights, config, tokens)


@functools.partial(jax.jit, static_argnames=("config", "want", "shards"))
def prompt_logits(
    weights: dict, x: Array, lengths: Array, *, config: ModelConfig, want: Logits[Any], shards: Shards | None = None
) -> Any:
    """Return the logits of the hidden states x [B, S, D], as `want` tells, or the results of the callable.

    On a mesh, they lie on every device.
    """

    def logits(x: Array) -> Any:
        return gathered(model_logits(weights, config, x), shards)

    if want == "last":
        return logits(jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0])
    if want == "all":
        return logits(x)
    assert callable(want)
    pieces = [x[:, start : start + LOGITS_PIECE] for start in range(0, x.shape[1], LOGITS_PIECE)]
    results = [want(logits(piece)) for piece in pieces]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def _tries_a_step(policy: Policy) -> bool:
    """Whether the policy needs a trial step at the end of a prompt."""
    speculation = capability(policy, Speculates)
    return speculation is not None and speculation.trial_step


def foresee(weights: dict, config: ModelConfig, token: Array, state: KVState) -> KVState:
    """Return the state after a trial step on `token`, int32 [B], if its policy needs one.

    The step is then undone. Only the parts that the policy adopts are kept.
    """
    if not _tries_a_step(state.policy):
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


_CONSUMED = "the prefill was advanced before; use the value that advance_prefill returned"


@dataclasses.dataclass(frozen=True, eq=False)
class PartialPrefill:
    """A prefill that has read some layers, and some pieces of the next layer.

    It is immutable. `advance_prefill` reuses the memory of its arrays, so a value can be advanced only once.

    Attributes:
        job: the checked arguments.
        schedule: the units of all layers.
        work: the hidden states, and the arrays of the layer that is being read.
        unit: number of finished units of this layer.
        layers: the finished layers. For each layer, the state of each policy.
    """

    job: PrefillJob = dataclasses.field(repr=False)
    schedule: Schedule = dataclasses.field(repr=False)
    work: LayerWork = dataclasses.field(repr=False)
    unit: int = 0
    layers: tuple[tuple[LayerState, ...], ...] = dataclasses.field(default=(), repr=False)

    @property
    def done(self) -> bool:
        """Whether all layers are finished."""
        return len(self.layers) == len(self.schedule.plans)

    @property
    def progress(self) -> PrefillProgress:
        """How far the prefill is, without a rate."""
        layer, schedule = len(self.layers), self.schedule
        share = 1.0 if self.done else schedule.done[layer][self.unit]
        units = 0 if self.done else len(schedule.units[layer])
        return PrefillProgress(layer, len(schedule.plans), self.unit, units, share, int(self.job.lengths.sum()))


def begin(job: PrefillJob) -> PartialPrefill:
    """Embed the prompts, and return the prefill before its first unit."""
    options, config, width = job.options, job.params.config, job.tokens.shape[1]
    count, size = pieces_of(width, options.prefill_chunk, job.attention.multiple if job.attention else 1)
    pieces = -(-int(job.lengths.max()) // size)
    plans = tuple(job.layer_plan(index, count, size) for index in range(config.num_layers))
    compressions = tuple(
        sum(plan[index].policy.compress_work(plan[index], count * size)[0] for plan in job.plans)
        for index in range(config.num_layers)
    )
    requests = job.requests
    schedule = Schedule(plans, compressions, len(job.lengths), pieces, (0, 0) if requests is None else requests.sizes)
    # NumPy pads the tokens, so that this compiles no program for each length.
    padded = np.zeros((len(job.tokens), count * size), job.tokens.dtype)
    padded[:, :width] = job.tokens
    ids = jnp.asarray(padded)
    x = run_together(embed_prompt, job.params.weights, ids, config=config)
    second = None
    if requests is not None:
        ids = jnp.asarray(requests.tokens.swapaxes(0, 1))
        counts = jnp.asarray(requests.counts.swapaxes(0, 1))
        second = SecondWork(run_together(embed_prompt, job.params.weights, ids, config=config), counts)
    return PartialPrefill(job, schedule, _first_work(job, x, second))


def _first_work(job: PrefillJob, x: Array, second: SecondWork | None) -> LayerWork:
    """Return the arrays before the first unit of a layer. The lengths are a copy, because the layer donates them."""
    return LayerWork(x, jnp.array(job.lengths), second=second)


def advance(partial: PartialPrefill) -> PartialPrefill:
    """Run the next unit, and return the prefill after it. It may still be running on the device."""
    job, schedule, index = partial.job, partial.schedule, len(partial.layers)
    plan, unit, layer = schedule.plans[index], schedule.units[index][partial.unit], job.params.weights[f"layer_{index}"]
    if unit.work != "compress":
        # NumPy computes the angles, so that they take no device memory between layers.
        inverse = inverse_frequencies(plan.kind.rope, plan.config.head_dim, job.options.capacity)
        given = Given(layer, inverse, of_layer(job.learned, index))
        work = run_unit(plan, unit, given, partial.work)
        return dataclasses.replace(partial, work=work, unit=partial.unit + 1)
    with one_blas_thread() as results:
        # The rows of at most one layer are on their way to the host: wait for those of the layer before.
        host_memory.settle(partial.layers[-1] if partial.layers else [], job.plans)
        prompt = prompt_read(plan, partial.work).replace(sinks=sinks_of(layer))
        states = compress_all(job, index, prompt)
        results.append(states)
    work = _first_work(job, partial.work.x, partial.work.second)
    return dataclasses.replace(partial, work=work, unit=0, layers=(*partial.layers, states))


def compress_all(job: PrefillJob, index: int, prompt: PromptKV) -> tuple[LayerState, ...]:
    """Compress the prompt in layer `index`, and return the layer's state for each policy.

    The host rows may not have been copied completely yet.
    """
    states = []
    for plan in job.plans:
        spec = plan[index]
        fitted = of_layer(job.options.fitted, index) if reads_fitted(spec.policy) else None
        state, write = run_together(
            compress_layer, needed(prompt, spec), fitted, spec=dataclasses.replace(spec, layer=None)
        )
        with host_memory.placing(job.plans):
            states.append(state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write)))
    return tuple(states)


def _end(partial: PartialPrefill) -> list[tuple[Any, KVState]]:
    """Return (logits, state) for each policy after the last unit."""
    host_memory.settle(partial.layers[-1], partial.job.plans)
    return _end_prefill(partial.job, partial.work.x, partial.layers)


def _check_partial(params: Params, partial: PartialPrefill, policy: Policy | None) -> None:
    """Raise StateMismatch unless the prefill was begun with these parameters and this policy, and can be advanced."""
    if not isinstance(partial, PartialPrefill):
        raise StateMismatch(f"partial must be a PartialPrefill, as begin_prefill returns it, got {partial!r:.80}")
    job = partial.job
    if params.weights is not job.params.weights:
        want, got = (
            f"{one.config.num_layers} layers of {one.config.model_dim} columns" for one in (job.params, params)
        )
        raise StateMismatch(f"params must be those with which the prefill was begun ({want}), got others ({got})")
    if policy is not None:
        check_policy(policy)
        resolved = policy.resolve(job.params.config, job.options.capacity)
        if resolved not in job.policies:
            raise StateMismatch(f"policy must be the prefill's own {job.policies[0]}, got {resolved}")
    if any(is_deleted(leaf) for leaf in jax.tree.leaves(partial.work)):
        raise StateMismatch(_CONSUMED)


def begin_prefill(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policy: Policy | None = None,
    *,
    capacity: int,
    logits: WholeLogits = "last",
    **options: Unpack[PrefillKeywords],
) -> PartialPrefill:
    """Begin a prefill that can be paused. The arguments are those of `prefill`, but `logits` is "last" or "all".

    All lengths up to the width S of `tokens` share the compiled programs. Pieces without real tokens are not computed.
    So a server pads its prompts to a few widths.

    Raises:
        PromptError, CapacityError, ConfigError, HostMemoryError: as in `prefill`.
    """
    settings: dict[str, Any] = {**options}
    fetch = settings.pop("fetch", "auto")
    chosen = PrefillOptions(capacity, logits=logits, **settings)
    return begin(check_job(params, tokens, lengths, [policy], fetch, chosen))


def advance_prefill(params: Params, partial: PartialPrefill, policy: Policy | None = None) -> PartialPrefill:
    """Run one unit of a prefill: one piece of one layer, one call of attention, or the compression of one layer.

    The result may still be computing on the device. `PartialPrefill.done` tells whether the prefill has units left.

    Args:
        params: the model with which the prefill was begun.
        partial: the prefill. Its arrays are consumed.
        policy: if given, it must be the policy with which the prefill was begun.

    Returns:
        The prefill after the unit, or `partial` itself if it is done.

    Raises:
        StateMismatch: the prefill was begun with other parameters or another policy, or was advanced before.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    _check_partial(params, partial, policy)
    return partial if partial.done else advance(partial)


def finish_prefill(params: Params, partial: PartialPrefill, policy: Policy | None = None) -> tuple[Array, KVState]:
    """Run all units that are left. Return the logits and the KV state, as `prefill` does.

    The arguments and errors are those of `advance_prefill`.
    """
    _check_partial(params, partial, policy)
    while not partial.done:
        partial = advance(partial)
    result = _end(partial)[0]
    partial.work.x.delete()  # the state has the arrays of the layers, so the value cannot be finished again
    return result


def _run(job: PrefillJob) -> list[tuple[Any, KVState]]:
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
    return _end(partial)


def prefill_many(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policies: Sequence[Policy | None],
    *,
    capacity: int,
    fetch: str | Sequence[str] = "auto",
    fitted: Fitted | None = None,
    logits: Logits[Joined] = "last",
    prefill_chunk: int = 2048,
    shortest: int | None = None,
    progress: Progress | None = None,
    attention: PrefillAttention | None = None,
    room: int | None = None,
) -> list[tuple[Joined, KVState]]:
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
    return _run(check_job(params, tokens, lengths, policies, fetch, options))


def prefill(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policy: Policy | None = None,
    *,
    capacity: int,
    fetch: str = "auto",
    fitted: Fitted | None = None,
    logits: Logits[Joined] = "last",
    prefill_chunk: int = 2048,
    attention: PrefillAttention | None = None,
    room: int | None = None,
) -> tuple[Joined, KVState]:
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
    options = PrefillOptions(capacity, fitted, logits, prefill_chunk, attention=attention, room=room)
    return _run(check_job(params, tokens, lengths, [policy], fetch, options))[0]
