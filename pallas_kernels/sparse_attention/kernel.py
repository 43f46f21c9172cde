"""The Triton kernels of attention over several pieces: one launch, or two if a head's rows are split over programs.

`attention_kernel` has the grid (splits, blocks of query rows, KV heads, batch). A program runs online softmax over its
share of every piece. With one split it writes the result. With several splits it writes an unnormalized output, the
maximum score and the sum of exponentials, and the kernel in `merge` joins these by log-sum-exp.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.sparse_attention.merge import merged
from pallas_kernels.sparse_attention.operands import Piece
from pallas_kernels.sparse_attention.query_rows import Queries, queries_of
from pallas_kernels.tiles import MASKED, blocks, can_do, dot, iota, row_block, spans, warps

PROGRAMS = 512  # about four for each multiprocessor of an H200 or A100; more would only write more partial outputs

Carry = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]  # maximum score, sum of exponentials, tiles of outputs


class Tile(NamedTuple):
    """Static sizes of one program.

    Attributes:
        scale: factor by which the scores are multiplied.
        group: number of query heads of a KV head.
        rows: number of query rows.
        block: number of rows of a piece that are loaded at once.
        splits: number of programs that share the rows of the pieces.
        counts: the index of each piece's count in its `valid`; see `with_one_array`.
    """

    scale: float
    group: int
    rows: int
    block: int
    splits: int
    counts: tuple[int, ...]


class Part(NamedTuple):
    """A piece in the kernel.

    Attributes:
        k: the ref of `Piece.k`.
        v: the ref of `Piece.v`.
        valid: the ref of `Piece.valid`.
        places: the ref of `Piece.places`, or None.
        dim: width of a head.
        count_at: index of the piece's count in `valid`.
    """

    k: Any
    v: Any
    valid: Any
    places: Any
    dim: int
    count_at: int

    @property
    def chunk(self) -> int:
        """Number of rows of a place, c. It is 1 without a list of places."""
        return int(self.k.shape[3]) // self.dim

    @property
    def rows(self) -> int:
        """Number of rows of the piece."""
        return self.chunk * int((self.k if self.places is None else self.places).shape[2])


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


# Attention over a share of each piece


def attention_kernel(q, pieces, sinks, out, *partial, tile):  # type: ignore[no-untyped-def]
    """One program: compute attention of a block of query rows over one split of every piece.

    q is [B, T, h_q, d], and the keys and values of a piece are [B, h_kv, N, d]. Without `partial`, `out` is
    [B, T, h_q, d] in q's dtype. With `partial`, `out` is the float32 unnormalized output [B, h_kv, splits, M, d] of M
    query rows, and `partial` holds the maximum score and the sum of exp(score - maximum), float32
    [B, h_kv, splits, M].

    The keys and values of a piece with a list of places are [B, h_kv, P, c * d]. The first split adds the sinks [h_q],
    unless they are None.
    """
    split, rows = pl.program_id(0), queries_of(q, tile.group, tile.rows)
    there, columns = rows.there[:, None], []
    for start, width in spans(q.shape[3]):
        d = iota(start, width)
        inside = (d < q.shape[3])[None]
        at = q.at[rows.b, rows.query[:, None], rows.head[:, None], d[None]]
        columns.append(Column(pltriton.load(at, mask=there & inside, other=0.0), d[None], inside))
    zeros = tuple(jnp.zeros(column.query.shape, jnp.float32) for column in columns)
    peak, mass = jnp.full((tile.rows,), MASKED), jnp.zeros((tile.rows,))
    if sinks is not None:
        peak = jnp.where(split == 0, pltriton.load(sinks.at[rows.head]).astype(jnp.float32), peak)
        mass = jnp.where(split == 0, 1.0, mass)
    carry: Carry = (peak, mass, zeros)
    for piece in (Part(*refs, q.shape[3], count) for refs, count in zip(pieces, tile.counts, strict=True)):
        carry = one_share(columns, piece, rows, tile, carry)
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


def one_share(columns: list[Column], piece: Part, rows: Queries, tile: Tile, carry: Carry) -> Carry:
    """Add this program's share of a piece to the running softmax of the query rows."""
    steps = blocks(blocks(piece.rows, tile.block), tile.splits)  # blocks of the piece that each program loads
    first = pl.program_id(0) * steps

    def numbers(index: jax.Array | int) -> jax.Array:
        return iota((first + index) * tile.block, tile.block)

    def step(index: jax.Array | int, carry: Carry) -> Carry:
        return one_block(columns, piece, rows, tile.scale, (numbers(index), None), carry)

    def listed(index: jax.Array | int, state: tuple[Carry, jax.Array]) -> tuple[Carry, jax.Array]:
        # The places of the next block are loaded a step ahead. So the loads of its rows do not wait for them.
        carry, place = state
        following = places_of(piece, rows, numbers(index + 1)) if steps > 1 else place
        return one_block(columns, piece, rows, tile.scale, (numbers(index), place), carry), following

    if piece.places is None:
        return lax.fori_loop(0, steps, step, carry) if steps > 1 else step(0, carry)
    state = carry, places_of(piece, rows, numbers(0))
    return (lax.fori_loop(0, steps, listed, state) if steps > 1 else listed(0, state))[0]


