"""Two Triton kernels that score chunks.

`chunk_logits_kernel` is for chunks with one landmark that is neither packed nor has a spread. It writes the logit of
each landmark. `chunk_masses_kernel` is for all other chunks. It writes the mass of each chunk: the sum of
exp(logit - top) over its landmarks, where top is the largest logit in the program for that query row.

The grid of both is (blocks of chunks, blocks of query rows, KV heads, batch). A query row is one query head at one
position; `group_rows` puts all query rows of a KV head together, so that a program loads each landmark once for its
whole block of query rows. Both kernels also write the maximum and the sum of each program. `finish` completes the
softmax over all programs with these.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.chunk_scores.finish import finish
from pallas_kernels.chunk_scores.operands import Chunks
from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.tiles import LEAST, MASKED, blocks, can_do, dot, group_rows, iota, row_block, spans, summed, warps
from pallas_kernels.unpack import signed_numbers

MOST_PARTS = 16  # the most landmarks a chunk may have; each takes one tile of logits in registers


class Tile(NamedTuple):
    """Static sizes of one program.

    Attributes:
        scale: factor by which the products are multiplied.
        rows: number of query rows.
        block: number of chunks.
        bits: bits of a packed landmark number, or None if landmarks are not packed.
        interpret: whether JAX's interpreter runs the program.
    """

    scale: float
    rows: int
    block: int
    bits: int | None = None
    interpret: bool = False


class Rows(NamedTuple):
    """The rows of one KV head that a program reads.

    Attributes:
        b: index in the batch.
        h: index of the KV head.
        number: int32 [n], indices of the rows.
        there: bool [n], False past the end of the array.
    """

    b: jax.Array
    h: jax.Array
    number: jax.Array
    there: jax.Array


# One landmark a chunk


def chunk_logits_kernel(q, chunks, logits, top, total, *, tile):  # type: ignore[no-untyped-def]
    """One program: compute the logits [rows, block] of a block of query rows and the landmarks of a block of chunks.

    The program writes the logits. Chunks that are not candidates get MASKED. For each query row it also writes the
    maximum logit to `top`, and the sum of exp(logit - maximum) over the candidates to `total`. The results are float32.
    q is [B, h_kv, R, d], and landmarks are [B, h_kv, n, d].
    """
    j, i, h, b = (pl.program_id(axis) for axis in range(4))
    landmarks = chunks.landmarks
    row, column = iota(i * tile.rows, tile.rows), iota(j * tile.block, tile.block)
    row_there, column_there = row < q.shape[2], column < landmarks.shape[2]
    candidate = pltriton.load(chunks.candidates.at[b, h, column], mask=column_there, other=False)
    product = jnp.zeros((tile.rows, tile.block), jnp.float32)
    for start, width in summed(q.shape[3], q, landmarks):
        d = iota(start, width)
        there = (d < q.shape[3])[None]
        left = pltriton.load(q.at[b, h, row[:, None], d[None]], mask=row_there[:, None] & there, other=0.0)
        right = pltriton.load(
            landmarks.at[b, h, column[:, None], d[None]], mask=column_there[:, None] & there, other=0.0
        )
        product += dot(left, right, transposed=True)
    product = jnp.where(candidate[None], product * tile.scale, MASKED)
    peak = product.max(axis=1)
    weight = jnp.where(candidate[None], jnp.exp(product - peak[:, None]), 0.0)
    pltriton.store(logits.at[b, h, row[:, None], column[None]], product, mask=row_there[:, None] & column_there[None])
    pltriton.store(top.at[b, h, j, row], peak, mask=row_there)
    pltriton.store(total.at[b, h, j, row], weight.sum(axis=1), mask=row_there)


# Several landmarks a chunk, packed landmarks, or landmarks with a spread


def chunk_masses_kernel(q, chunks, masses, top, total, *, tile):  # type: ignore[no-untyped-def]
    """One program: compute the masses [rows, block] of a block of chunks for a block of query rows.

    The program loads the query tiles once. Then it computes one tile of logits for each landmark of a chunk. It writes
    the masses. Chunks that are not candidates get 0. For each query row it also writes the maximum logit to `top`, and
    the sum of the masses to `total`. The results are float32.
    """
    j, i, h, b = (pl.program_id(axis) for axis in range(4))
    row, chunk = iota(i * tile.rows, tile.rows), iota(j * tile.block, tile.block)
    row_there, chunk_there = row < q.shape[2], chunk < chunks.candidates.shape[2]
    candidate = pltriton.load(chunks.candidates.at[b, h, chunk], mask=chunk_there, other=False)[None]
    queries = query_tiles(q, chunks.landmarks, Rows(b, h, row, row_there), tile.bits)
    logits = []
    for part in range(chunks.parts):
        rows = Rows(b, h, chunk * chunks.parts + part, chunk_there)
        product = tile.scale * products(queries, chunks, rows, tile)
        if chunks.spread is not None:
            product += half_variance(queries, chunks.spread, rows, tile.scale)
        logits.append(jnp.where(candidate, product, MASKED))
    peak = functools.reduce(jnp.maximum, [logit.max(axis=1) for logit in logits])
    mass = sum(jnp.where(candidate, jnp.exp(logit - peak[:, None]), 0.0) for logit in logits)
    assert not isinstance(mass, int)
    pltriton.store(masses.at[b, h, row[:, None], chunk[None]], mass, mask=row_there[:, None] & chunk_there[None])
    pltriton.store(top.at[b, h, j, row], peak, mask=row_there)
    pltriton.store(total.at[b, h, j, row], mass.sum(axis=1), mask=row_there)


def columns_of(landmarks: Any, *arrays: Any) -> tuple[tuple[int, int], ...]:
    """Return (start, width) of each tile of a landmark's columns.

    A column is a number, or a byte if landmarks are packed. A tile has at most 32 columns if one of `arrays` is
    float32, otherwise 64.
    """
    return spans(landmarks.shape[3], 32 if any(x.dtype == jnp.float32 for x in arrays) else 64)


def query_tiles(q: Any, landmarks: Any, rows: Rows, bits: int | None) -> list[list[jax.Array]]:
    """Load the query tiles that belong to each tile of a landmark's columns. Return a list of lists.

    The inner list has one query tile [query rows, width] for each place of the bytes if landmarks are packed, and else
    a single tile.

    Args:
        q: ref of the queries.
        landmarks: ref of the landmarks.
        rows: the query rows.
        bits: bits of a packed landmark number, or None.
    """
    b, h, number, there = rows
    size, tiles = landmarks.shape[3], []
    for start, width in columns_of(landmarks, q, landmarks):
        at = iota(start, width)
        mask = there[:, None] & (at < size)[None]
        tiles.append(
            [
                pltriton.load(q.at[b, h, number[:, None], (place * size + at)[None]], mask=mask, other=0.0)
                for place in range(1 if bits is None else 8 // bits)
            ]
        )
    return tiles


def products(queries: list[list[jax.Array]], chunks: Any, rows: Rows, tile: Tile) -> jax.Array:
    """Return the float32 products [query rows, n] of query rows and n landmarks.

    Args:
        queries: the result of `query_tiles`.
        chunks: the kernel's refs, as Chunks.
        rows: the rows of the landmarks.
        tile: the sizes of the program.
    """
    b, h, number, there = rows
    landmarks, bits = chunks.landmarks, tile.bits
    size, out = landmarks.shape[3], jnp.zeros((queries[0][0].shape[0], number.shape[0]), jnp.float32)
    columns = columns_of(landmarks, queries[0][0], landmarks)
    for (start, width), tiles in zip(columns, queries, strict=True):
        at = iota(start, width)
        mask = there[:, None] & (at < size)[None]
        other = 0.0 if bits is None else 0
        loaded = pltriton.load(landmarks.at[b, h, number[:, None], at[None]], mask=mask, other=other)
        if bits is None:
            out += dot(tiles[0], loaded, transposed=True)
            continue
        for place, query in enumerate(tiles):
            out += dot(query, signed_numbers(loaded, place, bits, query.dtype, tile.interpret), transposed=True)
    if chunks.scale is not None:
        step = pltriton.load(chunks.scale.at[b, h, number, jnp.zeros_like(number)], mask=there, other=0.0)
        out *= step.astype(jnp.float32)[None]
    return out


def half_variance(queries: list[list[jax.Array]], spreads: Any, rows: Rows, scale: float) -> jax.Array:
    """Return (scale * |q| * spread)**2 / 2 for each query row and each of n landmarks, float32 [query rows, n].

    Args:
        queries: the result of `query_tiles`.
        spreads: ref of the spreads.
        rows: the rows of the landmarks.
        scale: factor by which the products are multiplied.
    """
    b, h, number, there = rows
    squares = [(tile.astype(jnp.float32) ** 2).sum(axis=1) for tiles in queries for tile in tiles]
    length = functools.reduce(jnp.add, squares) * (scale**2 / 2)
    spread = pltriton.load(spreads.at[b, h, number, jnp.zeros_like(number)], mask=there, other=0.0)
    return length[:, None] * (spread.astype(jnp.float32) ** 2)[None]


# Calls


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def chunk_scores(q: jax.Array, chunks: Chunks, scale: float, interpret: bool) -> jax.Array:
    """See `pallas_kernels.chunk_scores`.

    Raises:
        NotImplementedError: heads are wider than 256, a chunk has more than 16 landmarks, there are too many chunks for
            `finish`, an array is empty, or a dtype is not float32, bfloat16 or float16.
    """
    if chunks.parts == 1 and chunks.scale is None and chunks.spread is None:
        return by_logits(q, chunks, scale, interpret)
    return by_masses(q, chunks, scale, interpret)


def by_logits(q: jax.Array, chunks: Chunks, scale: float, interpret: bool) -> jax.Array:
    """Compute the scores [B, h_kv, T, n] with `chunk_logits_kernel`."""
    landmarks = chunks.landmarks
    can_do("chunk_scores", q.shape[3], q, landmarks)
    kv_heads = landmarks.shape[1]
    queries = group_rows(q, kv_heads)
    rows = row_block(queries.shape[2], q, landmarks)
    # Float32 tiles take twice the registers, so the block is half as large.
    block = 128 if queries.dtype == landmarks.dtype != jnp.float32 else 64
    tile, warp_count = Tile(scale, rows, block), warps(q.shape[3], q, landmarks)
    partial = launch(chunk_logits_kernel, queries, chunks, tile, warp_count, interpret)
    return finish(partial, chunks.candidates, q.shape[2] // kv_heads, block, logits=True, interpret=interpret)


def by_masses(q: jax.Array, chunks: Chunks, scale: float, interpret: bool) -> jax.Array:
    """Compute the scores [B, h_kv, T, n] with `chunk_masses_kernel`."""
    kv_heads = chunks.landmarks.shape[1]
    parts, bits = chunks.parts, chunks.bits(q.shape[3])
    if parts > MOST_PARTS:
        raise NotImplementedError(f"chunk_scores: the kernel takes up to {MOST_PARTS} landmarks a chunk, got {parts}")
    if chunks.scale is None:
        multiplied: tuple[jax.Array, ...] = (q, chunks.landmarks)
        can_do("chunk_scores", q.shape[3], *multiplied)
    else:
        multiplied = (q,)
        can_do("chunk_scores", q.shape[3], q, chunks.scale, packed=(chunks.landmarks,))
    queries = group_rows(q, kv_heads)
    rows = row_block(queries.shape[2], *multiplied)
    most = 128 if all(x.dtype != jnp.float32 for x in multiplied) else 64
    block = max(LEAST, 1 << ((most // parts).bit_length() - 1)) if parts < most else LEAST
    tile, warp_count = Tile(scale, rows, block, bits, interpret), warps(q.shape[3], *multiplied)
    partial = launch(chunk_masses_kernel, queries, chunks, tile, warp_count, interpret)
    return finish(partial, chunks.candidates, q.shape[2] // kv_heads, block, logits=False, interpret=interpret)


def launch(
    kernel: Any, queries: jax.Array, chunks: Chunks, tile: Tile, warp_count: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run one of the two kernels on query rows [B, h_kv, R, d].

    Returns:
        The logits or masses [B, h_kv, R, n], the maxima [B, h_kv, programs, R] and the sums [B, h_kv, programs, R], all
        float32.
    """
    batch, kv_heads, count = chunks.candidates.shape
    height, programs = queries.shape[2], blocks(count, tile.block)
    operands, anywhere = (queries, chunks), pl.BlockSpec(memory_space=pl.ANY)
    shapes = (batch, kv_heads, height, count), *[(batch, kv_heads, programs, height)] * 2
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    products = batch * kv_heads * height * count * chunks.parts
    first, top, total = pl.pallas_call(
        functools.partial(kernel, tile=tile),
        grid=(programs, blocks(height, tile.rows), kv_heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 3,
        out_shape=results,
        cost_estimate=estimate(
            flops=2 * products * queries.shape[3], moved=bytes_of((operands, results)), exponentials=products
        ),
        compiler_params=pltriton.CompilerParams(num_warps=warp_count, num_stages=1),
        interpret=interpret,
        name=kernel.__name__.removesuffix("_kernel"),
    )(*operands)
    return first, top, total
