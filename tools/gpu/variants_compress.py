"""Variants of the compression of a prompt, measured beside each other on one GPU.

    PYTHONPATH=.:tools:tests/support python3 -m gpu.variants_compress

It compares the basis of keys with that of 16 iterations, larger library calls, one batch for the bases of several
layers, and CUDA graphs for its loop. It compares the whole compression of a layer with that in blocks of fewer tokens.
The results of all variants are compared with a reference on the same GPU. Each task writes its results to a JSON file
at once. --dry-run runs tiny sizes.

A program is timed in two ways. "alone": calls one after the other, so that the host may be slower than the GPU.
"behind": one call while the GPU still works on something else for long, as in a prefill, so that the host is ahead. It
is the time that the call adds to that of the other work.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from aot.models import LLAMA
from jax import lax

from gpu.environment import machine
from gpu.runner import Runner, Task, attempt
from gpu.sizes import DRY, REAL
from gpu.synthetic import drawn, free, on_device
from gpu.timing import series, side_by_side
from jshadow.cache.records import PromptKV
from jshadow.engine.prefill.layer import compress_layer
from jshadow.planner.bytes import on_backend
from jshadow.planner.machine import abstract_state
from jshadow.policies.shadowkv import landmarks
from jshadow.policies.shadowkv.key_codecs import lowrank, transform
from jshadow.policies.shadowkv.key_codecs.base import KeyCode

WORKERS = 16
Way = dict[str, int]  # constants of the module `basis` that a variant replaces
NEW: Way = {}
OLD: Way = {"ITERATIONS": 16, "MULTIPLE": 1}
# Each group is compiled, timed and written before the next one.
BASES: tuple[dict[str, tuple[Way, int, dict[str, Any]]], ...] = (
    {
        "old": (OLD, 1, {}),
        "new": (NEW, 1, {}),
        "leaf 256": ({"LEAF": 256}, 1, {}),
        "leaf 512": ({"LEAF": 512}, 1, {}),
        "batch 8": (NEW, 8, {}),
        "batch 8, leaf 256": ({"LEAF": 256}, 8, {}),
        "batch 8, leaf 512": ({"LEAF": 512}, 8, {}),
    },
    {
        "columns as they are": ({"MULTIPLE": 1}, 1, {}),
        "loops in graphs": (NEW, 1, {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE"}),
        "no graphs": (NEW, 1, {"xla_gpu_enable_command_buffer": ""}),
        "batch 32": (NEW, 32, {}),
    },
)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of a run.

    Attributes:
        dry: whether its figures mean nothing.
        config: the model; one of its layers is compressed.
        policies: settings of ShadowKV by name.
        width: number of key columns of the Gram matrices.
        count: number of columns of a basis.
        prompts: tokens of the prompts.
        calls: number of calls of a series.
        repeats: number of series.
        busy: side of the matrices of the work that keeps the GPU busy, and the number of its products.
    """

    dry: bool
    config: Any
    policies: dict[str, Any]
    width: int
    count: int
    prompts: tuple[int, int]
    calls: int
    repeats: int
    busy: tuple[int, int]


REAL_SHAPES = Shapes(False, LLAMA, REAL.policies, 1024, 432, (30_720, 122_880), 4, 7, (8192, 24))
DRY_SHAPES = Shapes(True, DRY.config, DRY.policies, 96, 40, (512, 1024), 2, 2, (64, 2))


# Compiling and timing


def built(function: Any, *args: Any, options: dict[str, Any] | None = None) -> Callable[[], Any]:
    """Trace a function, and return what compiles it. Only tracing needs the patches of the caller."""
    lowered = jax.jit(function).lower(*args)
    return lambda: lowered.compile(compiler_options=options or None)


def compiled(jobs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Compile all programs in threads. A program that does not compile is an {"error": ...}."""
    start = time.perf_counter()
    found = side_by_side({name: functools.partial(attempt, job) for name, job in jobs.items()}, WORKERS)
    print(f"compiled {len(jobs)} programs in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return {name: future.result() for name, future in found.items()}


def spread_of(seconds: list[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum in milliseconds."""
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "least_ms": 1e3 * min(seconds),
        "most_ms": 1e3 * max(seconds),
    }


