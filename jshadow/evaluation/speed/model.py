"""Whole requests on a real checkpoint: prefill and decode, each system in a process of its own, in turn."""

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

from jshadow.cache.offload import resolve_fetch
from jshadow.errors import CapacityError, ConfigError
from jshadow.evaluation.speed.peers import CACHES, answer_transformers
from jshadow.evaluation.speed.request import Answer, Request
from jshadow.models.config import ModelConfig
from jshadow.planner.gpu import Planner
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import Gpu
from jshadow.policies import Policy
from jshadow.policies.base import why_dense
from jshadow.weights.convert.huggingface import locate, read_config

ANY_GPU = Gpu("any", 1, 1.0, 1.0, 1.0)  # of its plan only the bytes and operations are read, which no rate changes


def bench_model(
    request: Request,
    policies: Sequence[tuple[str, Policy]],
    fetches: Sequence[str] = ("auto",),
    *,
    runs: int = 3,
    peers: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Every policy in every fetch mode, and transformers beside them on a CPU where torch is installed.

    Each run is a new process that answers the request twice: the first answer compiles and warms up, the second
    counts. The systems take turns.

    Args:
        request: the work.
        policies: of this library, each with a name for its rows.
        fetches: their fetch modes; a policy that offloads nothing runs in the first only.
        runs: processes of each system.
        peers: whether to run transformers.
        progress: called with the name of a system before each of its runs.

    Returns:
        A row a system: setting (its name), policy, fetch, context, batch, dtype; prefill_seconds, prefill_least,
        prefill_most; step_seconds (the mean decode step of a run), least, most: medians and ranges over the runs;
        tokens_per_second; compile_seconds (of the first run); bytes_device and bytes_host of keys and values;
        bytes_read, bytes_fetched, bytes_moved and flops of one decode step, and prefill_flops (None for peers);
        fallback (why a policy ran as a dense cache, or None); error (why a system has no figures, or None).

    Raises:
        ConfigError, CapacityError, CheckpointError: before anything is timed.
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
        for fetch in dict.fromkeys(map(resolve_fetch, fetches)):
            row = {"setting": name} | costs(request, config, policy, fetch)
            if row not in [other for other, _ in systems]:
                systems.append((row, functools.partial(answer_jshadow, request, policy, fetch)))
    # torch is measured on the CPU, which is no peer of a GPU.
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
                except Exception as error:  # what others took minutes to measure is not thrown away
                    errors[index] = f"{type(error).__name__}: {error}".splitlines()[0]
    return [summary(request, *one) for one in zip([row for row, _ in systems], answers, errors, strict=True)]


def label(row: dict[str, Any]) -> str:
    """A row's system in a word or two."""
    return str(row["setting"]) + (f", {row['fetch']}" if row["fetch"] else "")


def costs(request: Request, config: ModelConfig, policy: Policy, fetch: str) -> dict[str, Any]:
    """What is known of a system before it runs: its name, and what a decode step of it must move and compute."""
    new = request.capacity - request.tokens
    serving = Serving(request.tokens, new, dtype=request.dtype, fetch=fetch, repeat_share=0.0)
    planner = Planner(config, config, ANY_GPU, serving)
    resolved = policy.resolve(config, request.capacity)
    fallback = why_dense(resolved, config, request.capacity)
    step = planner.step(resolved, request.batch)
    offloads = any(spec.policy.host_layout(spec) is not None for spec in planner.specs(resolved, request.batch))
    read = sum(step.hbm_bytes.values())
    table = config.vocab_size * config.model_dim * (1 if config.tie_embeddings else 2)
    numbers = planner.weights_bytes // planner.item - table
    # Each token meets each weight, and half of the tokens before it on average.
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
    """run() in a new process, so that no system works in another's memory, threads or caches."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(run).result()


def answer_jshadow(request: Request, policy: Policy, fetch: str) -> Answer:
    """Prefill and greedy steps, one compiled program a step; the second of two answers."""
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
    """A system's row, of all its runs."""
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