def one_block(
    columns: list[Column],
    piece: Part,
    rows: Queries,
    scale: float,
    block: tuple[jax.Array, jax.Array | None],
    carry: Carry,
) -> Carry:
    """Add a block of a piece to the running softmax of the query rows.

    `block` holds the numbers of its rows, and their places if the piece has a list.
    """
    (n, place), (peak, mass, parts) = block, carry
    n_there = n < piece.rows
    row, first, there = n, None, n_there
    if place is not None:  # the row of a place that does not exist is not loaded
        row, there = place, (place >= 0) & (place < piece.k.shape[2])
        first = lax.rem(n, jnp.int32(piece.chunk))[:, None] * piece.dim

    def load(ref: Any, column: Column) -> jax.Array:
        d = column.d if first is None else first + column.d
        return pltriton.load(ref.at[rows.b, rows.h, row[:, None], d], mask=there[:, None] & column.inside, other=0.0)

    score = jnp.zeros((rows.row.shape[0], n.shape[0]), jnp.float32)
    for column in columns:
        score += dot(column.query, load(piece.k, column), transposed=True)
    seen = seen_by(piece, rows, n) & n_there[None]
    score = jnp.where(seen, score * scale, MASKED)
    new = jnp.maximum(peak, score.max(axis=1))
    weight = jnp.where(score > MASKED, jnp.exp(score - new[:, None]), 0.0)
    shrink = jnp.exp(peak - new)
    values = [load(piece.v, column) for column in columns]
    short = weight.astype(piece.v.dtype)
    parts = tuple(part * shrink[:, None] + dot(short, x) for part, x in zip(parts, values, strict=True))
    return new, mass * shrink + weight.sum(axis=1), parts


def places_of(piece: Part, rows: Queries, n: jax.Array) -> jax.Array:
    """Return the place of each of the rows n of a piece with a list, int32 [rows].

    Entries that no query row may see are not loaded. Their rows get the number of places, which is no place.
    """
    seen = seen_by(piece, rows, n) & (n < piece.rows)[None]
    asked = seen[0] if seen.shape[0] == 1 else seen.astype(jnp.int32).max(axis=0) > 0
    at = piece.places.at[rows.b, rows.h, lax.div(n, jnp.int32(piece.chunk))]
    return pltriton.load(at, mask=asked, other=piece.k.shape[2])


