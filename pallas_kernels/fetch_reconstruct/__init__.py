"""The op that fetches the values of selected chunks from host memory and rebuilds their keys in the same kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.fetch_reconstruct import kernel, operands, reference
from pallas_kernels.fetch_reconstruct.operands import HostRows, KeptRows
from pallas_kernels.fetch_reconstruct.reference import put_missed as put_missed
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.reconstruct_keys.operands import check as check_keys


def fetch_reconstruct(
    values: HostRows, keys: ChosenKeys, kept: KeptRows | None = None, *, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Rebuild the keys of k selected chunks as `reconstruct_keys` does, and fetch the values of the same chunks.

    The values may lie in pinned host memory. Only "interpret" copies all of them to the device. The kernel fetches and
    rebuilds only the chunks that are not in the cache `kept`. "xla" moves and rebuilds all k chunks. If the cache is
    donated, the kernel writes into its buffers and does not change the other rows.

    Args:
        values: value rows of all chunks.
        keys: the arrays that keys are rebuilt from, and the ids of the selected chunks.
        kept: a cache of keys and values on the device, or None to fetch and rebuild all chunks.

    Returns:
        Keys [B, h_kv, k * c, d] in `keys.dtype` and values [B, h_kv, k * c, d] in `values.value_dtype`, on the device.
        With `kept`, the keys and the values of its whole cache [B, h_kv, P, c * d], with the rows of the missed chunks.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    check_keys(keys)
    operands.check(values, keys, kept)
    if keys.ids.shape[2] == 0:
        if kept is not None:
            return kept.keys, kept.values
        return jnp.zeros(keys.out_shape, keys.dtype), jnp.zeros(keys.out_shape, values.value_dtype)
    rebuilt, fetched = run(implementation, kernel.fetch_reconstruct, reference.fetch_reconstruct, values, kept, keys)
    return rebuilt, fetched
