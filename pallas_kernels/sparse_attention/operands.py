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
        valid: which rows each query may see. The axes B, h_kv and T may have size 1. Either bool [B, h_kv, T, m], where
            m divides N and each flag stands for N / m neighboring rows. Or int32 [B, h_kv, T, 1], the number of rows
            from the first.
    """

    k: jax.Array
    v: jax.Array
    valid: jax.Array


AnyPiece = Piece | tuple[jax.Array, jax.Array, jax.Array]


def seen_rows(valid: jax.Array, rows: int) -> jax.Array:
    """Return `Piece.valid` with one flag for each of the piece's `rows` rows, or one for all: bool [..., rows or 1]."""
    if valid.dtype == jnp.int32:
        return jnp.arange(rows, dtype=jnp.int32) < valid
    return jnp.repeat(valid, rows // valid.shape[-1], axis=-1) if 1 < valid.shape[-1] < rows else valid


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
        if valid.dtype != jnp.int32:
            expect_dtype(f"{name} valid", valid, jnp.bool_)
        counts, rows = valid.dtype == jnp.int32, k.shape[-2]
        full, last = (batch, heads, length), valid.shape[-1] if valid.ndim else 0
        fits = valid.ndim == 4 and all(size in (1, most) for size, most in zip(valid.shape[:3], full, strict=True))
        if not fits or (last != 1 if counts else last != rows and (last == 0 or rows % last)):
            end = "1]" if counts else f"m] where m divides {rows}"
            lead = ", ".join(map(str, full))
            raise ValueError(f"{name} valid must be broadcastable to [{lead}, {end}, got {list(valid.shape)}")
    return tuple(Piece(k, v, valid) for k, v, valid in pieces if k.shape[-2])
