"""Exact softmax attention: blockwise over a prompt, and over the several pieces that a decode step attends to.

Scores and softmax statistics are always float32, for any dtype of queries, keys and values.

Some models have a learned attention sink: a logit of each query head that takes part in every softmax of the head and
has no value (gpt-oss, OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.3). The functions take these
logits as `sinks`. A softmax then starts with the sink, and not with nothing."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jshadow.ops.projections import Weights, dequantized
from pallas_kernels import sparse_attention
from pallas_kernels.tiles import exact

# Large enough that the products take longer than the loop around them; small enough that the scores stay in cache.
QUERY_BLOCK, KEY_BLOCK = 512, 512
MASKED = -1e30  # finite, so that exp(MASKED - MASKED) is a number and empty rows need no special case

_Prefix = tuple[Array, Array, Array]  # keys, values, and the number of the first rows that each query sees
Softmax = tuple[
    Array, Array, Array
]  # of each query: the greatest score, the sum of weights, the weighted sum of values


def _to_blocks(q: Float[Array, "B T h_q d"], kv_heads: int, block: int) -> Float[Array, "blocks B h_kv rows d"]:
    """Cut queries into blocks of `block` queries, with zeros after the last one.

    A block has `group * block` rows for each KV head, so one product computes the scores of all query heads of a group.
    """
    batch, length, q_heads, dim = q.shape
    blocks, group = -(-length // block), q_heads // kv_heads
    q = jnp.pad(q, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, block, kv_heads, group, dim).transpose(1, 0, 3, 4, 2, 5)
    return q.reshape(blocks, batch, kv_heads, group * block, dim)


def _from_blocks(out: Float[Array, "blocks B h_kv rows d"], block: int) -> Float[Array, "B T h_q d"]:
    """Put blocks of queries together again. This is the inverse of `_to_blocks`, without removing its zeros."""
    blocks, batch, kv_heads, rows, dim = out.shape
    out = out.reshape(blocks, batch, kv_heads, rows // block, block, dim).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(batch, blocks * block, kv_heads * (rows // block), dim)


def attend_prefixes(
    q: Float[Array, "B T h_q d"],
    pieces: Sequence[_Prefix],
    scale: float,
    block: int = KEY_BLOCK,
    sinks: Float[Array, " h_q"] | None = None,
) -> tuple[Float[Array, "B T h_q d"], Float[Array, "B T h_q"]]:
    """Compute softmax attention of T queries, each over the first rows of several pieces.

    It never holds a T x N matrix. A block of keys that no query of the block sees is not read, so the time follows the
    tokens held and not the capacity. The blockwise softmax is that of Milakov and Gimelshein (arXiv 1805.02867).

    Args:
        q: [B, T, h_q, d], after RoPE.
        pieces: keys and values [B, h_kv, N, d], and the number of rows that each query sees, int32 [B, h_kv, T, 1]. Its
            axes B, h_kv and T may have size 1.
        block: number of keys that are read at once.
        sinks: the logit of each query head's attention sink, or None.

    Returns:
        The output [B, T, h_q, d] in q's dtype, which is 0 for a query that sees no row. The log-sum-exp of each query's
        scores and of its head's sink, float32 [B, T, h_q]. Without a sink, it is MASKED for a query that sees no row.
    """
    batch, length, q_heads, _ = q.shape
    kv_heads, tile = pieces[0][0].shape[1], min(QUERY_BLOCK, length)
    scaled = q.dtype == jnp.float32
    tiles, ends = _to_blocks(q * scale if scaled else q, kv_heads, tile), []
    for k, _, seen in pieces:
        end = jnp.broadcast_to(jnp.clip(seen, 0, k.shape[2]), (batch, kv_heads, length, 1))
        end = jnp.pad(end[..., 0], ((0, 0), (0, 0), (0, -length % tile)), mode="edge")
        end = jnp.tile(end.reshape(batch, kv_heads, -1, tile), q_heads // kv_heads)
        ends.append(end.transpose(2, 0, 1, 3))

    def of_tile(args: tuple[Array, list[Array]]) -> tuple[Array, Array]:
        q_tile, ends = args
        carry = nothing(q_tile, sinks)
        for (k, v, _), end in zip(pieces, ends, strict=True):
            carry = _add_piece(q_tile, (k, v, end), 1.0 if scaled else scale, carry, block)
        top, total, out = carry
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, lse = lax.map(of_tile, (tiles, ends))
    return _from_blocks(out, tile)[:, :length], _from_blocks(lse[..., None], tile)[:, :length, :, 0]


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
    q: Float[Array, "B T h_q d"],
    stream: Stream,
    pieces: Sequence[_Prefix],
    scale: float,
    sinks: Float[Array, " h_q"] | None = None,
) -> Float[Array, "B T h_q d"]:
    """Compute softmax attention of T queries over a stream and the first rows of several pieces.

    Each block of the stream is read once for all queries. The next block is read while queries attend to a block, so
    two blocks exist at once. The other arguments and the result are those of `attend_prefixes`.
    """
    batch, length, q_heads, _ = q.shape
    kv_heads = pieces[0][0].shape[1]
    scaled = q.dtype == jnp.float32
    tile = _to_blocks(q * scale if scaled else q, kv_heads, length)[0]

    def ends(seen: Array) -> Array:
        return jnp.tile(jnp.broadcast_to(seen[..., 0], (batch, kv_heads, length)), q_heads // kv_heads)

    def add(rows: tuple[Array, Array], end: Array, carry: Softmax) -> Softmax:
        return _add_piece(tile, (*rows, jnp.clip(end, 0, rows[0].shape[2])), 1.0 if scaled else scale, carry)

    def next_block(index: Array, carry: tuple[tuple[Array, Array], Softmax]) -> tuple[tuple[Array, Array], Softmax]:
        rows, softmax = carry
        ahead = stream.read(index)
        return ahead, add(rows, end - (index - 1) * rows[0].shape[2], softmax)

    end = ends(stream.seen)
    rows, carry = lax.fori_loop(1, stream.blocks, next_block, (stream.read(0), nothing(tile, sinks)))
    carry = add(rows, end - (stream.blocks - 1) * rows[0].shape[2], carry)
    for k, v, seen in pieces:
        carry = add((k, v), ends(seen), carry)
    _, total, out = carry
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return _from_blocks(out.astype(q.dtype)[None], length)


def nothing(q: Array, sinks: Array | None = None) -> Softmax:
    """Return the softmax of queries [B, h_kv, rows, d] over no keys, or over the sinks [h_q] of their heads alone.

    The rows are those of `_to_blocks`: the queries of a head are neighbors.
    """
    top, total = jnp.full(q.shape[:-1], MASKED), jnp.zeros(q.shape[:-1])
    if sinks is not None:
        heads = sinks.astype(jnp.float32).reshape(q.shape[1], -1)
        top = jnp.broadcast_to(jnp.repeat(heads, q.shape[2] // heads.shape[1], axis=1), top.shape)
        total = jnp.ones(top.shape)
    return top, total, jnp.zeros(q.shape)


def _add_piece(q: Array, piece: _Prefix, scale: float, carry: Softmax, block: int = KEY_BLOCK) -> Softmax:
    """Add all keys of a piece that a query sees to the softmax. The arguments are those of `_add_keys`."""
    keys, _, end = piece
    block = min(block, keys.shape[2])
    body = functools.partial(_add_keys, q, piece, scale, block)
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


def _add_keys(
    q: Array, piece: _Prefix, scale: float, block: int, index: Array, carry: Softmax, *, masked: bool
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
    return _add_scores((top, total, out), scores, seen, lambda weight: product("bhqk,bhkd->bhqd", weight, v), v.dtype)


def _add_scores(
    carry: Softmax, scores: Array, seen: Array | None, weighted: Callable[[Array], Array], dtype: Any
) -> Softmax:
    """Add keys with these scores [B, h_kv, rows, K] to a softmax.

    Args:
        seen: which keys a row sees, or None if it may see all.
        weighted: returns the sum of the values by weights of `dtype`, [B, h_kv, rows, d].
    """
    top, total, out = carry
    new_top = jnp.maximum(top, scores.max(-1))
    weight, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
    weight = weight if seen is None else jnp.where(seen, weight, 0.0)
    part = weighted(weight.astype(dtype))
    return new_top, total * shrink + weight.sum(-1), out * shrink[..., None] + part


Implementation = Literal["cudnn", "xla"]


def whole_attention(
    q: Float[Array, "B S h_q d"],
    k: Float[Array, "B S h_kv d"],
    v: Float[Array, "B S h_kv d"],
    lengths: Int[Array, " B"],
    scale: float,
    window: int | None,
    implementation: Implementation,
) -> Float[Array, "B S h_q d"]:
    """Compute causal grouped-query attention of a whole prompt in one call of JAX.

    cuDNN skips what lies past the end of a row. The outputs of padded queries have no meaning.

    Args:
        q: queries after RoPE.
        k: keys after RoPE.
        v: values.
        lengths: number of real tokens of each row, int32. Rows are padded on the right.
        window: number of tokens that a query sees, including itself. None means all earlier tokens.
        implementation: "cudnn" is one kernel, which holds no scores in memory. "xla" holds an S x S matrix of scores
            for each head, and runs on every device.

    Returns:
        The output, in q's dtype.
    """
    reach = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        scale=scale,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=reach,
        implementation=implementation,
    )


SINK_COLUMNS = 8  # that `whole_with_sinks` adds to a head; cuDNN needs a multiple of it


def whole_with_sinks(
    q: Float[Array, "B S h_q d"],
    k: Float[Array, "B S h_kv d"],
    v: Float[Array, "B S h_kv d"],
    lengths: Int[Array, " B"],
    scale: float,
    implementation: Implementation,
    sinks: Float[Array, " h_q"],
) -> Float[Array, "B S h_q d"]:
    """Return `whole_attention` without a window, in which each query head's sink takes part in its softmax.

    A token goes before the first one. Its score is the sink: two of the columns that heads get hold the sink in the
    queries, the rounded number and what is left, and 1 in the token's key. Its value is 0. A window would lose it.
    """
    wide, length, width = sinks.astype(jnp.float32) / scale, q.shape[1], q.shape[3]
    rounded = wide.astype(q.dtype)
    parts = jnp.stack([rounded, (wide - rounded.astype(jnp.float32)).astype(q.dtype)], axis=-1)
    q, k, v = (jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, SINK_COLUMNS))) for x in (q, k, v))
    columns = slice(width, width + 2)
    q, k = q.at[..., columns].set(parts), k.at[:, 0, :, columns].set(1)
    return whole_attention(q, k, v, lengths + 1, scale, None, implementation)[:, 1 : length + 1, :, :width]


def cudnn_attends(head_dim: int, dtype: Any, capability: tuple[int, int]) -> bool:
    """Return whether cuDNN computes attention of this head width and dtype on a GPU of this compute capability.

    These are the limits of `jax.nn.dot_product_attention`.
    """
    widest = 256 if capability >= (9, 0) else 128
    narrow = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return narrow and capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= widest


def capability_here() -> tuple[int, int] | None:
    """Return the compute capability of this process's NVIDIA GPU, or None if JAX uses another device."""
    device = jax.local_devices()[0]
    if jax.default_backend() != "gpu" or "cuda" not in device.client.platform_version:
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


