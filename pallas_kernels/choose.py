"""The choice of an op's implementation, and helpers for host memory.

An op has four implementations:

- "xla": the reference in plain jax.numpy.
- "pallas": the kernel for CUDA.
- "interpret": the same kernel run by JAX's interpreter, on any machine.
- "auto": decided when the program is lowered. The kernel for CUDA; the reference for every other platform, and where
  the kernel cannot do what is asked for.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import compute_on

IMPLEMENTATIONS = ("auto", "xla", "pallas", "interpret")
Space = jax.memory.Space


def run(implementation: str, kernel: Callable[..., Any], reference: Callable[..., Any], *operands: Any) -> Any:
    """Run an op by one of its implementations.

    Args:
        implementation: one of IMPLEMENTATIONS.
        kernel: called with the operands and `interpret`; raises NotImplementedError for what it cannot do.
        reference: called with the operands.
        operands: pytrees of arrays.

    Returns:
        What the implementation returns.

    Raises:
        ValueError: the implementation does not exist.
        NotImplementedError: the kernel was asked for by name and cannot do this.
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
        # Both are traced, one is lowered: a program traced on a machine without a GPU may be lowered for one.
        return lax.platform_dependent(*operands, cuda=compiled, default=reference)
    except NotImplementedError:
        return reference(*operands)


def in_host_memory(x: jax.Array) -> bool:
    """Whether x, traced or not, lies in pinned host memory."""
    return jax.typeof(x).memory_space == Space.Host


def on_device(x: jax.Array) -> jax.Array:
    """x in device memory. If it lies in host memory, all of it is copied."""
    return jax.device_put(x, Space.Device) if in_host_memory(x) else x


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function run on the host, on arrays in host memory. Its results stay there.

    JAX 0.11 renamed compute_on2 to compute_on.
    """
    wrap: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    return wrap(function, compute_type="device_host", out_memory_spaces=Space.Host)
