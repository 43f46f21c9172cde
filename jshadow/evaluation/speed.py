"""Times of decode steps and prefills on this machine, and the peak rates of the machine.

A measurement compiles, warms up, and gives the median, the minimum and the maximum of its repeats.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache import offload
from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import HostTier, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine.prefill.layer import compress_layer
from jshadow.engine.step import COMPILER_OPTIONS, AllLayers, step_layer
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.rope import cos_sin, inverse_frequencies
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import Planner
from jshadow.planner.gpu_specs import Gpu
from jshadow.planner.machine import fetch_here
from jshadow.policies import LayerCache, Policy
from jshadow.policies.base import step_flops, why_dense
from jshadow.policies.capabilities import attention_of
from jshadow.weights.convert import config_of

# Timing

# (bytes of the copied array, side of the matrices) of `ceilings`. They are so large that the start of a program takes
# hardly any of its time.
ON_CPU, ON_GPU = (2**29, 2048), (2**32, 8192)


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds that one call takes over several repeats, and the seconds of compilation."""

    median: float
    least: float
    most: float
    compile: float = 0.0


def measure(call: Callable[[], Any], repeats: int, compile_seconds: float = 0.0) -> Times:
    """Time a call that waits for its result. One call before the repeats warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return Times(statistics.median(seconds), min(seconds), max(seconds), compile_seconds)


def compiled(
    function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> tuple[Callable[..., Any], float]:
    """Compile a function for these arguments. Returns the compiled function and the seconds of compilation."""
    start = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=donate, compiler_options=COMPILER_OPTIONS)
    program = jitted.lower(*args).compile()
    return program, time.perf_counter() - start


def timed(function: Callable[..., Any], *args: Any, repeats: int) -> Times:
    """Compile a function of arrays and time it."""
    program, seconds = compiled(function, *args)
    return measure(lambda: jax.block_until_ready(program(*args)), repeats, seconds)


def ceilings(repeats: int = 10, copy_bytes: int | None = None, side: int | None = None) -> dict[str, float]:
    """Measure the peak rates of this machine: memory bandwidth, matrix products, and on an accelerator the bus.

    The numbers are random, because products of constant numbers run faster than those of real data.

    Args:
        repeats: number of timed calls. Each rate is that of the fastest call.
        copy_bytes: bytes of the array that is read and copied. None means 512 MiB on a CPU, else 4 GiB.
        side: side of the square matrices. None means 2,048 on a CPU, else 8,192.

    Returns:
        Bytes per second: "read", "copy" (bytes read plus bytes written), and on an accelerator "host_to_device" and
        "device_to_host" for pinned host memory. Operations per second: "matmul_float32" and "matmul_bfloat16".
    """
    usual = ON_CPU if jax.default_backend() == "cpu" else ON_GPU
    copy_bytes, side = copy_bytes or usual[0], side or usual[1]
    x = jax.random.normal(jax.random.key(0), (copy_bytes // 4,))
    rates = {
        "read": copy_bytes / timed(jnp.sum, x, repeats=repeats).least,
        "copy": 2 * copy_bytes / timed(lambda x: x + 1.0, x, repeats=repeats).least,
    }
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    for dtype in ("float32", "bfloat16"):
        square = jax.random.normal(jax.random.key(1), (side, side), dtype)
        rates[f"matmul_{dtype}"] = 2 * side**3 / timed(product, square, square, repeats=repeats).least
    if jax.default_backend() != "cpu":
        device = x.sharding
        host = device.with_memory_kind("pinned_host")
        away = jax.block_until_ready(jax.device_put(x, host))
        for name, source, target in (("device_to_host", x, host), ("host_to_device", away, device)):
            rates[name] = copy_bytes / measure(functools.partial(_move, source, target), repeats).least
    return rates


def _move(x: Array, target: Any) -> None:
    jax.block_until_ready(jax.device_put(x, target))


# One layer

LEFT = 64  # number of tokens that a cache can hold in addition to the prompt
QUERIES = 4  # number of different random queries


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of one layer's attention: prompt tokens, rows, heads, the width of a head, and the dtype.

    Raises:
        ConfigError: a number is below 1, heads is not a multiple of kv_heads, or head_dim is odd.
    """

    context: int
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("context", "batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads={self.kv_heads}, got {self.heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, got {self.head_dim}")

    def config(self) -> ModelConfig:
        """Return the config of a model with one such layer. Only its attention ever runs."""
        return ModelConfig(
            model_type="llama",
            vocab_size=2,
            num_layers=1,
            model_dim=self.heads * self.head_dim,
            ffn_dim=1,
            q_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-5,
            context=self.context + LEFT,
        )


