"""Attention of a few queries over rows that lie in several places."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.sparse_attention import kernel, reference
from pallas_kernels.sparse_attention.operands import AnyPiece, checked_pieces


def sparse_attention(
    q: jax.Array, pieces: Sequence[AnyPiece], *, scale: float, implementation: str = "auto"
) -> jax.Array:
    """Softmax attention over the union of several pieces; keys and values are never concatenated.

    Scores and softmax statistics are float32. A query that may see no row at all gets 0. Rows that no query may see
    can hold any finite number.

    Args:
        q: [B, T, h_q, d], h_q a multiple of h_kv.
        pieces: (k, v, valid) each: k and v [B, h_kv, N, d], or [B, h_kv, T, N, d] where each query has rows of its own
            ("xla" only); valid bool, broadcastable to [B, h_kv, T, N].
        scale: factor on the scores.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        [B, T, h_q, d] in q's dtype.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    filled = checked_pieces(q, pieces)
    if not filled:
        return jnp.zeros(q.shape, q.dtype)
    return run(
        implementation,
        functools.partial(kernel.sparse_attention, scale=float(scale)),
        functools.partial(reference.sparse_attention, scale=float(scale)),
        q,
        filled,
    )
