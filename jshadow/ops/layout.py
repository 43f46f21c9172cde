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
    x: Float[Array, "B S h d"], ids: Int[Array, "B h n"], there: Bool[Array, "B #h n"], size: int
) -> Float[Array, "B h tokens d"]:  # fmt: skip
    """Chunks of x [B, S, h, d] at ids [B, h, n], each head its own -> their tokens [B, h, n * size, d]; zeros where no
    chunk is `there` [B, h or 1, n]."""
    batch, heads, count = ids.shape
    tokens = (ids[..., None] * size + jnp.arange(size)).reshape(batch, heads, count * size)
    row, head, _ = jnp.ogrid[:batch, :heads, :1]
    rows = x.at[row, tokens, head].get(mode="clip")
    return jnp.where(jnp.repeat(there, size, axis=2)[..., None], rows, 0)


def take_span(x: Float[Array, "B S h d"], start: Int[Array, "B"], count: int) -> Float[Array, "B h {count} d"]:
    """Tokens start[b] .. start[b] + count of each row: x [B, S, h, d] -> [B, h, count, d]; zero past the end."""
    index = start[:, None] + jnp.arange(count)
    picked = jnp.take_along_axis(x, index[:, :, None, None], axis=1, mode="fill", fill_value=0)
    return picked.transpose(0, 2, 1, 3)


def ring_positions(lengths: Int[Array, "B"], slots: int) -> Int[Array, "B {slots}"]:
    """Position of the token in each slot of a ring in which token p lies in slot p % slots; negative where none is."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)) % slots


def fill_ring(x: Float[Array, "B S h d"], lengths: Int[Array, "B"], slots: int) -> Float[Array, "B h {slots} d"]:
    """The newest tokens of each row of x [B, S, h, d] in such a ring [B, h, slots, d]; zeros where there is none."""
    held = ring_positions(lengths, slots)[:, :, None, None]
    rows = jnp.take_along_axis(x, jnp.maximum(held, 0), axis=1, mode="clip")
    return jnp.where(held >= 0, rows, 0).transpose(0, 2, 1, 3)


def write_rows(
    buffer: Shaped[Array, "B h N d"], rows: Shaped[Array, "B T h d"], slots: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Shaped[Array, "B h N d"]:  # fmt: skip
    """Put rows [B, T, h, d] into buffer [B, h, N, d] at slots [B, T]; those not valid [B, T] go nowhere.

    In place where the buffer is donated. On a GPU that is one scatter; XLA's CPU backend makes a conditional of a
    scatter, and copies the whole buffer several times for it.
    """
    rows, slots = rows.astype(buffer.dtype), jnp.where(valid, slots, buffer.shape[2])
    return lax.platform_dependent(buffer, rows, slots, cpu=write_in_turn, default=scatter_rows)


def scatter_rows(buffer: Array, rows: Array, slots: Array) -> Array:
    """All rows at once; a slot past the buffer means nowhere."""
    row = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[row, :, slots].set(rows, mode="drop")


def write_in_turn(buffer: Array, rows: Array, slots: Array) -> Array:
    """One row after another; a slot past the buffer means nowhere."""
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

    # How often is not known while compiling: else a single write would be fused into each of its readers, and done on
    # a copy for each.
    return lax.fori_loop(0, slots.size * (slots <= last).any(), write, buffer)


def top_k(scores: Float[Array, "*N n"], count: int) -> Int[Array, "*N {count}"]:
    """Indices [..., count] of the largest float32 scores, falling; the lower index wins a tie."""
    return lax.top_k(scores, count)[1].astype(jnp.int32)
