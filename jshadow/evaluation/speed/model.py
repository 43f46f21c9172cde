"""Times of whole requests (prefill and decode) on a real checkpoint. Each system runs in a separate process."""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshadow.errors import CapacityError, ConfigError
from jshadow.evaluation.speed.peers import CACHES, answer_transformers
from jshadow.evaluation.speed.request import Answer, Request
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import Planner
from jshadow.planner.gpu_specs import Gpu
from jshadow.planner.machine import fetch_here
from jshadow.policies import Policy
from jshadow.policies.base import why_dense
from jshadow.weights.convert.huggingface import locate, read_config

# Only the bytes and operations of its plan are used, and these do not depend on the rates.
ANY_GPU = Gpu("any", 1, 1.0, 1.0, 1.0, 1.0)


def bench_model(
    request: Request,
    policies: Sequence[tuple[str, Policy]],
    fetches: Sequence[str] = ("auto",),
    *,
    runs: int = 3,
    peers: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Time every policy in every fetch mode. On a CPU with torch installed, transformers is also timed.

    Each run is a new process that answers the request twice. The first answer compiles and warms up, and the second is
    measured. The systems alternate.

    Args:
        request: the request that every system answers.
        policies: (name for the rows, policy) for each policy of jshadow.
        fetches: fetch modes of the policies. A policy that offloads nothing runs only in the first one.
        runs: number of runs of each system.
        peers: whether to time transformers.
        progress: called with the name of a system before each of its runs.

    Returns:
        One row for each system. It has setting (its name), policy, fetch, context, batch and dtype; the median and the
        range over the runs of the prefill (prefill_seconds, prefill_least, prefill_most) and of the mean decode step
        (step_seconds, least, most); tokens_per_second; compile_seconds of the first run; bytes_device and bytes_host of
        keys and values; bytes_read, bytes_fetched, bytes_moved and flops of one decode step, and prefill_flops (all
        None for transformers); fallback (why a policy ran as a dense cache, or None); error (why a system failed, or
        None).

    Raises:
        ConfigError: a setting is out of range.
        CapacityError: the request exceeds the model's context.
        CheckpointError: the checkpoint cannot be read.
    """
    if runs < 1:
        raise ConfigError(f"runs must be at least 1, got {runs}")
    config = read_config(locate(request.model))[2]
    if request.capacity > config.context:
        raise CapacityError(
            f"tokens + steps must be at most the model's context={config.context}, "
            f"got {request.tokens} + {request.steps}"
        )
    systems: list[tuple[dict[str, Any], Callable[[], Answer]]] = []
    for name, policy in policies:
        for fetch in dict.fromkeys(mode_of(request, config, policy, fetch) for fetch in fetches):
            row = {"setting": name} | costs(request, config, policy, fetch)
            if row not in [other for other, _ in systems]:
                systems.append((row, functools.partial(answer_jshadow, request, policy, fetch)))
    # torch runs on the CPU here, so it is left out if JAX runs on a GPU.
    if peers and importlib.util.find_spec("torch") is not None and jax.default_backend() == "cpu":
        none = dict.fromkeys(("bytes_read", "bytes_fetched", "bytes_moved", "flops", "prefill_flops", "fallback"))
        systems += [
            (
                {"setting": f"transformers {cache}", "policy": "transformers", "fetch": None, **none},
                functools.partial(answer_transformers, request, cache),
            )
            for cache in CACHES
        ]
    answers: list[list[Answer]] = [[] for _ in systems]
    errors: list[str | None] = [None] * len(systems)
    for _ in range(runs):
        for index, (row, run) in enumerate(systems):
            if errors[index] is None:
                if progress is not None:
                    progress(label(row))
                try:
                    answers[index].append(in_own_process(run))
                except Exception as error:  # the measurements of the other systems are kept
                    errors[index] = f"{type(error).__name__}: {error}".splitlines()[0]
    return [summary(request, *one) for one in zip([row for row, _ in systems], answers, errors, strict=True)]


def label(row: dict[str, Any]) -> str:
    """Return a short name of a row's system."""
    return str(row["setting"]) + (f", {row['fetch']}" if row["fetch"] else "")


def mode_of(request: Request, config: ModelConfig, policy: Policy, fetch: str) -> str:
    """Return the fetch mode that a setting stands for on this machine, before the weights are loaded."""
    new = request.capacity - request.tokens
    workload = Workload(request.tokens, new, request.batch, request.dtype, fetch)
    weights = Planner(config, config, ANY_GPU, workload).weights_bytes
    return fetch_here(config, policy, workload, loading=weights).fetch


def costs(request: Request, config: ModelConfig, policy: Policy, fetch: str) -> dict[str, Any]:
    """Return the entries of a row that are known before the run: names, bytes and operations."""
    new = request.capacity - request.tokens
    serving = Workload(request.tokens, new, dtype=request.dtype, fetch=fetch, repeat_share=0.0)
    planner = Planner(config, config, ANY_GPU, serving)
    resolved = policy.resolve(config, request.capacity)
    fallback = why_dense(resolved, config, request.capacity)
    step = planner.step(resolved, request.batch, passes=False)
    offloads = any(spec.policy.host_layout(spec) is not None for spec in planner.specs(resolved, request.batch))
    read = sum(step.hbm_bytes.values())
    table = config.vocab_size * config.model_dim * (1 if config.tie_embeddings else 2)
    numbers = planner.weights_bytes // planner.item - table
    # Each token is multiplied by each weight, and attends to half of the prompt on average.
    prefill = 2 * request.tokens * (numbers + config.num_layers * request.tokens * config.q_heads * config.head_dim)
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


def summary(request: Request, row: dict[str, Any], answers: list[Answer], error: str | None) -> dict[str, Any]:
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