def random_prompt(shape: Shape, policy: LayerCache) -> PromptKV:
    """Return random keys and values [B, S, h_kv, d] of a prompt, and the random queries that a policy needs.

    The log-sum-exps are those of uniform attention. If the policy has its own prefill attention, `extra` is the initial
    value that its `begin` returns.
    """
    reads = policy.reads
    keys, made = prompt_arrays(shape, reads.all_queries, reads.last_queries, reads.second_pass, np.uint32(0))
    prompt = PromptKV(k_pre=keys, k_post=keys, **made)
    attention, config = attention_of(policy), shape.config()
    extra = None if attention is None else attention.begin(config, config.attention_kind(0), prompt, None, None)
    return prompt.replace(extra=extra)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def prompt_arrays(
    shape: Shape, everything: bool, last: int, second_pass: bool, seed: Array
) -> tuple[Array, dict[str, Array | None]]:
    """Return the keys and all other arrays of `random_prompt`. One program makes them."""
    k, v, q, tail = jax.random.split(jax.random.key(seed), 4)
    positions = jnp.arange(shape.context, dtype=jnp.int32)
    even, rows = jnp.log(positions + 1.0), (shape.batch, shape.kv_heads, shape.context)
    return _normal(k, shape, shape.context, shape.kv_heads), {
        "v": _normal(v, shape, shape.context, shape.kv_heads),
        "lengths": jnp.full(shape.batch, shape.context, jnp.int32),
        "positions": jnp.broadcast_to(positions, (shape.batch, shape.context)),
        "q_tail": _normal(tail, shape, last, shape.heads) if last else None,
        "q_post": _normal(q, shape, shape.context, shape.heads) if everything else None,
        "lse": jnp.broadcast_to(even, (shape.batch, shape.heads, shape.context)) if everything else None,
        "second_pass": jax.random.uniform(tail, rows) if second_pass else None,
    }


def _normal(key: Array, shape: Shape, count: int, heads: int) -> Array:
    """Return random numbers [B, count, heads, d] in the dtype of a shape."""
    return jax.random.normal(key, (shape.batch, count, heads, shape.head_dim), shape.dtype)


def layer_state(shape: Shape, policy: Policy, fetch: str) -> tuple[CacheSpec, LayerState]:
    """Return the spec of a layer, and its state after a random prompt.

    Raises:
        ConfigError: a setting of the policy is out of range, or the fetch mode is unknown.
    """
    config = shape.config()
    policy = policy.resolve(config, shape.context + LEFT)
    workload = Workload(shape.context, LEFT, shape.batch, shape.dtype, fetch)
    spec = workload.with_fetch(fetch_here(config, policy, workload).fetch).specs(config, policy)[0]
    state, write = compress_layer(random_prompt(shape, spec.policy), None, spec=dataclasses.replace(spec, layer=None))
    return spec, state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write))


def random_step(shape: Shape, seed: int, rows: int = 1) -> StepKV:
    """Return random queries, keys and values of the token after the prompt. Rows after the first are guesses."""
    inverse = jax.device_put(inverse_frequencies(shape.config().rope, shape.head_dim))
    q, k, v, positions, valid, lengths, *turns = step_arrays(shape, rows, np.uint32(seed), inverse)
    return StepKV(q, q, k, k, v, positions, valid, lengths, inverse, *turns)


@functools.partial(jax.jit, static_argnums=(0, 1))
def step_arrays(shape: Shape, rows: int, seed: Array, inverse: Array) -> tuple[Array, ...]:
    """Return q, k, v, positions, valid, lengths, cosines and sines of `random_step`. One program makes them."""
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    lengths = jnp.full(shape.batch, shape.context, jnp.int32)
    positions = lengths[:, None] + jnp.arange(rows, dtype=jnp.int32)
    valid = jnp.broadcast_to(jnp.arange(rows) == 0, positions.shape)
    made = (_normal(key, shape, rows, count) for key, count in zip(keys, heads, strict=True))
    return *made, positions, valid, lengths, *cos_sin(positions, inverse)


