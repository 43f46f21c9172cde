"""Moving tokens between the layouts of a prompt, of chunks and of slot buffers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped


def fit_tokens(x: Shaped[Array, "B S *rest"], tokens: int) -> Shaped[Array, "B {tokens} *rest"]:
    """x [B, S, ...] cut or zero-padded to [B, tokens, ...]."""
    x = x[:, :tokens]
    return jnp.pad(x, [(0, 0), (0, tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def to_chunks(x: Shaped[Array, "B S h d"], chunks: int, size: int) -> Shaped[Array, "B h {chunks} {size} d"]:
    """x [B, S, h, d] -> [B, h, chunks, size, d], cut or zero-padded."""
    batch, _, heads, dim = x.shape
    return fit_tokens(x, chunks * size).reshape(batch, chunks, size, heads, dim).transpose(0, 3, 1, 2, 4)


def take_chunks(
    x: Float[Array, "B S h d"], ids: Int[Array, "B h n"], there: Bool[Array, " B #h n"], size: int
) -> Float[Array, "B h tokens d"]:
    """The tokens [B, h, n * size, d] of chunks ids [B, h, n] of x [B, S, h, d]; each head has its own ids.

    They are zeros where `there` [B, h or 1, n] is False.
    """
    batch, heads, count = ids.shape
    tokens = (ids[..., None] * size + jnp.arange(size)).reshape(batch, heads, count * size)
    row, head, _ = jnp.ogrid[:batch, :heads, :1]
    rows = x.at[row, tokens, head].get(mode="clip")
    return jnp.where(jnp.repeat(there, size, axis=2)[..., None], rows, 0)


def take_span(x: Float[Array, "B S h d"], start: Int[Array, " B"], count: int) -> Float[Array, "B h {count} d"]:
    """Tokens start[b] .. start[b] + count of each row: x [B, S, h, d] -> [B, h, count, d]; zero past the end."""
    index = start[:, None] + jnp.arange(count)
    picked = jnp.take_along_axis(x, index[:, :, None, None], axis=1, mode="fill", fill_value=0)
    return picked.transpose(0, 2, 1, 3)


def ring_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B {slots}"]:
    """Position of the token in each slot of a ring where token p lies in slot p % slots; negative in an empty slot."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)) % slots


def fill_ring(x: Float[Array, "B S h d"], lengths: Int[Array, " B"], slots: int) -> Float[Array, "B h {slots} d"]:
    """The newest tokens of each row of x [B, S, h, d] in such a ring [B, h, slots, d]; zeros where a slot is empty."""
    positions = ring_positions(lengths, slots)[:, :, None, None]
    rows = jnp.take_along_axis(x, jnp.maximum(positions, 0), axis=1, mode="clip")
    return jnp.where(positions >= 0, rows, 0).transpose(0, 2, 1, 3)


def write_rows(
    buffer: Shaped[Array, "B h N d"],
    rows: Shaped[Array, "B T h d"],
    slots: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Shaped[Array, "B h N d"]:
    """Put rows [B, T, h, d] into buffer [B, h, N, d] at slots [B, T]; rows that are not valid [B, T] are not written.

    A donated buffer is changed in place. On a GPU this is one scatter. XLA's CPU backend would turn a scatter into a
    conditional and copy the whole buffer several times, so there the rows are written one after another.
    """
    rows, slots = rows.astype(buffer.dtype), jnp.where(valid, slots, buffer.shape[2])
    return lax.platform_dependent(buffer, rows, slots, cpu=write_in_turn, default=scatter_rows)


def scatter_rows(buffer: Array, rows: Array, slots: Array) -> Array:
    """Write all rows at once, except those whose slot is past the buffer."""
    row = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[row, :, slots].set(rows, mode="drop")


def write_in_turn(buffer: Array, rows: Array, slots: Array) -> Array:
    """Write one row after another, except those whose slot is past the buffer."""
    count, last = slots.shape[1], buffer.shape[2] - 1
    if slots.size == 0:
        return buffer

    def write(index: Array, buffer: Array) -> Array:
        row, token = index // count, index % count
        slot = slots[row, token]
        place = (row, 0, jnp.minimum(slot, last), 0)
        shape = (1, buffer.shape[1], 1, buffer.shape[3])
        new = lax.dynamic_slice(rows, (row, token, 0, 0), (1, 1, shape[1], shape[3])).swapaxes(1, 2)
        old = lax.dynamic_slice(buffer, place, shape)
        return lax.dynamic_update_slice(buffer, jnp.where(slot <= last, new, old), place)

    # The number of iterations must not be known at compile time. XLA would otherwise fuse a single write into each
    # operation that reads the buffer, and copy the buffer for each.
    return lax.fori_loop(0, slots.size * (slots <= last).any(), write, buffer)


def top_k(scores: Float[Array, "*N n"], count: int) -> Int[Array, "*N {count}"]:
    """Indices [..., count] of the largest float32 scores, in falling order; the lower index is first in a tie."""
    return lax.top_k(scores, count)[1].astype(jnp.int32)