class Timer:
    """Times programs alone, and behind other work of the GPU."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        side, count = shapes.busy
        self.matrix = drawn(0, side**-0.5, shape=(side, side), dtype="bfloat16")
        self.busy = jax.jit(lambda x: lax.fori_loop(0, count, lambda _, y: y @ x, x)).lower(self.matrix).compile()

    def both(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Return the times of a program alone and behind other work."""
        shapes = self.shapes
        found = series(run, shapes.calls, shapes.repeats)
        row = {"median_ms": 1e3 * found.median, "least_ms": 1e3 * found.least, "most_ms": 1e3 * found.most}
        return {"alone": row, "behind": self.behind(run)}

    def behind(self, run: Callable[[], Any]) -> dict[str, float]:
        """Return what a program adds to the time of other work that was dispatched before it."""

        def once(more: bool) -> float:
            start = time.perf_counter()
            made = self.busy(self.matrix)
            if more:
                made = made, run()
            jax.block_until_ready(made)
            return time.perf_counter() - start

        once(True)
        alone = statistics.median(once(False) for _ in range(self.shapes.repeats))
        return spread_of([once(True) - alone for _ in range(self.shapes.repeats)])


def looped(call: Callable[[Any], Any], q: Any, count: int) -> Callable[[Any], Any]:
    """Return a function of q that runs `call` several times on the GPU, each after the one before it.

    The host then takes no part in the time. `call` returns a pytree, of which the first leaf has floats.
    """

    def step(index: Any, total: Any) -> Any:
        first = jax.tree.leaves(call((q_of[0] + 1e-6 * total).astype(q.dtype)))[0]
        return total * 0.5 + first.ravel()[:1].sum() * 0.5

    q_of: list[Any] = []

    def run(q: Any) -> Any:
        q_of[:] = [q]
        return lax.fori_loop(0, count, step, jnp.float32(0))

    return run


# The basis


def grams(shapes: Shapes, count: int) -> np.ndarray:
    """Return Gram matrices float32 [count, m, m] of keys whose variances fall as those of a model's keys."""
    rng, width = np.random.default_rng(1), shapes.width
    number = np.arange(1, width + 1)
    found = []
    for index in range(count):
        turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
        variance = number ** -(0.9 + 0.05 * index) * np.exp(-3 * number / width)
        found.append((turn * variance) @ turn.T)
    return np.asarray(found, np.float32)


def quality(gram: np.ndarray, columns: np.ndarray, least: float) -> dict[str, float]:
    """Return the lost variance in that of the best basis, and the largest error of the products of the columns."""
    gram, columns = gram.astype(np.float64), columns.astype(np.float64)
    inner = columns.T @ columns
    kept = np.trace(np.linalg.solve(inner, columns.T @ gram @ columns))
    return {
        "lost": (np.trace(gram) - kept) / least,
        "orthogonal": float(np.abs(inner - np.eye(len(inner))).max()),
    }


def bases(shapes: Shapes, timer: Timer, group: int) -> dict[str, Any]:
    """Measure the bases of one group of BASES."""
    settings = BASES[group]
    if shapes.dry:
        settings = {name: one for name, one in settings.items() if one[1] < 32}
    eight = grams(shapes, 2 if shapes.dry else 8)
    least = np.linalg.eigvalsh(eight[0].astype(np.float64))[: shapes.width - shapes.count].sum()

    def batch_of(size: int) -> Any:
        return jnp.asarray(np.resize(eight, (size, shapes.width, shapes.width)))

    def job(way: Way, size: int, options: dict[str, Any]) -> Callable[[], Any]:
        with settings_of(way, 0):
            return built(functools.partial(lowrank.iterated, count=shapes.count), batch_of(size), options=options)

    programs = compiled({name: job(*one) for name, one in settings.items()})
    rows: dict[str, Any] = {}
    for name, (way, size, _) in settings.items():
        program, given = programs[name], batch_of(size)
        if isinstance(program, dict):
            rows[name] = program
            continue

        def measured(program: Any = program, given: Any = given) -> dict[str, Any]:
            first = np.asarray(program(given)[0])
            return timer.both(lambda: program(given)) | quality(eight[0], first, least)

        rows[name] = {"way": way, "batch": size} | attempt(measured)
        free(given)
    return {"width": shapes.width, "count": shapes.count, "rows": rows} | verdict(rows)


