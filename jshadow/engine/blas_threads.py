"""How many threads LAPACK may use while a prompt is compressed."""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import threadpoolctl

LIMITING = threading.Lock()  # held by the prefill that limits BLAS


@contextlib.contextmanager
def one_blas_thread() -> Iterator[list[Any]]:
    """On a CPU, keep LAPACK to one thread until the arrays that are appended to the yielded list are computed.

    OpenBLAS computes the eigenvectors of the compression. Its threads spin between calls and take the cores from XLA's
    threads, which made prefill a fifth slower. The limit holds for the whole process: when several prefills run at
    once, only the first sets and lifts it. A prefill in another thread may therefore run without it.
    """
    results: list[Any] = []
    if jax.default_backend() != "cpu" or not LIMITING.acquire(blocking=False):
        yield results
        return
    try:
        # JAX would load this itself, but later, and threadpoolctl limits only what is loaded.
        importlib.import_module("scipy.linalg.cython_lapack")
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            yield results
            jax.block_until_ready(results)
    finally:
        LIMITING.release()
