"""The op that computes attention of a few queries over keys and values that lie in several arrays."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape
from pallas_kernels.choose import run
from pallas_kernels.sparse_attention import kernel, reference
from pallas_kernels.sparse_attention.operands import AnyPiece, checked_pieces


def sparse_attention(
    q: jax.Array,
    pieces: Sequence[AnyPiece],
    *,
    scale: float,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Compute softmax attention over the union of several pieces, without concatenating them.

    Scores and softmax statistics are float32. The result is 0 for a query that may not see any row. Rows that no query
    may see can hold any finite number.

    Args:
        q: floating [B, T, h_q, d], where h_q is a multiple of h_kv.
        pieces: one (k, v, valid) or (k, v, valid, places) for each piece. k and v are floating [B, h_kv, N, d]. They
            are [B, h_kv, T, N, d] if each query has separate rows, which only "xla" supports. They are
            [B, h_kv, P, c * d] if the rows are those of a list of places. valid tells which rows each query may see:
            see `Piece`.
        sinks: None, or floating [h_q], a logit of each query head. It takes part in the head's softmax as the score of
            one more row, whose value is 0.

    Returns:
        [B, T, h_q, d] in q's dtype.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    filled = checked_pieces(q, pieces)
    if sinks is not None:
        expect_shape("sinks", sinks, (q.shape[2],))
        expect_dtype("sinks", sinks, jnp.floating)
    if not filled:
        return jnp.zeros(q.shape, q.dtype)
    return run(
        implementation,
        functools.partial(kernel.sparse_attention, scale=float(scale)),
        functools.partial(reference.sparse_attention, scale=float(scale)),
        q,
        filled,
        sinks,
    )