def verdict(rows: dict[str, Any]) -> dict[str, Any]:
    """Return whether each basis that was measured loses at most 3 % more than the best one, and is orthogonal."""
    bad = [name for name, row in rows.items() if row.get("lost", 1.0) > 1.03 or row.get("orthogonal", 0.0) > 1e-5]
    return {"ok": not bad, "bad": bad}


# The whole compression


def prompt_of(shapes: Shapes, tokens: int, batch: int, policy: Any) -> PromptKV:
    """Return the keys, values and last queries of prompts. The variances of the keys fall."""
    config, width = shapes.config, shapes.config.key_columns
    shape = (batch, tokens, config.kv_heads, config.head_dim)
    turn = drawn(5, width**-0.5, shape=(width, width), dtype="float32")
    turn = (jnp.arange(1, width + 1)[:, None] ** -0.5 * turn).astype("bfloat16")
    keys = jax.jit(lambda x, turn: (x.reshape(batch, tokens, width) @ turn).reshape(shape))
    k_pre = keys(on_device(1, 1.0, shape), turn)
    tail = policy.reads.last_queries
    return PromptKV(
        k_pre=k_pre,
        k_post=k_pre,
        v=on_device(2, 1.0, shape),
        lengths=jnp.full(batch, tokens, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens)),
        q_tail=on_device(3, 1.0, (batch, tail, config.q_heads, config.head_dim)) if tail else None,
    )


@contextlib.contextmanager
def settings_of(way: Way, block: int) -> Iterator[None]:
    """Return a context in which the compression is traced with other constants, and with blocks of `block` tokens.

    A block of 0 tokens stands for the usual ones.
    """
    with contextlib.ExitStack() as stack:
        for name, value in way.items():
            stack.enter_context(mock.patch.object(lowrank, name, value))
        for module in (transform, lowrank) if block else ():
            stack.enter_context(mock.patch.object(module, "BLOCK", block))
        for name in ("prompt_landmarks", "prompt_spread") if block else ():
            bound = functools.partial(getattr(landmarks, name), block=block)
            stack.enter_context(mock.patch(f"jshadow.policies.shadowkv.policy.{name}", bound))
        yield


def layer_spec(shapes: Shapes, policy: Any, tokens: int, batch: int) -> Any:
    """Return the spec of a layer with these rows."""
    state = abstract_state(
        dataclasses.replace(shapes.config, num_layers=1),
        policy,
        batch=batch,
        capacity=tokens + 64,
        prompt=tokens,
        dtype="bfloat16",
        fetch="resident",
    )
    return dataclasses.replace(on_backend(state.specs, "gpu")[0], layer=None)


