"""The lists of keys that sparse_prefill reads, and the checks of their shapes and dtypes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape


class Keys(NamedTuple):
    """The keys and values of a prompt, in the layout of the model's projections.

    Attributes:
        k: keys, floating [B, S, h_kv, d], right padded.
        v: values, in the shape of the keys.
        lengths: number of real tokens of each row, int32 [B].
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array


class KeyLists(NamedTuple):
    """The keys to which each query head attends from each of n query blocks of M queries.

    A key block has M keys. Block number i has the keys i * M .. i * M + M - 1. The caller makes sure that a list names
    no block and no column twice, and that no listed column lies in a block of the same query block's list. Otherwise a
    key would count twice.

    Attributes:
        blocks: numbers of the key blocks, int32 [B, h_q, n, W]. The first ones are valid, as many as the count says.
        block_counts: number of valid key blocks, int32 [B, h_q, n].
        columns: single keys, int32 [B, h_q, n, C]. The first ones are valid.
        column_counts: number of valid single keys, int32 [B, h_q, n].
        diagonals: None, or a mask of distances, bool [B, h_q, S]. With it, a query attends only to those keys of a
            listed block that are at a distance in this mask, or that are in `in_column`.
        in_column: a mask of keys, bool [B, h_q, S]. It is given if and only if `diagonals` is given.
    """

    blocks: jax.Array
    block_counts: jax.Array
    columns: jax.Array
    column_counts: jax.Array
    diagonals: jax.Array | None = None
    in_column: jax.Array | None = None


def check(q: jax.Array, keys: Keys, lists: KeyLists, first: jax.Array) -> None:
    """Check the shapes and dtypes.

    Raises:
        ValueError: one of them is wrong, or one of two masks is missing.
    """
    expect_shape("q", q, ("B", "P", "h_q", "d"))
    batch, length, heads, dim = q.shape
    expect_shape("k", keys.k, (batch, "S", "h_kv", dim))
    expect_shape("v", keys.v, keys.k.shape)
    for name, x in (("q", q), ("k", keys.k), ("v", keys.v)):
        expect_dtype(name, x, jnp.floating)
    expect_groups(heads, keys.k.shape[2])
    expect_shape("blocks", lists.blocks, (batch, heads, "n", "W"))
    count = lists.blocks.shape[2]
    if count < 1 or length % count:
        raise ValueError(f"q must have a whole number of queries for each of the {count} query blocks, got {length}")
    expect_shape("columns", lists.columns, (batch, heads, count, "C"))
    expect_shape("block_counts", lists.block_counts, (batch, heads, count))
    expect_shape("column_counts", lists.column_counts, (batch, heads, count))
    expect_shape("lengths", keys.lengths, (batch,))
    expect_shape("first", first, ())
    integers = dict(zip(KeyLists._fields[:4], lists[:4], strict=True)) | {"lengths": keys.lengths, "first": first}
    for name, x in integers.items():
        expect_dtype(name, x, jnp.int32)
    if (lists.diagonals is None) != (lists.in_column is None):
        raise ValueError("diagonals and in_column belong together, got one of them")
    for name, mask in (("diagonals", lists.diagonals), ("in_column", lists.in_column)):
        if mask is not None:
            expect_shape(name, mask, (batch, heads, keys.k.shape[1]))
            expect_dtype(name, mask, jnp.bool_)
