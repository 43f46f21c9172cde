"""Moving tokens between three layouts: the prompt, chunks, and ring buffers of slots."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import KeyLists as KeyLists
from pallas_kernels import Keys as Keys
from pallas_kernels import NewTokens as NewTokens
from pallas_kernels import append_rows as append_rows
from pallas_kernels import sparse_prefill as attend_over
from pallas_kernels.append_rows.reference import write_rows as write_rows
from pallas_kernels.choose import run as run

__all__ = ("KeyLists", "Keys", "attend_over", "run")


def fit_tokens(x: Shaped[Array, "B S *rest"], tokens: int) -> Shaped[Array, "B {tokens} *rest"]:
    """Cut or zero-pad x [B, S, ...] to [B, tokens, ...]."""
    x = x[:, :tokens]
    return jnp.pad(x, [(0, 0), (0, tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def to_chunks(x: Shaped[Array, "B S h d"], chunks: int, size: int) -> Shaped[Array, "B h {chunks} {size} d"]:
    """Cut or zero-pad x [B, S, h, d] to `chunks` chunks of `size` tokens. Return them as [B, h, chunks, size, d]."""
    batch, _, heads, dim = x.shape
    return fit_tokens(x, chunks * size).reshape(batch, chunks, size, heads, dim).transpose(0, 3, 1, 2, 4)


def take_chunks(
    x: Float[Array, "B S h d"], ids: Int[Array, "B h n"], there: Bool[Array, " B #h n"], size: int
) -> Float[Array, "B h tokens d"]:
    """Gather the tokens [B, h, n * size, d] of chunks from x [B, S, h, d].

    Args:
        x: the tokens.
        ids: numbers of the chunks of each head, int [B, h, n].
        there: bool [B, h or 1, n]. Chunks that are False become zeros.
        size: number of tokens in a chunk.
    """
    batch, heads, count = ids.shape
    tokens = (ids[..., None] * size + jnp.arange(size)).reshape(batch, heads, count * size)
    row, head, _ = jnp.ogrid[:batch, :heads, :1]
    rows = x.at[row, tokens, head].get(mode="clip")
    return jnp.where(jnp.repeat(there, size, axis=2)[..., None], rows, 0)


def take_span(x: Float[Array, "B S h d"], start: Int[Array, " B"], count: int) -> Float[Array, "B h {count} d"]:
    """Gather tokens start[b] .. start[b] + count - 1 of each row b of x [B, S, h, d].

    The result is [B, h, count, d]. Tokens past the end of x are zeros.
    """
    index = start[:, None] + jnp.arange(count)
    picked = jnp.take_along_axis(x, index[:, :, None, None], axis=1, mode="fill", fill_value=0)
    return picked.transpose(0, 2, 1, 3)


def ring_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B {slots}"]:
    """Return the position of the token in each slot of a ring buffer. Empty slots have a negative position.

    Token p lies in slot p % slots. A row that holds `lengths[b]` tokens keeps the newest `slots` of them.
    """
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)) % slots


def fill_ring(x: Float[Array, "B S h d"], lengths: Int[Array, " B"], slots: int) -> Float[Array, "B h {slots} d"]:
    """Put the newest tokens of each row of x [B, S, h, d] into a ring buffer [B, h, slots, d].

    `ring_positions` defines the order of the slots. Empty slots are zeros.
    """
    positions = ring_positions(lengths, slots)[:, :, None, None]
    rows = jnp.take_along_axis(x, jnp.maximum(positions, 0), axis=1, mode="clip")
    return jnp.where(positions >= 0, rows, 0).transpose(0, 2, 1, 3)


def top_k(scores: Float[Array, "*N n"], count: int) -> Int[Array, "*N {count}"]:
    """Return the int32 indices [..., count] of the largest scores [..., n], largest first.

    The lower of two indices with equal scores is first.
    """
    return lax.top_k(scores, count)[1].astype(jnp.int32)


def token_slice(
    x: Shaped[Array, "B S *rest"], start: int | Int[Array, ""], count: int
) -> Shaped[Array, "B {count} *rest"]:
    """Return `count` tokens of an array from token `start` on, with rows in memory as they are in the array.

    Without this layout, XLA may copy all tokens into the order in which the result is used, before a loop over slices.
    """
    return with_layout_constraint(lax.dynamic_slice_in_dim(x, start, count, axis=1), Layout(tuple(range(x.ndim))))
