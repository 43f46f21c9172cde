"""Estimates of the operations and bytes of a kernel, for XLA's scheduler and for `make aot`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def bytes_of(tree: Any) -> int:
    """Return the bytes of all arrays or ShapeDtypeStructs in a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def estimate(*, flops: int, moved: int, exponentials: int = 0, host: int = 0) -> pl.CostEstimate:
    """Return the cost estimate to pass to `pl.pallas_call`.

    Args:
        flops: number of multiplications and additions.
        moved: bytes of device memory that are read or written. Each array counts once.
        exponentials: number of evaluations of exponentials, sines and similar functions.
        host: bytes of host memory that are read.
    """
    return pl.CostEstimate(
        flops=flops, transcendentals=exponentials, bytes_accessed=moved, remote_bytes_transferred=host
    )