def seen_by(piece: Part, rows: Queries, n: jax.Array) -> jax.Array:
    """Return which of the rows n of a piece each query row may see, bool [query rows or 1, rows]."""
    valid, count = piece.valid, piece.rows
    # An axis of size 1 is broadcast, so its index is always 0.
    at = [x if size > 1 else jnp.int32(0) for x, size in zip((rows.b, rows.h), valid.shape, strict=False)]
    # A count is one of rows, or one of the entries of a list.
    size = piece.chunk if valid.dtype == jnp.int32 else max(1, count // valid.shape[3])
    flag, there = lax.div(n, jnp.int32(size)), n < count
    if valid.shape[2] == 1:  # the flags are those of all queries, so they are loaded once
        if valid.dtype == jnp.int32:
            first: jax.Array = flag < pltriton.load(valid.at[(*at, jnp.int32(0), jnp.int32(piece.count_at))])
            return first[None]
        return pltriton.load(valid.at[(*at, jnp.int32(0), flag)], mask=there, other=False)[None]
    query, asked = rows.query[:, None], rows.there[:, None]
    if valid.dtype == jnp.int32:
        seen: jax.Array = flag[None] < pltriton.load(valid.at[(*at, query, query * 0)], mask=asked, other=0)
        return seen
    return pltriton.load(valid.at[(*at, query, flag[None])], mask=asked & there[None], other=False)


# The calls


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def sparse_attention(
    q: jax.Array, pieces: tuple[Piece, ...], sinks: jax.Array | None, scale: float, interpret: bool
) -> jax.Array:
    """See `pallas_kernels.sparse_attention`.

    Raises:
        NotImplementedError: queries have separate rows in a piece, heads are wider than 256, an array is empty, or a
            dtype is not float32, bfloat16 or float16.
    """
    for piece in pieces:
        if piece.k.ndim == 5:
            raise NotImplementedError("sparse_attention: the kernel takes no pieces with separate rows for each query")
        can_do("sparse_attention", q.shape[3], q, piece.k, piece.v)
    pieces, counts = with_one_array(pieces)
    batch, length, q_heads, dim = q.shape
    kv_heads, arrays = pieces[0].k.shape[1], [x for piece in pieces for x in piece[:2]]
    sizes = [piece.rows(dim) for piece in pieces]
    group = q_heads // kv_heads
    height = length * group
    rows = row_block(height, q, *arrays)
    block = 32 if any(x.dtype == jnp.float32 for x in (q, *arrays)) else 64
    others = batch * kv_heads * blocks(height, rows)
    splits = min(max(1, PROGRAMS // others), blocks(max(sizes), block))
    tile = Tile(scale, group, rows, block, splits, counts)
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if splits > 1:
        shape = (batch, kv_heads, splits, height)
        results = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, dim), shape, shape)]
    scores = height * batch * kv_heads * sum(sizes)
    moved = bytes_of((q, results)) + sum(piece_bytes(piece, size) for piece, size in zip(pieces, sizes, strict=True))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out, *partial = pl.pallas_call(
        functools.partial(attention_kernel, tile=tile),
        grid=(splits, blocks(height, rows), kv_heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, (q, pieces, sinks))),
        out_specs=[anywhere] * len(results),
        out_shape=results,
        cost_estimate=estimate(flops=4 * scores * dim, moved=moved, exponentials=scores),
        compiler_params=pltriton.CompilerParams(num_warps=warps(dim, q, *arrays), num_stages=2),
        interpret=interpret,
        name="sparse_attention",
    )(q, pieces, sinks)
    return merged(q, group, (out, *partial), interpret) if partial else out


def piece_bytes(piece: Piece, rows: int) -> int:
    """Return the bytes that the kernel reads of a piece: of the places in a list, only as many as it has entries."""
    count = min(piece.k.shape[2], rows if piece.places is None else piece.places.shape[2])
    return bytes_of(piece[2:]) + bytes_of(piece[:2]) // piece.k.shape[2] * count


def with_one_array(pieces: tuple[Piece, ...]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """Join counts that are single numbers. Return the pieces, and the index of each piece's count in its `valid`.

    XLA's GPU compiler uses one kernel for each single number, but only one kernel for an array of numbers.
    """
    single = [piece.valid.dtype == jnp.int32 and piece.valid.size == 1 for piece in pieces]
    if sum(single) < 2:
        return pieces, (0,) * len(pieces)
    counts = jnp.concatenate([piece.valid for piece, one in zip(pieces, single, strict=True) if one], axis=3)
    joined = tuple(piece._replace(valid=counts) if one else piece for piece, one in zip(pieces, single, strict=True))
    return joined, tuple(sum(single[:index]) if one else 0 for index, one in enumerate(single))
