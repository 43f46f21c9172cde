"""Timing of functions, and the peak rates of a machine."""

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

# (bytes of the copied array, side of the matrices) of `ceilings`. They are so large that the start of a program takes
# hardly any of its time.
ON_CPU, ON_GPU = (2**29, 2048), (2**32, 8192)


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds that one call takes, over several repeats.

    Attributes:
        median: the median.
        least: the minimum.
        most: the maximum.
        compile: seconds of compilation.
    """

    median: float
    least: float
    most: float
    compile: float = 0.0


def measure(call: Callable[[], Any], repeats: int, compile_seconds: float = 0.0) -> Times:
    """Time a call that waits for its result. One call before the repeats warms up.

    `compile_seconds` is copied to the result.
    """
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
    """Compile a function for these arguments. Returns the compiled function and the seconds of compilation."""
    start = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=donate, compiler_options=COMPILER_OPTIONS)
    program = jitted.lower(*args).compile()
    return program, time.perf_counter() - start


def timed(function: Callable[..., Any], *args: Any, repeats: int) -> Times:
    """Compile a function of arrays and time it."""
    program, seconds = compiled(function, *args)
    return measure(lambda: jax.block_until_ready(program(*args)), repeats, seconds)


# Peak rates


def ceilings(repeats: int = 10, copy_bytes: int | None = None, side: int | None = None) -> dict[str, float]:
    """Measure the peak rates of this machine: memory bandwidth, matrix products, and on an accelerator the bus.

    The numbers are random, because products of constant numbers run faster than those of real data.

    Args:
        repeats: number of timed calls. Each rate is that of the fastest call.
        copy_bytes: bytes of the array that is read and copied. None means 512 MiB on a CPU, else 4 GiB.
        side: side of the square matrices. None means 2,048 on a CPU, else 8,192.

    Returns:
        Bytes per second: "read", "copy" (bytes read plus bytes written), and on an accelerator "host_to_device" and
        "device_to_host" for pinned host memory. Operations per second: "matmul_float32" and "matmul_bfloat16".
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
    """Copy x to another memory, and wait for it."""
    jax.block_until_ready(jax.device_put(x, target))
