"""Values of chosen chunks brought from host memory while the same kernel rebuilds their keys."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.fetch_reconstruct import kernel, operands, reference
from pallas_kernels.fetch_reconstruct.operands import HostRows, KeptRows
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.reconstruct_keys.operands import check as check_keys


def fetch_reconstruct(
    values: HostRows, keys: ChosenKeys, kept: KeptRows | None = None, *, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Keys as by `reconstruct_keys`, and the values of the same chunks.

    The values may lie in pinned host memory. They are never copied as a whole, except by "interpret". The kernel reads
    only the chunks that do not stay; "xla" moves all k. Where kept.rows is donated, the kernel writes into it and does
    not touch rows that stay.

    Args:
        values: rows of all chunks.
        keys: what the keys are rebuilt from, and which chunks are asked for.
        kept: values that are on the device already. None: all chunks are fetched.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        keys as by `reconstruct_keys`, and values [B, h_kv, k * c, d] in their dtype, both on the device.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    check_keys(keys)
    operands.check(values, keys, kept)
    if keys.ids.shape[2] == 0:
        return jnp.zeros(keys.out_shape, keys.dtype), jnp.zeros(keys.out_shape, values.value_dtype)
    rebuilt, fetched = run(implementation, kernel.fetch_reconstruct, reference.fetch_reconstruct, values, kept, keys)
    return rebuilt, fetched
