"""Attention of a few queries over rows that lie in several places."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape
from pallas_kernels.choose import run
from pallas_kernels.sparse_attention import pallas, reference
from pallas_kernels.sparse_attention.reference import Piece


def sparse_attention(q: jax.Array, pieces: Sequence[Piece], *, scale: float, implementation: str = "auto") -> jax.Array:
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
    expect_shape("q", q, ("B", "T", "h_q", "d"))
    expect_dtype("q", q, jnp.floating)
    if not pieces:
        raise ValueError("pieces must hold at least one piece, got none")
    batch, length, _, dim = q.shape
    heads = pieces[0][0].shape[1] if pieces[0][0].ndim > 1 else 0
    expect_groups(q.shape[2], heads)
    for number, (k, v, valid) in enumerate(pieces):
        name = f"pieces[{number}]"
        own = (length,) if k.ndim == 5 else ()
        expect_shape(f"{name} k", k, (batch, heads, *own, "N", dim))
        expect_shape(f"{name} v", v, k.shape)
        expect_dtype(f"{name} k", k, jnp.floating)
        expect_dtype(f"{name} v", v, jnp.floating)
        expect_dtype(f"{name} valid", valid, jnp.bool_)
        full = (batch, heads, length, k.shape[-2])
        if valid.ndim != 4 or any(size not in (1, most) for size, most in zip(valid.shape, full, strict=True)):
            raise ValueError(f"{name} valid must be broadcastable to {list(full)}, got {list(valid.shape)}")
    filled = tuple((k, v, valid) for k, v, valid in pieces if k.shape[-2])
    if not filled:
        return jnp.zeros(q.shape, q.dtype)
    return run(
        implementation,
        functools.partial(pallas.sparse_attention, scale=float(scale)),
        functools.partial(reference.sparse_attention, scale=float(scale)),
        q, filled,
    )  # fmt: skip
