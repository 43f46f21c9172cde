"""A process with several CPU devices, in which tests call functions. This process keeps its one device."""

import atexit
import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# XLA's CPU client may run independent collectives at once. They then take all of its threads, and none finishes. With
# the second flag it runs them in the order of the program. It has a thread for each device. The tests use half of the
# devices, so that threads are left for an operation that waits for others.
FLAGS = "--xla_force_host_platform_device_count={} --xla_cpu_enable_concurrency_optimized_scheduler=false"
MOST_MAPPINGS = 30_000  # of the 65,530 that a process may have; each compiled program takes some


def called(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function. Then drop compiled programs before the process runs out of mappings."""
    result = function(*args)
    if Path("/proc/self/maps").read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
    return result


class DeviceProcess:
    """A process with twice a number of CPU devices. It starts with the first call."""

    def __init__(self, devices: int = 4) -> None:
        self.flags = FLAGS.format(2 * devices)
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function of an importable module, or raise its error."""
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = concurrent.futures.ProcessPoolExecutor(1, context)
            atexit.register(self.pool.shutdown)
            before = os.environ.get("XLA_FLAGS")
            os.environ["XLA_FLAGS"] = f"{before or ''} {self.flags}"
            try:
                return self.pool.submit(called, function, *args).result()
            finally:
                del os.environ["XLA_FLAGS"]
                if before is not None:
                    os.environ["XLA_FLAGS"] = before
        return self.pool.submit(called, function, *args).result()


FOUR = DeviceProcess()
