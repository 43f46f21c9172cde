"""Keys of chosen chunks, rebuilt from low-rank factors or packed codes and rotated to their positions."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.reconstruct_keys import kernel, reference
from pallas_kernels.reconstruct_keys.operands import ChosenKeys, check


def reconstruct_keys(keys: ChosenKeys, *, implementation: str = "auto") -> jax.Array:
    """Left rows of the chosen chunks, times right, rotated by RoPE at the positions chunk * c + j.

    Sums are float32. RoPE has the half-split layout; head columns from rot on are not rotated.

    Args:
        keys: what the keys are rebuilt from, and which chunks are asked for.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        [B, h_kv, k * c, d] in left's dtype, or with a profile in mean's.

    Raises:
        ValueError: a shape, a dtype, the profile or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    check(keys)
    if keys.ids.shape[2] == 0:
        return jnp.zeros(keys.out_shape, keys.dtype)
    return run(implementation, kernel.reconstruct_keys, reference.reconstruct_keys, keys)
