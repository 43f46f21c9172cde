"""Exact softmax attention: blockwise over a prompt, and over the several pieces that a decode step attends to.

Scores and softmax statistics are always float32, for any dtype of queries, keys and values.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jshadow.ops.prefix_attention import KEY_BLOCK as KEY_BLOCK
from jshadow.ops.prefix_attention import MASKED as MASKED
from jshadow.ops.prefix_attention import QUERY_BLOCK as QUERY_BLOCK
from jshadow.ops.prefix_attention import attend_prefixes, from_blocks, to_blocks
from pallas_kernels import sparse_attention

TURN_BLOCK = 256  # the most queries that `attend` handles at once
CPU_BLOCK, CPU_ROWS = 2048, 8192  # a CPU takes blocks of so many keys for several queries, from so many keys on
SHORT_TURN = 64  # more queries than these attend blockwise to pieces of which each query sees the first rows
MASS_BLOCK = 256  # the number of queries, and of keys, in a tile of `key_mass`


def causal_attention(
    q: Float[Array, "B T h_q d"],
    k: Float[Array, "B S h_kv d"],
    v: Float[Array, "B S h_kv d"],
    scale: float,
    first: Int[Array, ""] | int = 0,
    window: int | None = None,
) -> tuple[Float[Array, "B T h_q d"], Float[Array, "B h_q T"]]:
    """Compute causal grouped-query attention of T queries of a prompt.

    It never holds a T x S matrix, and it does not copy K or V. Rows are padded on the right, so a real query sees only
    real keys, and no mask of the lengths is needed. The outputs of padded queries have no meaning.

    Args:
        q: [B, T, h_q, d], after RoPE, at positions first .. first + T - 1.
        k: [B, S, h_kv, d], after RoPE. Keys from position first + T on are ignored and may hold anything.
        v: [B, S, h_kv, d].
        scale: factor by which the scores are multiplied, usually 1 / sqrt(d).
        first: position of the first query.
        window: number of tokens that a query sees, including itself. None means all earlier tokens.

    Returns:
        The output [B, T, h_q, d] in q's dtype, and the log-sum-exp of each query's scores, float32 [B, h_q, T].
    """
    batch, length, q_heads, _ = q.shape
    tokens, kv_heads = k.shape[1:3]
    group = q_heads // kv_heads
    q_block, k_block = min(QUERY_BLOCK, length), min(KEY_BLOCK, tokens)
    q_blocks, k_blocks = -(-length // q_block), -(-tokens // k_block)
    exact = q.dtype == jnp.float32  # if so, the queries are scaled instead of the scores, which is cheaper
    q = to_blocks(q * scale if exact else q, kv_heads, q_block)
    row = jnp.tile(jnp.arange(q_block), group)
    column = jnp.arange(k_block)

    def query_block(index: Array, q_tile: Array) -> tuple[Array, Array]:
        position = first + index * q_block + row

        def key_block(j: Array, carry: tuple[Array, Array, Array], masked: bool = True) -> tuple[Array, Array, Array]:
            top, total, out = carry
            start = jnp.minimum(j * k_block, tokens - k_block)  # the last block overlaps the previous one
            k_tile = lax.dynamic_slice_in_dim(k, start, k_block, axis=1)
            v_tile = lax.dynamic_slice_in_dim(v, start, k_block, axis=1)
            scores = jnp.einsum("bhqd,bkhd->bhqk", q_tile, k_tile, preferred_element_type=jnp.float32)
            scores = scores if exact else scores * scale
            if masked:
                key = start + column
                seen = (key >= j * k_block)[None, :] & (key[None, :] <= position[:, None])
                if window is not None:
                    seen &= key[None, :] > position[:, None] - window
                scores = jnp.where(seen, scores, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            weight = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            part = jnp.einsum("bhqk,bkhd->bhqd", weight.astype(v.dtype), v_tile, preferred_element_type=jnp.float32)
            return new_top, total * shrink + weight.sum(-1), out * shrink[..., None] + part

        shape = q_tile.shape[:-1]
        start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(q_tile.shape))
        # Most blocks of keys are visible to every query of the block, and need no mask.
        whole = jnp.minimum((first + index * q_block + 1) // k_block, tokens // k_block)
        last = jnp.minimum((first + (index + 1) * q_block + k_block - 1) // k_block, k_blocks)
        if window is None:
            start = lax.fori_loop(0, whole, functools.partial(key_block, masked=False), start)
        else:
            whole = jnp.maximum(first + index * q_block - window + 1, 0) // k_block
        top, total, out = lax.fori_loop(whole, last, key_block, start)
        return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, lse = lax.map(lambda args: query_block(*args), (jnp.arange(q_blocks), q))
    lse = lse.reshape(q_blocks, batch, kv_heads, group, q_block).transpose(1, 2, 3, 0, 4)
    return from_blocks(out, q_block)[:, :length], lse.reshape(batch, q_heads, q_blocks * q_block)[..., :length]


def key_mass(
    q: Float[Array, "B S h_q d"],
    k: Float[Array, "B S h_kv d"],
    lse: Float[Array, "B h_q S"],
    lengths: Int[Array, " B"],
    scale: float,
) -> Float[Array, "B h_kv S"]:
    """Sum the attention probability that each key gets, over all queries and over the query heads of its KV head.

    These are the column sums of the S x S matrix of probabilities (H2O, arXiv 2306.14048, section 4.1). They are
    computed tile by tile from the log-sum-exps, so the whole matrix is never in memory.

    Args:
        q: queries after RoPE, padded on the right.
        k: keys after RoPE, padded on the right.
        lse: float32 log-sum-exp of each query's scores.
        lengths: int32 [B], the number of real tokens of each row.
        scale: factor by which the scores are multiplied.

    Returns:
        float32 [B, h_kv, S]. Padding has 0.
    """
    batch, tokens, q_heads = q.shape[:3]
    kv_heads, block = k.shape[2], min(MASS_BLOCK, tokens)
    blocks = -(-tokens // block)
    grouped = group_queries(q, kv_heads)
    lse = lse.reshape(batch, kv_heads, q_heads // kv_heads, tokens)

    def query_block(i: Array, total: Array) -> Array:
        # The last block overlaps the previous one. Queries and keys that the previous one has counted are masked.
        row = jnp.minimum(i * block, tokens - block)
        q_tile = lax.dynamic_slice_in_dim(grouped, row, block, axis=3)
        lse_tile = lax.dynamic_slice_in_dim(lse, row, block, axis=3)
        query = row + jnp.arange(block)
        counts = (query >= i * block) & (query < lengths[:, None])

        def key_block(j: Array, total: Array) -> Array:
            column = jnp.minimum(j * block, tokens - block)
            k_tile = lax.dynamic_slice_in_dim(k, column, block, axis=1)
            key = column + jnp.arange(block)
            scores = jnp.einsum("bhgtd,bshd->bhgts", q_tile, k_tile, preferred_element_type=jnp.float32) * scale
            seen = (key >= j * block) & (key <= query[:, None]) & counts[:, None, None, :, None]
            mass = jnp.where(seen, jnp.exp(scores - lse_tile[..., None]), 0).sum(axis=(2, 3))
            old = lax.dynamic_slice_in_dim(total, column, block, axis=2)
            return lax.dynamic_update_slice_in_dim(total, old + mass, column, axis=2)

        return lax.fori_loop(0, jnp.minimum(i + 1, blocks), key_block, total)

    return lax.fori_loop(0, blocks, query_block, jnp.zeros((batch, kv_heads, tokens)))


class Piece(NamedTuple):
    """Keys and values in one place that a decode step may attend to.

    Attributes:
        k: keys after RoPE, [B, h_kv, N, d]. [B, h_kv, T, N, d] if each query has separate rows. [B, h_kv, P, c * d]
            with `places`.
        v: values, in the shape of the keys.
        valid: which rows each query may see, as in `pallas_kernels.sparse_attention.operands.Piece`. Either bool
            [B, h_kv, T, m] with a flag for every N / m neighboring rows. Or int32 [B, h_kv, T, 1], the number of rows
            from the first, or of list entries with `places`. The axes B, h_kv and T may have size 1.
        places: None, or int32 [B, h_kv, L], the list of the places that hold the rows, c rows each. See
            `pallas_kernels.sparse_attention.operands.Piece`. Only `attend` takes pieces with such a list.
    """

    k: Float[Array, "B h_kv *T N d"]
    v: Float[Array, "B h_kv *T N d"]
    valid: Bool[Array, "#B #h_kv #T _"] | Int[Array, "#B #h_kv #T 1"]
    places: Int[Array, "B h_kv L"] | None = None

    @property
    def is_prefix(self) -> bool:
        """Whether each query sees a number of the first rows, and all queries have the same rows."""
        return self.k.ndim == 4 and self.places is None and self.valid.dtype == jnp.int32

    def of_queries(self, first: int, last: int) -> "Piece":
        """Return the piece for queries first .. last - 1 only."""
        queries = slice(first, last)
        k, v = (x[:, :, queries] if x.ndim == 5 else x for x in (self.k, self.v))
        return Piece(k, v, self.valid[:, :, queries] if self.valid.shape[2] > 1 else self.valid, self.places)


def attend(q: Float[Array, "B T h_q d"], pieces: list[Piece], scale: float) -> Float[Array, "B T h_q d"]:
    """Compute softmax attention of T queries over the union of several pieces, without concatenating them.

    Args:
        q: [B, T, h_q, d], after RoPE.
        pieces: the keys and values. A query that may not see any row gets an output of 0.
        scale: factor by which the scores are multiplied.

    Returns:
        [B, T, h_q, d] in q's dtype.
    """
    if q.shape[1] > SHORT_TURN and all(piece.is_prefix for piece in pieces):
        return attend_prefixes(q, [(piece.k, piece.v, piece.valid) for piece in pieces], scale)[0]
    if q.shape[1] > TURN_BLOCK:  # limits the memory of the scores of a long turn
        blocks = [(first, min(first + TURN_BLOCK, q.shape[1])) for first in range(0, q.shape[1], TURN_BLOCK)]
        parts = [attend(q[:, a:b], [piece.of_queries(a, b) for piece in pieces], scale) for a, b in blocks]
        return jnp.concatenate(parts, axis=1)

    def at_once(q: Array, pieces: list[Piece]) -> Array:
        return sparse_attention(q, [(piece.k, piece.v, piece.valid, piece.places) for piece in pieces], scale=scale)

    def blockwise(q: Array, pieces: list[Piece]) -> Array:
        return attend_prefixes(q, [(piece.k, piece.v, piece.valid) for piece in pieces], scale, CPU_BLOCK)[0]

    rows = sum(piece.k.shape[2] for piece in pieces)
    if q.shape[1] > 1 and rows >= CPU_ROWS and q.dtype == jnp.float32 and all(piece.is_prefix for piece in pieces):
        # A CPU takes longer to write and read the scores of several queries than to loop over blocks of keys.
        return lax.platform_dependent(q, pieces, cpu=blockwise, default=at_once)
    return at_once(q, pieces)


def group_queries(q: Float[Array, "B T h_q d"], kv_heads: int) -> Float[Array, "B h_kv group T d"]:
    """Regroup queries [B, T, h_q, d] by KV head: [B, h_kv, group, T, d]."""
    batch, length, q_heads, dim = q.shape
    return q.reshape(batch, length, kv_heads, q_heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def masked_scores(
    grouped: Float[Array, "B h_kv group T d"], piece: Piece, scale: float
) -> Float[Array, "B h_kv group T N"]:
    """Return the float32 scores [B, h_kv, group, T, N] of grouped queries. Invisible rows get MASKED."""
    scores = grouped_product("bhgtd,bhnd->bhgtn", grouped, piece.k) * scale
    return jnp.where(jnp.broadcast_to(piece.valid, piece.valid.shape)[:, :, None], scores, MASKED)


def grouped_product(
    formula: str,
    left: Float[Array, "B h_kv group T _"],
    rows: Float[Array, "B h_kv N d"],
    precision: lax.Precision | None = None,
) -> Float[Array, "B h_kv group T _"]:
    """Compute a float32 einsum of grouped rows [B, h_kv, group, T, ...] with the rows of their KV head.

    Args:
        formula: the einsum, with "bhgt" as the first axes of the left operand and of the result.
        left: the grouped rows.
        rows: the rows of each KV head, such as keys.
        precision: precision of the products. None means JAX's default.
    """
    # Group and T are merged into one axis, because XLA's CPU backend takes five times as long with two axes.
    batch, heads, group, length, _ = left.shape
    merged, formula = left.reshape(batch, heads, group * length, -1), formula.replace("gt", "r")
    out = jnp.einsum(formula, merged, rows, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, group, length, -1)


def attention_probs(q: Float[Array, "B T h_q d"], piece: Piece, scale: float) -> Float[Array, "B h_kv group T N"]:
    """Return the float32 attention probabilities [B, h_kv, group, T, N] over one piece."""
    return jax.nn.softmax(masked_scores(group_queries(q, piece.k.shape[1]), piece, scale), axis=-1)
