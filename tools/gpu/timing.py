"""Compiling programs, also several in parallel, and timing series of calls."""

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jshadow.engine.step import COMPILER_OPTIONS


class Built(NamedTuple):
    """A compiled program, and the seconds of tracing and compiling it.

    If several programs are compiled in parallel, the seconds include waiting for the others.
    """

    program: Any
    seconds: float


def build(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), unused: bool = False) -> Built:
    """Compile function(*args). The args are arrays or ShapeDtypeStructs. `unused` keeps arguments that are not used."""
    start = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=donate, keep_unused=unused, compiler_options=COMPILER_OPTIONS)
    return Built(jitted.lower(*args).compile(), time.perf_counter() - start)


def side_by_side(jobs: Mapping[Any, Callable[[], Any]], workers: int) -> dict[Any, Future]:
    """Run all jobs in threads and wait for them. XLA compiles without holding Python's lock.

    Returns:
        One finished future for each job, with its result or its error.
    """
    with ThreadPoolExecutor(workers) as pool:
        return {key: pool.submit(job) for key, job in jobs.items()}


class Seconds(NamedTuple):
    """Seconds of one call: median, minimum and maximum over several series."""

    median: float
    least: float
    most: float


def series(calls: Callable[[], Any], count: int, repeats: int) -> Seconds:
    """Time series of `count` calls that are dispatched one after another and waited for together.

    The result is the time of one call. The first series warms up and does not count.
    """

    def once() -> float:
        start = time.perf_counter()
        # Only the last result is kept. Otherwise the results would fill the device.
        for _ in range(count):
            last = calls()
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / count

    once()
    found = [once() for _ in range(repeats)]
    return Seconds(statistics.median(found), min(found), max(found))