def bench_layer(shape: Shape, policy: Policy, fetch: str = "auto", repeats: int = 10) -> dict[str, Any]:
    """Time one decode step of one layer's attention. Each repeat continues with the state of the previous one.

    The queries are random and alternate, so that consecutive steps rarely select the same tokens.

    Returns:
        A row with policy, fetch, context, batch and dtype; step_seconds (median), least, most and compile_seconds;
        bytes_device and bytes_host of the layer's state; the bytes that a step must read on the device (bytes_read) and
        fetch from the host (bytes_fetched), their sum (bytes_moved), and its operations (flops).
    """
    spec, state = layer_state(shape, policy, fetch)
    steps = itertools.cycle([random_step(shape, seed, spec.policy.query_rows) for seed in range(1, 1 + QUERIES)])

    def run(reads: Any, writes: Any, step: StepKV) -> tuple[Array, Any]:
        layer = LayerState(reads[0], writes[0], HostTier(reads[1], writes[1]))
        out, layer, _ = step_layer(spec, layer, step, AllLayers((spec,), [layer.host]))
        return out, (layer.live, layer.host.tail)

    reads, writes = (state.frozen, state.host.prompt), (state.live, state.host.tail)
    program, seconds = compiled(run, reads, writes, next(steps), donate=(1,))
    latest = [writes]

    def once() -> None:
        out, latest[0] = program(reads, latest[0], next(steps))
        jax.block_until_ready((out, latest[0]))

    times = measure(once, repeats, seconds)
    sizes = np.array(list(layer_nbytes(state).values())).sum(axis=0)
    moved = np.array(list(spec.policy.step_bytes(spec, state).values())).sum(axis=0)
    return {
        "policy": spec.policy.name,
        "fetch": spec.fetch,
        "context": shape.context,
        "batch": shape.batch,
        "dtype": shape.dtype,
        "step_seconds": times.median,
        "least": times.least,
        "most": times.most,
        "compile_seconds": times.compile,
        "bytes_device": int(sizes[0]),
        "bytes_host": int(sizes[1]),
        "bytes_read": int(moved[0]),
        "bytes_fetched": int(moved[1]),
        "bytes_moved": int(moved.sum()),
        "flops": int(step_flops(spec, state)),
    }


# Whole requests

