"""Keys of chosen chunks, rebuilt from low-rank factors and rotated to where they stand."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.reconstruct_keys import pallas, reference
from pallas_kernels.reconstruct_keys.factors import Factors, check


def reconstruct_keys(
    left: jax.Array, right: jax.Array, ids: jax.Array, inverse: jax.Array, *,
    tail: jax.Array | None = None, tail_unit: jax.Array | None = None, implementation: str = "auto",
) -> jax.Array:  # fmt: skip
    """Rows of left at the chunks, times right, rotated by RoPE at the positions chunk * c + j.

    The chunk size is c = left.shape[2] // r. Sums are float32. RoPE has the half-split layout; head columns from rot on
    pass unrotated.

    Args:
        left: [B, U, c * r], one chunk contiguous.
        right: [B, h_kv, r, d].
        ids: int32 [B, h_kv, k], clipped to 0 .. U - 1, or to 0 .. U + W - 1 with a tail.
        inverse: angle per position of each rotated pair, float32 [rot / 2], rot at most d.
        tail: left rows of later chunks [B, W, c * r]: id U + w means its row w, which is chunk tail_unit + w.
        tail_unit: int32 [B].
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        [B, h_kv, k * c, d] in left's dtype.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    factors = Factors(left, right, ids, inverse, tail, tail_unit)
    check(factors)
    if ids.shape[2] == 0:
        return jnp.zeros(factors.out_shape, left.dtype)
    return run(implementation, pallas.reconstruct_keys, reference.reconstruct_keys, factors)
