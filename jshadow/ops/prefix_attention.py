"""Softmax attention of many queries, blockwise, where each query sees the first rows of each buffer.

Scores and softmax statistics are float32. B rows, T queries, N rows of a buffer, h_q query heads, h_kv KV heads, d head
width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.tiles import exact

# Large enough that the products take longer than the loop around them; small enough that the scores stay in cache.
QUERY_BLOCK, KEY_BLOCK = 512, 512
MASKED = -1e30  # finite, so that exp(MASKED - MASKED) is a number and empty rows need no special case

Prefix = tuple[Array, Array, Array]  # keys, values, and the number of the first rows that each query sees
Softmax = tuple[
    Array, Array, Array
]  # of each query: the greatest score, the sum of weights, the weighted sum of values


def to_blocks(q: Float[Array, "B T h_q d"], kv_heads: int, block: int) -> Float[Array, "blocks B h_kv rows d"]:
    """Cut queries into blocks of `block` queries, with zeros after the last one.

    A block has `group * block` rows for each KV head, so one product computes the scores of all query heads of a group.
    """
    batch, length, q_heads, dim = q.shape
    blocks, group = -(-length // block), q_heads // kv_heads
    q = jnp.pad(q, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, block, kv_heads, group, dim).transpose(1, 0, 3, 4, 2, 5)
    return q.reshape(blocks, batch, kv_heads, group * block, dim)


def from_blocks(out: Float[Array, "blocks B h_kv rows d"], block: int) -> Float[Array, "B T h_q d"]:
    """Put blocks of queries together again. This is the inverse of `to_blocks`, without removing its zeros."""
    blocks, batch, kv_heads, rows, dim = out.shape
    out = out.reshape(blocks, batch, kv_heads, rows // block, block, dim).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(batch, blocks * block, kv_heads * (rows // block), dim)


def attend_prefixes(
    q: Float[Array, "B T h_q d"], pieces: Sequence[Prefix], scale: float, block: int = KEY_BLOCK
) -> tuple[Float[Array, "B T h_q d"], Float[Array, "B T h_q"]]:
    """Compute softmax attention of T queries, each over the first rows of several pieces.

    It never holds a T x N matrix. A block of keys that no query of the block sees is not read, so the time follows the
    tokens held and not the capacity. The blockwise softmax is that of Milakov and Gimelshein (arXiv 1805.02867).

    Args:
        q: [B, T, h_q, d], after RoPE.
        pieces: keys and values [B, h_kv, N, d], and the number of rows that each query sees, int32 [B, h_kv, T, 1]. Its
            axes B, h_kv and T may have size 1.
        scale: factor by which the scores are multiplied.
        block: number of keys that are read at once.

    Returns:
        The output [B, T, h_q, d] in q's dtype, which is 0 for a query that sees no row. The log-sum-exp of each query's
        scores, float32 [B, T, h_q], which is MASKED for such a query.
    """
    batch, length, q_heads, _ = q.shape
    kv_heads, tile = pieces[0][0].shape[1], min(QUERY_BLOCK, length)
    scaled = q.dtype == jnp.float32
    tiles, ends = to_blocks(q * scale if scaled else q, kv_heads, tile), []
    for k, _, seen in pieces:
        end = jnp.broadcast_to(jnp.clip(seen, 0, k.shape[2]), (batch, kv_heads, length, 1))
        end = jnp.pad(end[..., 0], ((0, 0), (0, 0), (0, -length % tile)), mode="edge")
        end = jnp.tile(end.reshape(batch, kv_heads, -1, tile), q_heads // kv_heads)
        ends.append(end.transpose(2, 0, 1, 3))

    def of_tile(args: tuple[Array, list[Array]]) -> tuple[Array, Array]:
        q_tile, ends = args
        carry = nothing(q_tile)
        for (k, v, _), end in zip(pieces, ends, strict=True):
            carry = add_piece(q_tile, (k, v, end), 1.0 if scaled else scale, carry, block)
        top, total, out = carry
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, lse = lax.map(of_tile, (tiles, ends))
    return from_blocks(out, tile)[:, :length], from_blocks(lse[..., None], tile)[:, :length, :, 0]


class Stream(NamedTuple):
    """Keys and values that are read block by block from where they are stored, such as host memory.

    Attributes:
        read: maps the number of a block to its keys and values [B, h_kv, n, d]. The numbers begin at 0.
        blocks: number of blocks to read, at least 1, int32 [].
        seen: number of the first tokens of all blocks that each query sees, int32 [B, h_kv, T, 1]. The axes B, h_kv and
            T may have size 1.
    """

    read: Callable[[Array | int], tuple[Array, Array]]
    blocks: Array
    seen: Array


def attend_stream(
    q: Float[Array, "B T h_q d"], stream: Stream, pieces: Sequence[Prefix], scale: float
) -> Float[Array, "B T h_q d"]:
    """Compute softmax attention of T queries over a stream and the first rows of several pieces.

    Each block of the stream is read once for all queries. The next block is read while queries attend to a block, so
    two blocks exist at once. The other arguments and the result are those of `attend_prefixes`.
    """
    batch, length, q_heads, _ = q.shape
    kv_heads = pieces[0][0].shape[1]
    scaled = q.dtype == jnp.float32
    tile = to_blocks(q * scale if scaled else q, kv_heads, length)[0]

    def ends(seen: Array) -> Array:
        return jnp.tile(jnp.broadcast_to(seen[..., 0], (batch, kv_heads, length)), q_heads // kv_heads)

    def add(rows: tuple[Array, Array], end: Array, carry: Softmax) -> Softmax:
        return add_piece(tile, (*rows, jnp.clip(end, 0, rows[0].shape[2])), 1.0 if scaled else scale, carry)

    def next_block(index: Array, carry: tuple[tuple[Array, Array], Softmax]) -> tuple[tuple[Array, Array], Softmax]:
        rows, softmax = carry
        ahead = stream.read(index)
        return ahead, add(rows, end - (index - 1) * rows[0].shape[2], softmax)

    end = ends(stream.seen)
    rows, carry = lax.fori_loop(1, stream.blocks, next_block, (stream.read(0), nothing(tile)))
    carry = add(rows, end - (stream.blocks - 1) * rows[0].shape[2], carry)
    for k, v, seen in pieces:
        carry = add((k, v), ends(seen), carry)
    _, total, out = carry
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return from_blocks(out.astype(q.dtype)[None], length)


def nothing(q: Array) -> Softmax:
    """Return the softmax of queries [B, h_kv, rows, d] over no keys."""
    return jnp.full(q.shape[:-1], MASKED), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape)


def add_piece(q: Array, piece: Prefix, scale: float, carry: Softmax, block: int = KEY_BLOCK) -> Softmax:
    """Add all keys of a piece that a query sees to the softmax. The arguments are those of `add_keys`."""
    keys, _, end = piece
    block = min(block, keys.shape[2])
    body = functools.partial(add_keys, q, piece, scale, block)
    whole, last = end.min() // block, -(-end.max() // block)
    carry = lax.fori_loop(0, whole, functools.partial(body, masked=False), carry)
    return lax.fori_loop(whole, last, functools.partial(body, masked=True), carry)


def add_rows(
    q: Float[Array, "B T h_q d"],
    rows: tuple[Array, Array, Array],
    scale: float,
    before: tuple[Float[Array, "B T h_q d"], Float[Array, "B T h_q"]],
) -> Float[Array, "B T h_q d"]:
    """Add rows that only one query sees to its softmax attention over other rows.

    Args:
        q: [B, T, h_q, d], after RoPE.
        rows: keys and values [B, h_kv, T, N, d], and which rows each query sees, bool [B, h_kv, T, m]. Each flag stands
            for N / m neighboring rows.
        scale: factor by which the scores are multiplied.
        before: the attention over the other rows and its log-sum-exp, as `attend_prefixes` returns them.

    Returns:
        The attention over all rows [B, T, h_q, d] in q's dtype. A query that sees no row gets 0.
    """
    (keys, values, valid), (out, lse) = rows, before
    batch, length, q_heads = q.shape[:3]
    heads, count = keys.shape[1], keys.shape[3]

    def grouped(x: Array) -> Array:  # [B, T, h_q, ...] -> [B, h_kv, T, group, ...]
        return jnp.moveaxis(x.reshape(batch, length, heads, q_heads // heads, *x.shape[3:]), 2, 1)

    product = functools.partial(jnp.einsum, precision=exact(q.dtype), preferred_element_type=jnp.float32)
    seen = jnp.repeat(valid, count // valid.shape[3], axis=3)[:, :, :, None]
    scores = jnp.where(seen, product("bhtgd,bhtnd->bhtgn", grouped(q), keys) * scale, MASKED)
    lse = grouped(lse)
    top = jnp.maximum(scores.max(-1, initial=MASKED), lse)
    weight, old = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0), jnp.exp(lse - top)
    part = product("bhtgn,bhtnd->bhtgd", weight.astype(values.dtype), values)
    total = weight.sum(-1) + old
    merged = (part + grouped(out) * old[..., None]) / total[..., None]
    return jnp.moveaxis(merged, 1, 2).reshape(q.shape).astype(q.dtype)


def add_keys(
    q: Array, piece: Prefix, scale: float, block: int, index: Array, carry: Softmax, *, masked: bool
) -> Softmax:
    """Add block `index` of a piece's keys, `block` of them, to the softmax of queries [B, h_kv, rows, d].

    The piece has the number of rows that each query sees as int32 [B, h_kv, rows]. `carry` is the greatest score, the
    sum of the weights and the weighted sum of the values.
    """
    (keys, values, end), (top, total, out) = piece, carry
    rows = keys.shape[2]
    start = jnp.minimum(index * block, rows - block)  # the last block overlaps the previous one
    k, v = (lax.dynamic_slice_in_dim(x, start, block, axis=2) for x in (keys, values))
    product = functools.partial(jnp.einsum, precision=exact(q.dtype), preferred_element_type=jnp.float32)
    scores = product("bhqd,bhkd->bhqk", q, k) * scale
    seen = None
    if masked:
        key = start + jnp.arange(block)
        seen = (key >= index * block) & (key < end[..., None])
        scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    weight, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
    weight = weight if seen is None else jnp.where(seen, weight, 0.0)
    part = product("bhqk,bhkd->bhqd", weight.astype(v.dtype), v)
    return new_top, total * shrink + weight.sum(-1), out * shrink[..., None] + part
