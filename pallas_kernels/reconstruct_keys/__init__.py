"""The op that rebuilds the keys of selected chunks from low-rank factors or packed codes, and applies RoPE."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.reconstruct_keys import kernel, reference
from pallas_kernels.reconstruct_keys.operands import ChosenKeys, check


def reconstruct_keys(keys: ChosenKeys, *, implementation: str = "auto") -> jax.Array:
    """Rebuild the keys of k selected chunks of c tokens, and apply RoPE to them.

    A key is its row of `left` times `right`. Token j of chunk i has position i * c + j. RoPE uses the half-split
    layout, and rotates the first `rot` columns of a head. Sums are float32.

    Args:
        keys: the arrays that keys are rebuilt from, and the ids of the selected chunks.

    Returns:
        [B, h_kv, k * c, d] in the dtype of `left`, or of `mean` if the keys are packed codes.

    Raises:
        ValueError: a shape, a dtype, the profile or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    check(keys)
    if keys.ids.shape[2] == 0:
        return jnp.zeros(keys.out_shape, keys.dtype)
    return run(implementation, kernel.reconstruct_keys, reference.reconstruct_keys, keys)
