"""Timing, and the best rates of a machine: its ceilings."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.engine.step import COMPILER_OPTIONS

# Bytes and side of the arrays behind `ceilings`: starting a program must be nothing beside running it.
ON_CPU, ON_GPU = (2**29, 2048), (2**32, 8192)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call: the median of several, the least and the most, and of compiling it."""

    median: float
    least: float
    most: float
    compile: float = 0.0


def measure(call: Callable[[], Any], repeats: int, compile_seconds: float = 0.0) -> Times:
    """Time a call that waits for its own result, after one that does not count."""
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
    """The function compiled for these arguments, and the seconds that took."""
    start = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=donate, compiler_options=COMPILER_OPTIONS)
    program = jitted.lower(*args).compile()
    return program, time.perf_counter() - start


def timed(function: Callable[..., Any], *args: Any, repeats: int) -> Times:
    """Times of a function of arrays, compiled."""
    program, seconds = compiled(function, *args)
    return measure(lambda: jax.block_until_ready(program(*args)), repeats, seconds)


# Ceilings


def ceilings(repeats: int = 10, copy_bytes: int | None = None, side: int | None = None) -> dict[str, float]:
    """What this machine does at best: bytes a second read and copied, operations a second in products.

    On an accelerator also bytes a second from pinned host memory to the device and back. Numbers are random: products
    of constant ones run faster than real ones.

    Args:
        repeats: timed calls, of which the fastest counts.
        copy_bytes: of the array that is read and copied; None: 512 MiB on a CPU, else 4 GiB.
        side: of the square matrices; None: 2,048 on a CPU, else 8,192.

    Returns:
        {"read", "copy" (read and written bytes together), "matmul_float32", "matmul_bfloat16"}, and
        {"host_to_device", "device_to_host"} where there is a device apart.
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
            rates[name] = copy_bytes / measure(functools.partial(move, source, target), repeats).least
    return rates


def move(x: Array, target: Any) -> None:
    """Copy x to another memory, and wait."""
    jax.block_until_ready(jax.device_put(x, target))
