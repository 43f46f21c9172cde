"""The Triton kernels of attention over several pieces: one launch, or two if a head's rows are split over programs.

`attention_kernel` has the grid (splits, blocks of query rows, KV heads, batch). A program runs online softmax over its
share of every piece. With one split it writes the result. With several splits it writes an unnormalized output, the
maximum score and the sum of exponentials, and `merge_kernel` joins these by log-sum-exp.

A query row is one query head of a KV head at one position. Row r belongs to position r // group and to query head
r % group of the KV head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.sparse_attention.operands import Piece
from pallas_kernels.tiles import MASKED, blocks, can_do, dot, iota, power_of_two, row_block, spans, warps

PROGRAMS = 512  # about four for each multiprocessor of an H200 or A100; more would only write more partial outputs
MERGED = 8_192  # most numbers of a tile of partial outputs that a program of `merge_kernel` holds

Carry = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]  # maximum score, sum of exponentials, tiles of outputs


class Tile(NamedTuple):
    """Static sizes of one program.

    Attributes:
        scale: factor by which the scores are multiplied.
        group: number of query heads of a KV head.
        rows: number of query rows.
        block: number of rows of a piece that are loaded at once.
        splits: number of programs that share the rows of the pieces.
        places: the place of each piece's count in its `valid`; see `with_one_array`.
    """

    scale: float
    group: int
    rows: int
    block: int
    splits: int
    places: tuple[int, ...]


class Part(NamedTuple):
    """The refs of a piece, and the place of its count in `valid`."""

    k: Any
    v: Any
    valid: Any
    place: int


class Queries(NamedTuple):
    """The query rows of one program.

    Attributes:
        b: index in the batch.
        h: index of the KV head.
        row: int32 [rows], numbers of the query rows.
        there: bool [rows], False past the last query row.
        query: int32 [rows], position of each row among the queries.
        head: int32 [rows], query head of each row.
    """

    b: jax.Array
    h: jax.Array
    row: jax.Array
    there: jax.Array
    query: jax.Array
    head: jax.Array


class Column(NamedTuple):
    """A tile of the columns of a head.

    Attributes:
        query: the queries [rows, n] in these columns.
        d: int32 [1, n], numbers of the columns.
        inside: bool [1, n], False past the end of the head.
    """

    query: jax.Array
    d: jax.Array
    inside: jax.Array


def queries_of(q: Any, group: int, rows: int) -> Queries:
    """Return the query rows of this program. `q` is the ref of an array [B, T, h_q, d]."""
    i, h, b = (pl.program_id(axis) for axis in (1, 2, 3))
    row = iota(i * rows, rows)
    query = lax.div(row, jnp.int32(group))
    return Queries(b, h, row, row < q.shape[1] * group, query, h * group + lax.rem(row, jnp.int32(group)))


# Attention over a share of each piece


def attention_kernel(q, pieces, out, *partial, tile):  # type: ignore[no-untyped-def]
    """One program: compute attention of a block of query rows over one split of every piece.

    q is [B, T, h_q, d], and the keys and values of a piece are [B, h_kv, N, d]. Without `partial`, `out` is
    [B, T, h_q, d] in q's dtype. With `partial`, `out` is the float32 unnormalized output [B, h_kv, splits, M, d] of M
    query rows, and `partial` holds the maximum score and the sum of exp(score - maximum), float32
    [B, h_kv, splits, M].
    """
    split, rows = pl.program_id(0), queries_of(q, tile.group, tile.rows)
    there, columns = rows.there[:, None], []
    for start, width in spans(q.shape[3]):
        d = iota(start, width)
        inside = (d < q.shape[3])[None]
        at = q.at[rows.b, rows.query[:, None], rows.head[:, None], d[None]]
        columns.append(Column(pltriton.load(at, mask=there & inside, other=0.0), d[None], inside))
    zeros = tuple(jnp.zeros(column.query.shape, jnp.float32) for column in columns)
    carry: Carry = (jnp.full((tile.rows,), MASKED), jnp.zeros((tile.rows,)), zeros)
    for piece in (Part(*refs, place) for refs, place in zip(pieces, tile.places, strict=True)):
        steps = steps_of(piece, tile)
        step = functools.partial(one_block, columns, piece, rows, tile, split * steps)
        carry = lax.fori_loop(0, steps, step, carry) if steps > 1 else step(0, carry)
    peak, mass, parts = carry
    if not partial:
        mass = jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[:, None]
        for part, (_, d, inside) in zip(parts, columns, strict=True):
            at = out.at[rows.b, rows.query[:, None], rows.head[:, None], d]
            pltriton.store(at, (part / mass).astype(out.dtype), mask=there & inside)
        return
    for ref, value in zip(partial, (peak, mass), strict=True):
        pltriton.store(ref.at[rows.b, rows.h, split, rows.row], value, mask=rows.there)
    for part, (_, d, inside) in zip(parts, columns, strict=True):
        pltriton.store(out.at[rows.b, rows.h, split, rows.row[:, None], d], part, mask=there & inside)


def steps_of(piece: Any, tile: Tile) -> int:
    """Return how many blocks of a piece each program loads."""
    return blocks(blocks(piece.k.shape[2], tile.block), tile.splits)


def one_block(
    columns: list[Column],
    piece: Any,
    rows: Queries,
    tile: Tile,
    first: jax.Array,
    index: jax.Array | int,
    carry: Carry,
) -> Carry:
    """Add block `first + index` of a piece to the running softmax of the query rows."""
    peak, mass, parts = carry
    n = iota((first + index) * tile.block, tile.block)
    n_there = n < piece.k.shape[2]

    def load(ref: Any, column: Column) -> jax.Array:
        at = ref.at[rows.b, rows.h, n[:, None], column.d]
        return pltriton.load(at, mask=n_there[:, None] & column.inside, other=0.0)

    score = jnp.zeros((tile.rows, tile.block), jnp.float32)
    for column in columns:
        score += dot(column.query, load(piece.k, column), transposed=True)
    seen = seen_by(piece, rows, n) & n_there[None]
    score = jnp.where(seen, score * tile.scale, MASKED)
    new = jnp.maximum(peak, score.max(axis=1))
    weight = jnp.where(score > MASKED, jnp.exp(score - new[:, None]), 0.0)
    shrink = jnp.exp(peak - new)
    values = [load(piece.v, column) for column in columns]
    short = weight.astype(piece.v.dtype)
    parts = tuple(part * shrink[:, None] + dot(short, x) for part, x in zip(parts, values, strict=True))
    return new, mass * shrink + weight.sum(axis=1), parts


def seen_by(piece: Any, rows: Queries, n: jax.Array) -> jax.Array:
    """Return which of the rows n of a piece each query row may see, bool [query rows or 1, rows]."""
    valid, count = piece.valid, piece.k.shape[2]
    # An axis of size 1 is broadcast, so its index is always 0.
    at = [x if size > 1 else jnp.int32(0) for x, size in zip((rows.b, rows.h), valid.shape, strict=False)]
    flag, there = lax.div(n, jnp.int32(max(1, count // valid.shape[3]))), n < count
    if valid.shape[2] == 1:  # the flags are those of all queries, so they are loaded once
        if valid.dtype == jnp.int32:
            first: jax.Array = n < pltriton.load(valid.at[(*at, jnp.int32(0), jnp.int32(piece.place))])
            return first[None]
        return pltriton.load(valid.at[(*at, jnp.int32(0), flag)], mask=there, other=False)[None]
    query, asked = rows.query[:, None], rows.there[:, None]
    if valid.dtype == jnp.int32:
        seen: jax.Array = n[None] < pltriton.load(valid.at[(*at, query, query * 0)], mask=asked, other=0)
        return seen
    return pltriton.load(valid.at[(*at, query, flag[None])], mask=asked & there[None], other=False)


# The partial results of all splits


def merge_kernel(partial, top, total, out, *, group, rows, width):  # type: ignore[no-untyped-def]
    """One program: join the partial results of a block of query rows, for `width` columns of a head.

    The refs are those that `attention_kernel` wrote, and `out` is [B, T, h_q, d].
    """
    at_rows, splits = queries_of(out, group, rows), top.shape[2]
    d = iota(pl.program_id(0) * width, width)
    split = iota(0, power_of_two(splits))
    there = (split < splits)[:, None] & at_rows.there[None]
    at = (at_rows.b, at_rows.h, split[:, None], at_rows.row[None])
    peaks = pltriton.load(top.at[at], mask=there, other=MASKED)
    weight = jnp.exp(peaks - peaks.max(axis=0)[None])
    mass = (pltriton.load(total.at[at], mask=there, other=0.0) * weight).sum(axis=0)
    inside = (d < out.shape[3])[None]
    parts = pltriton.load(
        partial.at[at_rows.b, at_rows.h, split[:, None, None], at_rows.row[None, :, None], d[None, None]],
        mask=there[:, :, None] & inside[None],
        other=0.0,
    )
    joined = (parts * weight[:, :, None]).sum(axis=0) / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[:, None]
    place = out.at[at_rows.b, at_rows.query[:, None], at_rows.head[:, None], d[None]]
    pltriton.store(place, joined.astype(out.dtype), mask=at_rows.there[:, None] & inside)


# The calls


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def sparse_attention(q: jax.Array, pieces: tuple[Piece, ...], scale: float, interpret: bool) -> jax.Array:
    """See `pallas_kernels.sparse_attention`.

    Raises:
        NotImplementedError: queries have separate rows in a piece, heads are wider than 256, an array is empty, or a
            dtype is not float32, bfloat16 or float16.
    """
    for k, v, _ in pieces:
        if k.ndim == 5:
            raise NotImplementedError("sparse_attention: the kernel takes no pieces with separate rows for each query")
        can_do("sparse_attention", q.shape[3], q, k, v)
    pieces, places = with_one_array(pieces)
    batch, length, q_heads, dim = q.shape
    kv_heads, arrays = pieces[0].k.shape[1], [x for piece in pieces for x in piece[:2]]
    group = q_heads // kv_heads
    height = length * group
    rows = row_block(height, q, *arrays)
    block = 32 if any(x.dtype == jnp.float32 for x in (q, *arrays)) else 64
    others = batch * kv_heads * blocks(height, rows)
    splits = min(max(1, PROGRAMS // others), max(blocks(piece.k.shape[2], block) for piece in pieces))
    tile = Tile(scale, group, rows, block, splits, places)
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if splits > 1:
        shape = (batch, kv_heads, splits, height)
        results = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, dim), shape, shape)]
    scores = height * batch * kv_heads * sum(piece.k.shape[2] for piece in pieces)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out, *partial = pl.pallas_call(
        functools.partial(attention_kernel, tile=tile),
        grid=(splits, blocks(height, rows), kv_heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, (q, pieces))),
        out_specs=[anywhere] * len(results),
        out_shape=results,
        cost_estimate=estimate(flops=4 * scores * dim, moved=bytes_of((q, pieces, results)), exponentials=scores),
        compiler_params=pltriton.CompilerParams(num_warps=warps(dim, q, *arrays), num_stages=2),
        interpret=interpret,
        name="sparse_attention",
    )(q, pieces)
    return merged(q, group, (out, *partial), interpret) if partial else out


def with_one_array(pieces: tuple[Piece, ...]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """Join counts that are single numbers. Return the pieces, and the place of each piece's count in its `valid`.

    XLA's GPU compiler uses one kernel for each single number, but only one kernel for an array of numbers.
    """
    single = [piece.valid.dtype == jnp.int32 and piece.valid.size == 1 for piece in pieces]
    if sum(single) < 2:
        return pieces, (0,) * len(pieces)
    counts = jnp.concatenate([piece.valid for piece, one in zip(pieces, single, strict=True) if one], axis=3)
    joined = tuple(piece._replace(valid=counts) if one else piece for piece, one in zip(pieces, single, strict=True))
    return joined, tuple(sum(single[:index]) if one else 0 for index, one in enumerate(single))


def merged(q: jax.Array, group: int, partial: tuple[jax.Array, ...], interpret: bool) -> jax.Array:
    """Return the attention of queries q from the partial results of all splits."""
    batch, _, heads, dim = q.shape
    splits, height = partial[1].shape[2:]
    rows = min(16, 1 << (height - 1).bit_length())
    width = max(1, min(32, MERGED // (power_of_two(splits) * rows)))
    anywhere, result = pl.BlockSpec(memory_space=pl.ANY), jax.ShapeDtypeStruct(q.shape, q.dtype)
    return pl.pallas_call(
        functools.partial(merge_kernel, group=group, rows=rows, width=width),
        grid=(blocks(dim, width), blocks(height, rows), heads // group, batch),
        in_specs=[anywhere] * 3,
        out_specs=anywhere,
        out_shape=result,
        cost_estimate=estimate(flops=2 * partial[0].size, moved=bytes_of((partial, result))),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_attention",
    )(*partial)
