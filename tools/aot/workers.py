"""Several processes that compile at once.

XLA's GPU compiler compiles one kernel after the other, so one process uses one core.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any


@contextlib.contextmanager
def spread(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Return a context with a `map` whose calls run in `jobs` processes and whose results come in order.

    The calls of several maps run at once, in the order of the maps. After an error, calls that wait are given up.

    Args:
        jobs: number of processes, at least 1. With 1, the calls run in this process, one when its result is asked for.
    """
    if jobs == 1:
        yield map
        return
    # XLA has threads, so a process is started afresh and not forked.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
