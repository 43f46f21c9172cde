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
    return (
        put_missed(kept.keys, kept.places, kept.missed, rebuilt),
        put_missed(kept.values, kept.places, kept.missed, rows),
    )


def put_missed(cache: jax.Array, places: jax.Array, missed: jax.Array, rows: jax.Array) -> jax.Array:
    """Return a cache [B, h, P, w] in which the rows of the missed chunks were written to their places.

    `places` and `missed` are those of KeptRows. `rows` has the rows of all k chunks, in any shape with B * h * k * w
    numbers in this order.
    """
    batch, heads, size, width = cache.shape
    row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None]
    into = jnp.take_along_axis(places, missed, axis=2, mode="fill", fill_value=size)
    rows = rows.reshape(batch, heads, -1, width)
    picked = jnp.take_along_axis(rows, missed[..., None], axis=2, mode="clip")
    return cache.at[row, head, into].set(picked, mode="drop")


def fetched_rows(source: jax.Array, ids: jax.Array) -> jax.Array:
    """Gather rows `ids` [B, h, k] of source [B, h, U, width] onto the device, [B, h, k, width]. Ids are clipped."""
    if not in_host_memory(source):
        return rows_at(source, ids)
    return jax.device_put(on_host(rows_at)(source, jax.device_put(ids, Space.Host)), Space.Device)
