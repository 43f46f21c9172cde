"""append_rows in XLA: queries and keys are rotated, and two writes put keys and values into their buffers."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.append_rows.operands import NewTokens
from pallas_kernels.rotation import rotate


def append_rows(
    k: jax.Array, v: jax.Array, new: NewTokens, factor: float, unit: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.append_rows`."""
    cos, sin = new.cos[:, :, None], new.sin[:, :, None]
    slots = new.slots if new.first is None else new.slots - new.first[:, None] * unit
    k = write_rows(k, rotate(new.k, cos, sin), slots, new.valid)
    return rotate(new.q, cos, sin, factor), k, write_rows(v, new.v, slots, new.valid)


def write_rows(buffer: jax.Array, rows: jax.Array, slots: jax.Array, valid: jax.Array) -> jax.Array:
    """Write rows [B, T, h, d] into buffer [B, h, N, d] at slots [B, T]. Rows whose valid [B, T] is False are skipped.

    A donated buffer is changed in place. On a GPU this is one scatter. XLA's CPU backend would turn a scatter into a
    conditional and copy the whole buffer several times. So on a CPU the rows are written one after another.
    """
    rows, slots = rows.astype(buffer.dtype), jnp.where(valid, slots, buffer.shape[2])
    return lax.platform_dependent(buffer, rows, slots, cpu=write_in_turn, default=scatter_rows)


def scatter_rows(buffer: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Write all rows at once. Rows whose slot is past the end of the buffer are skipped."""
    row = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[row, :, slots].set(rows, mode="drop")


def write_in_turn(buffer: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Write one row after another. Rows whose slot is past the end of the buffer are skipped."""
    count, last = slots.shape[1], buffer.shape[2] - 1
    if slots.size == 0 or buffer.size == 0:
        return buffer

    def write(index: jax.Array, buffer: jax.Array) -> jax.Array:
        row, token = index // count, index % count
        slot = slots[row, token]
        place = (row, 0, jnp.minimum(slot, last), 0)
        shape = (1, buffer.shape[1], 1, buffer.shape[3])
        new = lax.dynamic_slice(rows, (row, token, 0, 0), (1, 1, shape[1], shape[3])).swapaxes(1, 2)
        old = lax.dynamic_slice(buffer, place, shape)
        return lax.dynamic_update_slice(buffer, jnp.where(slot <= last, new, old), place)

    # The number of iterations must not be known at compile time. Otherwise XLA would fuse a single write into each
    # operation that reads the buffer, and each of these would copy the buffer.
    return lax.fori_loop(0, slots.size * (slots <= last).any(), write, buffer)
