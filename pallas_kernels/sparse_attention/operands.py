"""The pieces that sparse_attention reads, and the checks of their shapes and dtypes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape


class Piece(NamedTuple):
    """A piece of the keys and values to attend to. Callers may pass a plain tuple of these arrays instead.

    Attributes:
        k: keys, floating [B, h_kv, N, d]. [B, h_kv, T, N, d] if each query has separate rows ("xla" only).
            [B, h_kv, P, c * d] with `places`: each of the P places holds the rows of a chunk of c tokens.
        v: values, in the shape of the keys.
        valid: which rows each query may see. The axes B, h_kv and T may have size 1. Either bool [B, h_kv, T, m], where
            m divides N and each flag stands for N / m neighboring rows. Or int32 [B, h_kv, T, 1], a number x: the query
            may see the first x rows. With `places` it may see the rows of the first x entries of the list.
        places: None, or int32 [B, h_kv, L], a list of places. The piece then has N = L * c rows: row n is row n % c of
            place places[n // c]. An entry that no query may see can hold any number. The others are at least 0 and
            less than P.
    """

    k: jax.Array
    v: jax.Array
    valid: jax.Array
    places: jax.Array | None = None

    def rows(self, dim: int) -> int:
        """Return the number of rows N, for heads `dim` wide."""
        return self.k.shape[-2] if self.places is None else self.places.shape[2] * (self.k.shape[3] // dim)


Arrays = tuple[jax.Array, jax.Array, jax.Array]
AnyPiece = Piece | Arrays | tuple[*Arrays, jax.Array | None]


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
    filled, dim = tuple(Piece(*piece) for piece in pieces), q.shape[3]
    heads = filled[0].k.shape[1] if filled[0].k.ndim > 1 else 0
    expect_groups(q.shape[2], heads)
    for number, piece in enumerate(filled):
        check_rows(f"pieces[{number}]", piece, q, heads)
        check_valid(f"pieces[{number}]", piece.valid, (q.shape[0], heads, q.shape[1]), piece.rows(dim))
    return tuple(piece for piece in filled if piece.k.shape[-2] and piece.rows(dim))


def check_rows(name: str, piece: Piece, q: jax.Array, heads: int) -> None:
    """Check the keys, the values and the list of places of a piece with so many KV heads.

    Raises:
        ValueError: a shape or a dtype is wrong.
    """
    (batch, length, _, dim), (k, v, _, places) = q.shape, piece
    if places is None:
        expect_shape(f"{name} k", k, (batch, heads, *((length,) if k.ndim == 5 else ()), "N", dim))
    else:
        expect_shape(f"{name} k", k, (batch, heads, "P", "c * d"))
        if k.shape[3] < 1 or k.shape[3] % dim:
            raise ValueError(f"{name} k must have a multiple of the {dim} columns of a head, got {k.shape[3]}")
        expect_shape(f"{name} places", places, (batch, heads, "L"))
        expect_dtype(f"{name} places", places, jnp.int32)
    expect_shape(f"{name} v", v, k.shape)
    expect_dtype(f"{name} k", k, jnp.floating)
    expect_dtype(f"{name} v", v, jnp.floating)


def check_valid(name: str, valid: jax.Array, full: tuple[int, int, int], rows: int) -> None:
    """Check `Piece.valid` of a piece with so many rows. `full` is [B, h_kv, T].

    Raises:
        ValueError: the shape or the dtype is wrong.
    """
    if valid.dtype != jnp.int32:
        expect_dtype(f"{name} valid", valid, jnp.bool_)
    counts, last = valid.dtype == jnp.int32, valid.shape[-1] if valid.ndim else 0
    fits = valid.ndim == 4 and all(size in (1, most) for size, most in zip(valid.shape[:3], full, strict=True))
    if not fits or (last != 1 if counts else last != rows and (last == 0 or rows % last)):
        end = "1]" if counts else f"m] where m divides {rows}"
        lead = ", ".join(map(str, full))
        raise ValueError(f"{name} valid must be broadcastable to [{lead}, {end}, got {list(valid.shape)}")
