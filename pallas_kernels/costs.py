"""What a kernel computes and moves, as `pl.CostEstimate`: XLA's scheduler and `make aot` read it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def bytes_of(tree: Any) -> int:
    """Return the bytes of all arrays, or ShapeDtypeStructs, of a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def estimate(*, flops: int, moved: int, exponentials: int = 0, host: int = 0) -> pl.CostEstimate:
    """Return a cost estimate.

    Args:
        flops: multiplications and additions.
        moved: bytes of device memory that are read or written; each array counts once.
        exponentials: exponentials, sines and other functions.
        host: bytes of host memory that are read.
    """
    return pl.CostEstimate(
        flops=flops, transcendentals=exponentials, bytes_accessed=moved, remote_bytes_transferred=host
    )
