"""attend_chunks in XLA: the keys are rebuilt and the values fetched, and then attended to."""

import jax
import jax.numpy as jnp

from pallas_kernels.fetch_reconstruct.operands import HostRows
from pallas_kernels.fetch_reconstruct.reference import fetch_reconstruct
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.tiles import group_rows, key_products


def attend_chunks(q: jax.Array, values: HostRows, keys: ChosenKeys, scale: float) -> jax.Array:
    """See `pallas_kernels.attend_chunks`."""
    k, v = fetch_reconstruct(values, None, keys)
    weights = jax.nn.softmax(key_products(group_rows(q, k.shape[1]), k) * scale, axis=-1)
    out = jnp.einsum("bhrn,bhnd->bhrd", weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
