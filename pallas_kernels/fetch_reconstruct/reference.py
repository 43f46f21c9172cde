"""Values fetched and keys rebuilt by XLA: the host gathers, a copy brings the rows, the device rebuilds meanwhile."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choose import Space, in_host_memory, on_host
from pallas_kernels.fetch_reconstruct.packed_rows import Packed, dequantised
from pallas_kernels.fetch_reconstruct.rows import Values
from pallas_kernels.reconstruct_keys.operands import Keys
from pallas_kernels.reconstruct_keys.reference import reconstruct_keys, rows_at


def fetch_reconstruct(values: Values, factors: Keys, packed: Packed | None = None) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.fetch_reconstruct`. All rows travel, those that stay too, for shapes are static."""
    units, ids = factors.left.shape[-2], jnp.clip(factors.ids, 0, factors.units - 1)
    rows = brought(values.prompt, ids) if units else None
    if values.tail is not None:
        later = brought(values.tail, jnp.maximum(ids - units, 0))
        rows = later if rows is None else jnp.where((ids >= units)[..., None], later, rows)
    assert rows is not None
    if packed is None:
        rows = with_kept(values, rows)
    # Both must exist before either is used: this is what lets the copy run beside the rebuilding.
    keys, rows = lax.optimization_barrier((reconstruct_keys(factors), rows))
    if packed is not None:
        rows = with_kept(values, dequantised(rows, factors.chunk, factors.dim, packed))
    return keys, rows.reshape(factors.out_shape)


def with_kept(values: Values, rows: jax.Array) -> jax.Array:
    """Rows that came, but for those that stay."""
    if values.kept is None or values.stay is None:
        return rows
    return jnp.where(values.stay[..., None], values.kept, rows)


def brought(source: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows ids [B, h, k] of source [B, h, U, width], on the device: [B, h, k, width]. Ids are clipped."""
    if not in_host_memory(source):
        return rows_at(source, ids)
    return jax.device_put(on_host(rows_at)(source, jax.device_put(ids, Space.Host)), Space.Device)
