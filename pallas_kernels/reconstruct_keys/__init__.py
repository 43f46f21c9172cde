"""Keys of chosen chunks, rebuilt from low-rank factors or packed codes and rotated to where they stand."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.codes import Profile
from pallas_kernels.reconstruct_keys import pallas, reference
from pallas_kernels.reconstruct_keys.operands import keys_of


def reconstruct_keys(
    left: jax.Array, right: jax.Array | None, ids: jax.Array, inverse: jax.Array, *,
    tail: jax.Array | None = None, tail_unit: jax.Array | None = None, mean: jax.Array | None = None,
    step: jax.Array | None = None, profile: Profile | None = None, implementation: str = "auto",
) -> jax.Array:  # fmt: skip
    """Rows of left at the chunks, times right, rotated by RoPE at the positions chunk * c + j.

    The chunk size is c = left.shape[2] // r. Sums are float32. RoPE has the half-split layout; head columns from rot on
    pass unrotated.

    With a profile, rows of left are uint8 codes of w bytes a token (`pallas_kernels.codes`), and c = left.shape[-1] //
    w: code q of b bits stands for (q + 1/2 - 2**(b - 1)) * step, rounded to right's dtype, and mean is added to the
    product. Right None then means that these are the keys' own channels: each KV head has rows of its own, and the
    profile is (0, d, 0).

    Args:
        left: [B, U, c * r], or uint8 [B, U, c * w], or uint8 [B, h_kv, U, c * w]; one chunk contiguous.
        right: [B, h_kv, r, d], or None.
        ids: int32 [B, h_kv, k], clipped to 0 .. U - 1, or to 0 .. U + W - 1 with a tail.
        inverse: angle per position of each rotated pair, float32 [rot / 2], rot at most d.
        tail: left rows of later chunks, W of them: id U + w means its row w, which is chunk tail_unit + w.
        tail_unit: int32 [B].
        mean: [B, h_kv, d], in right's dtype.
        step: float32 [B, r], or [B, h_kv, d].
        profile: how many of the r numbers have 8, 4 and 2 bits.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        [B, h_kv, k * c, d] in left's dtype, or in mean's.

    Raises:
        ValueError: a shape, a dtype, the profile or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    factors = keys_of(left, right, ids, inverse, tail, tail_unit, mean, step, profile)
    if ids.shape[2] == 0:
        return jnp.zeros(factors.out_shape, factors.dtype)
    return run(implementation, pallas.reconstruct_keys, reference.reconstruct_keys, factors)
