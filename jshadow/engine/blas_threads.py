"""A limit on the number of threads that LAPACK uses while a prompt is compressed."""

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import threadpoolctl

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
