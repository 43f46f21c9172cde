"""The pieces that sparse_attention reads, and the checks of their shapes and dtypes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape


class Piece(NamedTuple):
    """A piece of the keys and values to attend to. Callers may pass a plain tuple of three arrays instead.

    Attributes:
        k: keys, floating [B, h_kv, N, d]. [B, h_kv, T, N, d] if each query has separate rows ("xla" only).
        v: values, in the shape of the keys.
        valid: bool, broadcastable to [B, h_kv, T, N]. Which rows each query may see.
    """

    k: jax.Array
    v: jax.Array
    valid: jax.Array


AnyPiece = Piece | tuple[jax.Array, jax.Array, jax.Array]


def checked_pieces(q: jax.Array, pieces: Sequence[AnyPiece]) -> tuple[Piece, ...]:
    """Check the shapes and dtypes of the pieces, and return those that have rows.

    Raises:
        ValueError: a shape or a dtype is wrong, or there is no piece.
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
        queries = (length,) if k.ndim == 5 else ()
        expect_shape(f"{name} k", k, (batch, heads, *queries, "N", dim))
        expect_shape(f"{name} v", v, k.shape)
        expect_dtype(f"{name} k", k, jnp.floating)
        expect_dtype(f"{name} v", v, jnp.floating)
        expect_dtype(f"{name} valid", valid, jnp.bool_)
        full = (batch, heads, length, k.shape[-2])
        if valid.ndim != 4 or any(size not in (1, most) for size, most in zip(valid.shape, full, strict=True)):
            raise ValueError(f"{name} valid must be broadcastable to {list(full)}, got {list(valid.shape)}")
    return tuple(Piece(k, v, valid) for k, v, valid in pieces if k.shape[-2])
