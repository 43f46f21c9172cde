"""Compiling apart from timing, several programs at once, and times of calls that follow each other."""

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jshadow.engine.step import COMPILER_OPTIONS


class Built(NamedTuple):
    """A compiled program, and the seconds of tracing and compiling it (beside others, where they were several)."""

    program: Any
    seconds: float


def build(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), unused: bool = False) -> Built:
    """The program of function(*args), args arrays or ShapeDtypeStructs; unused: it also takes what it does not use."""
    start = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=donate, keep_unused=unused, compiler_options=COMPILER_OPTIONS)
    return Built(jitted.lower(*args).compile(), time.perf_counter() - start)


def side_by_side(jobs: Mapping[Any, Callable[[], Any]], workers: int) -> dict[Any, Future]:
    """All jobs done, by some threads: XLA compiles without Python's lock. Each future holds a result or an error."""
    with ThreadPoolExecutor(workers) as pool:
        return {key: pool.submit(job) for key, job in jobs.items()}


class Seconds(NamedTuple):
    """Of one call: the median of several series, the least and the most."""

    median: float
    least: float
    most: float


def series(calls: Callable[[], Any], count: int, repeats: int) -> Seconds:
    """Time `count` calls that are dispatched one after another and waited for together, per call.

    The first series does not count.
    """

    def once() -> float:
        start = time.perf_counter()
        # Results of earlier calls are dropped as they go, or they would fill the device.
        for _ in range(count):
            last = calls()
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / count

    once()
    found = [once() for _ in range(repeats)]
    return Seconds(statistics.median(found), min(found), max(found))
