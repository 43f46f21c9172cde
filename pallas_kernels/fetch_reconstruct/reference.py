"""fetch_reconstruct in XLA: the host gathers the value rows and a copy moves them while the device rebuilds keys."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bits import row_values
from pallas_kernels.choose import Space, in_host_memory, on_host
from pallas_kernels.fetch_reconstruct.operands import HostRows, KeptRows
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.reconstruct_keys.reference import reconstruct_keys, rows_at


def fetch_reconstruct(values: HostRows, kept: KeptRows | None, keys: ChosenKeys) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.fetch_reconstruct`. All k chunks are moved and rebuilt, as shapes are static."""
    units, ids = keys.left.shape[-2], jnp.clip(keys.ids, 0, keys.units - 1)
    rows = fetched_rows(values.prompt, ids) if units else None
    if values.tail is not None:
        later = fetched_rows(values.tail, jnp.maximum(ids - units, 0))
        rows = later if rows is None else jnp.where((ids >= units)[..., None], later, rows)
    assert rows is not None
    # The barrier makes both results exist before either is used. So the copy can run while the keys are rebuilt.
    rebuilt, rows = lax.optimization_barrier((reconstruct_keys(keys), rows))
    if values.bits is not None:
        rows = row_values(rows, keys.chunk, keys.dim, values.bits, values.value_dtype)
    rows = rows.reshape(keys.out_shape)
    if kept is None:
        return rebuilt, rows
    new = is_missed(kept.missed)[..., None, None]
    shape = (*keys.ids.shape, keys.chunk, keys.dim)

    def joined(new_rows: jax.Array, kept_rows: jax.Array) -> jax.Array:
        return jnp.where(new, new_rows.reshape(shape), kept_rows.reshape(shape)).reshape(keys.out_shape)

    return joined(rebuilt, kept.keys), joined(rows, kept.values)


def is_missed(missed: jax.Array) -> jax.Array:
    """Return which of k places are in `missed`, a list [B, h, k] of places that is filled up with k. bool [B, h, k]."""
    batch, heads = missed.shape[:2]
    row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None]
    return jnp.zeros(missed.shape, bool).at[row, head, missed].set(True, mode="drop")


def fetched_rows(source: jax.Array, ids: jax.Array) -> jax.Array:
    """Gather rows `ids` [B, h, k] of source [B, h, U, width] onto the device, [B, h, k, width]. Ids are clipped."""
    if not in_host_memory(source):
        return rows_at(source, ids)
    return jax.device_put(on_host(rows_at)(source, jax.device_put(ids, Space.Host)), Space.Device)
