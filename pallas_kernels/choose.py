"""Choosing the implementation of an op, and helpers for arrays in host memory.

The argument `implementation` of every op has four values:

- "xla": the reference in plain jax.numpy.
- "pallas": the kernel for CUDA.
- "interpret": the same kernel run by JAX's interpreter, on any machine.
- "auto": decided when the program is lowered. CUDA gets the kernel, and every other platform gets the reference. If the
  kernel does not support the arguments, CUDA also gets the reference.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.compute_on import compute_on

IMPLEMENTATIONS = ("auto", "xla", "pallas", "interpret")
Space = jax.memory.Space


def run(implementation: str, kernel: Callable[..., Any], reference: Callable[..., Any], *operands: Any) -> Any:
    """Run one implementation of an op.

    Args:
        implementation: one of IMPLEMENTATIONS.
        kernel: called with the operands and `interpret`. It raises NotImplementedError for unsupported operands.
        reference: called with the operands.
        operands: pytrees of arrays.

    Returns:
        The result of the implementation.

    Raises:
        ValueError: the implementation does not exist.
        NotImplementedError: `implementation` is "pallas" or "interpret", and the kernel does not support the operands.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation == "xla":
        return reference(*operands)
    if implementation == "interpret":
        return kernel(*jax.tree.map(on_device, operands), interpret=True)
    if implementation == "pallas":
        return kernel(*operands, interpret=False)

    def compiled(*operands: Any) -> Any:
        return kernel(*operands, interpret=False)

    try:
        # Both are traced, but only one is lowered. So a program traced without a GPU can be lowered for one.
        return lax.platform_dependent(*operands, cuda=compiled, default=reference)
    except NotImplementedError:
        return reference(*operands)


def in_host_memory(x: jax.Array) -> bool:
    """Whether x lies in pinned host memory. x may be a tracer."""
    return jax.typeof(x).memory_space == Space.Host


def on_device(x: jax.Array) -> jax.Array:
    """Return x in device memory. If it is in host memory, the whole array is copied."""
    return jax.device_put(x, Space.Device) if in_host_memory(x) else x


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs on the host. Its arguments must lie in host memory, and so do its results."""
    return compute_on(function, compute_type="device_host", out_memory_spaces=Space.Host)