# Only the bytes and operations of its plan are used, and these do not depend on the rates.
_ANY_GPU = Gpu("any", 1, 1.0, 1.0, 1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Request:
    """The request that every system answers: `batch` prompts of `tokens` tokens, then `steps` decode steps.

    `model` is the directory of a checkpoint or a hub id, and `dtype` that of weights, keys and values.
    """

    model: str
    tokens: int = 4096
    batch: int = 1
    steps: int = 24
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def capacity(self) -> int:
        """Number of tokens that a row holds at the end."""
        return self.tokens + self.steps

    def prompts(self, vocab: int) -> np.ndarray:
        """Return random token ids, int32 [batch, tokens]. The measured time does not depend on the text."""
        return np.random.default_rng(0).integers(0, vocab, (self.batch, self.tokens), np.int32)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The seconds of an answer: of its prefill, of all its decode steps, and of compilation.

    The bytes are those of keys and values after the last step.
    """

    prefill_seconds: float
    decode_seconds: float
    bytes_device: int
    bytes_host: int
    compile_seconds: float = 0.0


System = tuple[dict[str, Any], Callable[[], Answer]]  # the entries of its row, and a function that a process can get


def bench_model(
    request: Request,
    policies: Sequence[tuple[str, Policy]],
    fetches: Sequence[str] = ("auto",),
    *,
    runs: int = 3,
    others: Sequence[System] = (),
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Time every policy in every fetch mode.

    Each run is a new process that answers the request twice. The first answer compiles and warms up, and the second is
    measured. The systems alternate.

    Args:
        request: the request that every system answers.
        policies: (name for the rows, policy) for each policy of jshadow.
        fetches: fetch modes of the policies. A policy that offloads nothing runs only in the first one.
        runs: number of runs of each system.
        others: other systems that answer the same request. Their fetch is None.
        progress: called with the name of a system before each of its runs.

    Returns:
        One row for each system. It has setting (its name), policy, fetch, context, batch and dtype; the median and the
        range over the runs of the prefill (prefill_seconds, prefill_least, prefill_most) and of the mean decode step
        (step_seconds, least, most); tokens_per_second; compile_seconds of the first run; bytes_device and bytes_host of
        keys and values; bytes_read, bytes_fetched, bytes_moved and flops of one decode step, and prefill_flops;
        fallback (why a policy ran as a dense cache, or None); error (why a system failed, or None).

    Raises:
        ConfigError: a setting is out of range.
        CapacityError: the request exceeds the model's context.
        CheckpointError: the checkpoint cannot be read.
    """
    if runs < 1:
        raise ConfigError(f"runs must be at least 1, got {runs}")
    config = config_of(request.model)
    if request.capacity > config.context:
        raise CapacityError(
            f"tokens + steps must be at most the model's context={config.context}, "
            f"got {request.tokens} + {request.steps}"
        )
    systems: list[System] = []
    for name, policy in policies:
        for fetch in dict.fromkeys(mode_of(request, config, policy, fetch) for fetch in fetches):
            row = {"setting": name} | _costs(request, config, policy, fetch)
            if row not in [other for other, _ in systems]:
                systems.append((row, functools.partial(answer_jshadow, request, policy, fetch)))
    systems += others
    answers: list[list[Answer]] = [[] for _ in systems]
    errors: list[str | None] = [None] * len(systems)
    for _ in range(runs):
        for index, (row, run) in enumerate(systems):
            if errors[index] is None:
                if progress is not None:
                    progress(label_of(row))
                try:
                    answers[index].append(in_own_process(run))
                except Exception as error:  # the measurements of the other systems are kept
                    errors[index] = f"{type(error).__name__}: {error}".splitlines()[0]
    return [_summary(request, *one) for one in zip([row for row, _ in systems], answers, errors, strict=True)]


def label_of(row: dict[str, Any]) -> str:
    """Return a row's setting, as on the command line, and its fetch mode."""
    return str(row["setting"]) + (f", {row['fetch']}" if row["fetch"] else "")


def mode_of(request: Request, config: ModelConfig, policy: Policy, fetch: str) -> str:
    """Return the fetch mode that a setting stands for on this machine, before the weights are loaded."""
    new = request.capacity - request.tokens
    workload = Workload(request.tokens, new, request.batch, request.dtype, fetch)
    weights = Planner(config, config, _ANY_GPU, workload).weights_bytes
    return fetch_here(config, policy, workload, loading=weights).fetch


def _costs(request: Request, config: ModelConfig, policy: Policy, fetch: str) -> dict[str, Any]:
    """Return the entries of a row that are known before the run: names, bytes and operations."""
    new = request.capacity - request.tokens
    serving = Workload(request.tokens, new, dtype=request.dtype, fetch=fetch, repeat_share=0.0)
    planner = Planner(config, config, _ANY_GPU, serving)
    resolved = policy.resolve(config, request.capacity)
    fallback = why_dense(resolved, config, request.capacity)
    step = planner.step(resolved, request.batch, passes=False)
    offloads = any(spec.policy.host_layout(spec) is not None for spec in planner.specs(resolved, request.batch))
    read = sum(step.hbm_bytes.values())
    table = config.vocab_size * config.model_dim * (1 if config.tie_embeddings else 2)
    numbers = planner.weights_bytes // planner.item - table
    # Each token is multiplied by each weight, and attends to half of the prompt on average.
    attending = (layer for layer, kind in enumerate(config.attention_kinds) if not kind.recurrent)
    columns = sum(config.at(layer).query_columns for layer in attending)
    prefill = 2 * request.tokens * (numbers + request.tokens * columns)
    return {
        "policy": resolved.name,
        "fetch": fetch if offloads else "resident",
        "bytes_read": read,
        "bytes_fetched": step.pcie_bytes,
        "bytes_moved": read + step.pcie_bytes,
        "flops": step.flops,
        "prefill_flops": request.batch * prefill,
        "fallback": fallback,
    }


def in_own_process(run: Callable[[], Answer]) -> Answer:
    """Call run() in a new process, so that systems share no memory, threads or caches."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(run).result()


def answer_jshadow(request: Request, policy: Policy, fetch: str) -> Answer:
    """Answer a request twice with jshadow, by a prefill and greedy steps, and return the second answer."""
    import jshadow
    from jshadow.engine.report import CompileClock, measured_bytes

    params = jshadow.load(request.model, dtype=request.dtype)
    prompts = request.prompts(params.config.vocab_size)
    lengths = np.full(request.batch, request.tokens, np.int32)
    greedy = jax.jit(lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32))

    def once() -> Answer:
        start = time.perf_counter()
        logits, state = jshadow.prefill(params, prompts, lengths, policy, capacity=request.capacity, fetch=fetch)
        token = jax.block_until_ready((greedy(logits), state))[0]
        middle = time.perf_counter()
        for _ in range(request.steps):
            logits, state = jshadow.decode_step(params, token, state)
            token = greedy(logits)
        jax.block_until_ready((token, state))
        end = time.perf_counter()
        sizes = measured_bytes(state)
        return Answer(middle - start, end - middle, sizes["device"], sizes["host"])

    once()
    compiling = CompileClock.seconds
    return dataclasses.replace(once(), compile_seconds=compiling)


def _summary(request: Request, row: dict[str, Any], answers: list[Answer], error: str | None) -> dict[str, Any]:
    """Complete the row of a system with the medians and ranges of its runs."""
    row |= {"context": request.tokens, "batch": request.batch, "dtype": request.dtype, "error": error}
    if not answers:
        return row
    prefill = [answer.prefill_seconds for answer in answers]
    step = [answer.decode_seconds / request.steps for answer in answers]
    return row | {
        "prefill_seconds": statistics.median(prefill),
        "prefill_least": min(prefill),
        "prefill_most": max(prefill),
        "step_seconds": statistics.median(step),
        "least": min(step),
        "most": max(step),
        "tokens_per_second": request.batch / statistics.median(step),
        "compile_seconds": answers[0].compile_seconds,
        "bytes_device": answers[0].bytes_device,
        "bytes_host": answers[0].bytes_host,
    }