_TURN_BLOCK = 256  # the most queries that `attend` handles at once
CPU_BLOCK, CPU_ROWS = 2048, 8192  # a CPU takes blocks of so many keys for several queries, from so many keys on
_SHORT_TURN = 64  # more queries than these attend blockwise to pieces of which each query sees the first rows
_MASS_BLOCK = 256  # the number of queries, and of keys, in a tile of `key_mass`


def causal_attention(
    q: Float[Array, "B T h_q d"],
    k: Float[Array, "B S h_kv d"],
    v: Float[Array, "B S h_kv d"],
    scale: float,
    first: Int[Array, ""] | int = 0,
    window: int | None = None,
    sinks: Float[Array, " h_q"] | None = None,
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
        sinks: the logit of each query head's attention sink, or None.

    Returns:
        The output [B, T, h_q, d] in q's dtype, and the log-sum-exp of each query's scores and of its head's sink,
        float32 [B, h_q, T].
    """
    batch, length, q_heads, _ = q.shape
    tokens, kv_heads = k.shape[1:3]
    group = q_heads // kv_heads
    q_block, k_block = min(QUERY_BLOCK, length), min(KEY_BLOCK, tokens)
    q_blocks, k_blocks = -(-length // q_block), -(-tokens // k_block)
    exact = q.dtype == jnp.float32  # if so, the queries are scaled instead of the scores, which is cheaper
    q = _to_blocks(q * scale if exact else q, kv_heads, q_block)
    row = jnp.tile(jnp.arange(q_block), group)
    column = jnp.arange(k_block)

    def query_block(index: Array, q_tile: Array) -> tuple[Array, Array]:
        position = first + index * q_block + row

        key_block = functools.partial(_add_causal, q_tile, (position, column), (k, v), (scale, window))
        start = nothing(q_tile, sinks)
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
    return _from_blocks(out, q_block)[:, :length], lse.reshape(batch, q_heads, q_blocks * q_block)[..., :length]


def _add_causal(
    q: Array,
    places: tuple[Array, Array],
    rows: tuple[Array, Array],
    scale_and_window: tuple[float, int | None],
    index: Array,
    carry: Softmax,
    *,
    masked: bool = True,
) -> Softmax:
    """Add block `index` of keys and values [B, S, h_kv, d] to the softmax of queries [B, h_kv, rows, d].

    `places` has the positions of the queries, int32 [rows], and those of the keys in their block. Float32 queries have
    their scale already.
    """
    (position, column), (scale, window) = places, scale_and_window
    tokens, block = rows[0].shape[1], len(column)
    start = jnp.minimum(index * block, tokens - block)  # the last block overlaps the previous one
    k, v = (lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in rows)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("bhqd,bkhd->bhqk", q, k)
    scores = scores if q.dtype == jnp.float32 else scores * scale
    if masked:
        key = start + column
        seen = (key >= index * block)[None, :] & (key[None, :] <= position[:, None])
        if window is not None:
            seen &= key[None, :] > position[:, None] - window
        scores = jnp.where(seen, scores, MASKED)
    return _add_scores(carry, scores, None, lambda weight: product("bhqk,bkhd->bhqd", weight, v), v.dtype)


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

    Returns:
        float32 [B, h_kv, S]. Padding has 0.
    """
    batch, tokens, q_heads = q.shape[:3]
    kv_heads, block = k.shape[2], min(_MASS_BLOCK, tokens)
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


def attend(
    q: Float[Array, "B T h_q d"], pieces: list[Piece], scale: float, sinks: Float[Array, " h_q"] | None = None
) -> Float[Array, "B T h_q d"]:
    """Compute softmax attention of T queries over the union of several pieces, without concatenating them.

    Args:
        q: [B, T, h_q, d], after RoPE.
        pieces: the keys and values. A query that may not see any row gets an output of 0.
        sinks: the logit of each query head's attention sink, or None: `StepKV.sinks`.

    Returns:
        [B, T, h_q, d] in q's dtype.
    """
    if q.shape[1] > _SHORT_TURN and all(piece.is_prefix for piece in pieces):
        return attend_prefixes(q, [(piece.k, piece.v, piece.valid) for piece in pieces], scale, sinks=sinks)[0]
    if q.shape[1] > _TURN_BLOCK:  # limits the memory of the scores of a long turn
        blocks = [(first, min(first + _TURN_BLOCK, q.shape[1])) for first in range(0, q.shape[1], _TURN_BLOCK)]
        parts = [attend(q[:, a:b], [piece.of_queries(a, b) for piece in pieces], scale, sinks) for a, b in blocks]
        return jnp.concatenate(parts, axis=1)

    def at_once(q: Array, pieces: list[Piece]) -> Array:
        rows = [(piece.k, piece.v, piece.valid, piece.places) for piece in pieces]
        return sparse_attention(q, rows, scale=scale, sinks=sinks)

    def blockwise(q: Array, pieces: list[Piece]) -> Array:
        return attend_prefixes(q, [(piece.k, piece.v, piece.valid) for piece in pieces], scale, CPU_BLOCK, sinks)[0]

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


def attention_probs(
    q: Float[Array, "B T h_q d"], piece: Piece, scale: float, sinks: Float[Array, " h_q"] | None = None
) -> Float[Array, "B h_kv group T N"]:
    """Return the float32 attention probabilities [B, h_kv, group, T, N] over one piece, and the sinks if they exist."""
    return softmax_with(masked_scores(group_queries(q, piece.k.shape[1]), piece, scale), sinks)


def softmax_with(
    scores: Float[Array, "B h_kv group *T N"], sinks: Float[Array, " h_q"] | None
) -> Float[Array, "B h_kv group *T N"]:
    """Return the float32 softmax of scores [B, h_kv, group, ..., N], in which each query head's sink takes its part.

    Without sinks, it is the softmax. With them, the probabilities of a query add up to less than 1.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    logits = _by_group(sinks, scores)
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), logits)
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(logits - top))


def lse_with(
    scores: Float[Array, "B h_kv group T N"], sinks: Float[Array, " h_q"] | None
) -> Float[Array, "B h_kv group T"]:
    """Return the log-sum-exp of scores [B, h_kv, group, T, N] and of each query head's sink."""
    lse = jax.nn.logsumexp(scores, axis=-1)
    return lse if sinks is None else jnp.logaddexp(lse, _by_group(sinks, lse))


def _by_group(sinks: Array, like: Array) -> Array:
    """Return the sinks [h_q] in float32, broadcastable to an array [B, h_kv, group, ...]."""
    return sinks.astype(jnp.float32).reshape(*like.shape[1:3], *[1] * (like.ndim - 3))


QUERIES = 128  # queries whose scores are in memory at once


def most_attention(q: Array, keys: Array, seen: Array, worth: Array, scale: float) -> Array:
    """Return the largest weighted softmax probability that each key receives from any query, for one row.

    Args:
        q: queries after RoPE [R, h_q, d].
        keys: [N, h_kv, d].
        seen: which keys each query sees, bool [R, N].
        worth: the factor of each query, float32 or bool [R].

    Returns:
        float32 [h_kv, group, N].
    """
    size, heads = len(q), keys.shape[1]
    block = min(QUERIES, size)
    padding = -size % block

    def blocks(x: Array) -> Array:
        return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])

    def add(best: Array, args: Any) -> tuple[Array, None]:
        q, seen, worth = args
        q = q.reshape(block, heads, -1, q.shape[-1])
        logits = jnp.einsum("thgd,nhd->hgtn", q, keys, preferred_element_type=jnp.float32, precision=exact(q.dtype))
        shares = jax.nn.softmax(jnp.where(seen, logits * scale, MASKED), axis=-1) * worth[:, None]
        return jnp.maximum(best, shares.max(axis=2)), None

    start = jnp.zeros((heads, q.shape[1] // heads, len(keys)))
    best, _ = lax.scan(add, start, (blocks(q), blocks(seen), blocks(worth.astype(jnp.float32))))
    return best


def output_products(projection: Mapping[str, Array], kv_heads: int, head_dim: int) -> Array:
    """Return the products of the columns of each query head's output projection, float32 [h_kv, group, d, d].

    With them, the norm of a projected value is computed without the projection: |W v|^2 = v^T (W^T W) v.

    Args:
        projection: the weights of the output projection; see `jshadow.ops.projections.weights_of`.
    """
    kernel = dequantized(Weights.of(projection), jnp.float32)
    kernel = kernel.reshape(kv_heads, -1, head_dim, kernel.shape[-1])
    return jnp.einsum("hgdm,hgem->hgde", kernel, kernel, precision="highest")


def output_norms(values: Array, products: Array) -> Array:
    """Return the norms of values after the output projection, float32 [h_kv, group, m].

    Args:
        values: float32 [m, h_kv, d].
        products: from `output_products`.
    """
    turned = jnp.einsum("mhd,hgde->hgme", values, products, precision="highest")
    return jnp.sqrt(jnp.maximum(jnp.einsum("hgme,mhe->hgm", turned, values, precision="highest"), 0))