def coded_error(policy: Any, state: Any, prompt: PromptKV) -> Any:
    """Return the squared error of the first row's rebuilt keys, relative to their squares."""
    frozen = jax.tree.map(lambda x: x[:1], KeyCode(state.frozen.left, state.frozen.right))
    units = frozen.left.shape[-2]
    heads, size = prompt.k_pre.shape[2], policy.chunk_size
    units = min(units, prompt.k_pre.shape[1] // size, 512)
    ids = jnp.broadcast_to(jnp.arange(units, dtype=jnp.int32), (1, heads, units))
    keys = prompt.k_pre[:1, : units * size].astype(jnp.float32).swapaxes(1, 2)
    rebuilt = policy.codec.decode(frozen, ids, size).reshape(keys.shape)
    return ((rebuilt - keys) ** 2).sum() / (keys**2).sum()


def compressions(shapes: Shapes, timer: Timer, tokens: int, names: dict[str, tuple[str, Any, int, int]]) -> Any:
    """Measure the compression of one layer. `names` maps a name to (policy, way, block, batch)."""
    jobs, given, specs = {}, {}, {}
    for name, (code, way, block, batch) in names.items():
        spec = layer_spec(shapes, shapes.policies[code], tokens, batch)
        key = batch, spec.policy.reads.last_queries
        if key not in given:
            given[key] = prompt_of(shapes, tokens, batch, spec.policy)
        with settings_of(way, block):
            function = functools.partial(compress_layer.__wrapped__, fitted=None, spec=spec)  # type: ignore[attr-defined]
            jobs[name] = built(lambda prompt, run=function: run(prompt), given[key])
        specs[name] = spec, given[key]
    programs, rows = compiled(jobs), {}
    for name, (code, _, block, batch) in names.items():
        program, (spec, prompt) = programs[name], specs[name]
        if isinstance(program, dict):
            rows[name] = program
            continue

        def measured(program: Any = program, spec: Any = spec, prompt: Any = prompt) -> dict[str, Any]:
            state, _ = program(prompt)
            error = float(jax.jit(functools.partial(coded_error, spec.policy))(state, prompt))
            return timer.both(lambda: program(prompt)) | {"coded_error": error}

        rows[name] = {"policy": code, "block": block, "batch": batch} | attempt(measured)
    free(given)
    found = [row for row in rows.values() if "coded_error" in row]
    firsts = {row["policy"]: row["coded_error"] for row in reversed(found)}
    good = all(row["coded_error"] <= 1.03 * firsts[row["policy"]] for row in found)
    return {"tokens": tokens, "rows": rows, "ok": good and bool(found)}


# The run


def tasks(shapes: Shapes) -> Iterator[Task]:
    """Yield all tasks, the most important first."""
    timer = Timer(shapes)
    short, long = shapes.prompts
    need = 0 if shapes.dry else 8
    small = {
        "old": ("packed small", OLD, 2048, 1),
        "new": ("packed small", NEW, 0, 1),
        "new basis, old blocks": ("packed small", NEW, 2048, 1),
        "batch 8": ("packed small", NEW, 0, 8),
        "packed": ("packed", NEW, 0, 1),
        "paper": ("paper", NEW, 0, 1),
    }
    at_length = {"old": small["old"], "new": small["new"]}
    yield Task("bases 1", need, functools.partial(bases, shapes, timer, 0))
    yield Task(f"compress, {short:,}", need, functools.partial(compressions, shapes, timer, short, small))
    yield Task(f"compress, {long:,}", need, functools.partial(compressions, shapes, timer, long, at_length))
    yield Task("bases 2", need, functools.partial(bases, shapes, timer, 1))


def main(given: list[str] | None = None) -> int:
    """Run all tasks within --seconds. Returns the exit status of `Runner.run`, or 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="gpu.variants_compress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on any backend; its figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=170, help="time of the run (default: %(default)s)")
    parser.add_argument("--only", default="", help="only tasks whose name begins with one of these, as a comma list")
    args = parser.parse_args(given)
    names = tuple(args.only.split(","))
    shapes = DRY_SHAPES if args.dry_run else REAL_SHAPES
    if not args.dry_run and jax.default_backend() != "gpu":
        print("no GPU here; --dry-run runs tiny sizes on any backend", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"dry_run": args.dry_run, "machine": machine(0)}
    runner = Runner(args.out / "variants_compress.json", about, args.seconds)
    timer = runner.watch(8.0)
    status = runner.run({"variants": lambda: (task for task in tasks(shapes) if task.name.startswith(names))})
    timer.cancel()
    sys.stdout.flush()
    os._exit(status)  # a normal exit of JAX could hang on a broken device


if __name__ == "__main__":
    sys.exit(main())
