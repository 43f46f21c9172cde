"""The Triton kernel that scores chunks by landmarks that are not packed, and the calls of all kernels of this op.

The grid is (blocks of chunks, blocks of query rows, KV heads, batch). A query row is one query head at one position;
`group_rows` puts all query rows of a KV head together, so that a program loads each landmark once for its whole block
of query rows. `packed` is for packed landmarks. Both kernels write a logit for each query row and chunk, and the
maximum and the sum of each program. `finish` completes the softmax over all programs with these.

Logits are multiplied by log2(e), because GPUs compute powers of 2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.chunk_scores.finish import finish, joined
from pallas_kernels.chunk_scores.operands import Chunks
from pallas_kernels.chunk_scores.packed import packed_logits_kernel, tile_of
from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.tiles import (
    LEAST,
    LOG2_E,
    MASKED,
    blocks,
    can_do,
    dot,
    group_rows,
    iota,
    row_block,
    summed,
    warps,
)
from pallas_kernels.unpack import exp2

MOST_PARTS = 16  # the most landmarks a chunk may have; each takes one tile of logits in registers


class Tile(NamedTuple):
    """Static sizes of one program.

    Attributes:
        scale: factor by which the products are multiplied.
        rows: number of query rows.
        block: number of chunks.
        interpret: whether JAX's interpreter runs the program.
    """

    scale: float
    rows: int
    block: int
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


def chunk_logits_kernel(q, chunks, logits, top, total, *, tile):  # type: ignore[no-untyped-def]
    """One program: compute the logits [rows, block] of a block of query rows and a block of chunks.

    The logit of a chunk with several landmarks is the logarithm of the sum of their masses. The program writes the
    logits. Chunks that are not candidates get MASKED. For each query row it also writes the maximum logit to `top`, and
    the sum of exp2(logit - maximum) over the candidates to `total`. The results are float32.

    q is [B, h_kv, R, d], and the landmarks are [B, h_kv, m, d]. Refs of `chunks` are Chunks.
    """
    j, i, h, b = (pl.program_id(axis) for axis in range(4))
    row, chunk = iota(i * tile.rows, tile.rows), iota(j * tile.block, tile.block)
    row_there, chunk_there = row < q.shape[2], chunk < chunks.candidates.shape[2]
    candidate = pltriton.load(chunks.candidates.at[b, h, chunk], mask=chunk_there, other=False)[None]
    queries = query_tiles(q, chunks.landmarks, Rows(b, h, row, row_there))
    each = []
    for part in range(chunks.parts):
        rows = Rows(b, h, chunk * chunks.parts + part, chunk_there)
        each.append(jnp.where(candidate, landmark_logits(queries, chunks, rows, tile.scale), MASKED))
    logit = joined(each, tile.interpret)
    peak = logit.max(axis=1)
    weight = jnp.where(candidate, exp2(logit - peak[:, None], tile.interpret), 0.0)
    pltriton.store(logits.at[b, h, row[:, None], chunk[None]], logit, mask=row_there[:, None] & chunk_there[None])
    pltriton.store(top.at[b, h, j, row], peak, mask=row_there)
    pltriton.store(total.at[b, h, j, row], weight.sum(axis=1), mask=row_there)


def query_tiles(q: Any, landmarks: Any, rows: Rows) -> list[jax.Array]:
    """Load the tiles [query rows, width] of query rows, one for each span of the columns that a product sums over."""
    b, h, number, there = rows
    tiles = []
    for start, width in summed(q.shape[3], q, landmarks):
        d = iota(start, width)
        mask = there[:, None] & (d < q.shape[3])[None]
        tiles.append(pltriton.load(q.at[b, h, number[:, None], d[None]], mask=mask, other=0.0))
    return tiles


def landmark_logits(queries: list[jax.Array], chunks: Any, rows: Rows, scale: float) -> jax.Array:
    """Return the logits of query rows and n landmarks, float32 [query rows, n].

    Args:
        queries: the result of `query_tiles`.
        chunks: the kernel's refs, as Chunks.
        rows: the rows of the landmarks.
    """
    b, h, number, there = rows
    landmarks, start = chunks.landmarks, 0
    product = jnp.zeros((queries[0].shape[0], number.shape[0]), jnp.float32)
    for query in queries:
        d = iota(start, query.shape[1])
        mask = there[:, None] & (d < landmarks.shape[3])[None]
        keys = pltriton.load(landmarks.at[b, h, number[:, None], d[None]], mask=mask, other=0.0)
        product += dot(query, keys, transposed=True)
        start += query.shape[1]
    product *= scale * LOG2_E
    if chunks.spread is None:
        return product
    square = functools.reduce(jnp.add, [(query.astype(jnp.float32) ** 2).sum(axis=1) for query in queries])
    spread = pltriton.load(chunks.spread.at[b, h, number, jnp.zeros_like(number)], mask=there, other=0.0)
    return product + (square * (scale**2 / 2 * LOG2_E))[:, None] * (spread.astype(jnp.float32) ** 2)[None]


# Calls


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def chunk_scores(q: jax.Array, chunks: Chunks, scale: float, interpret: bool) -> jax.Array:
    """See `pallas_kernels.chunk_scores`. Under vmap, queries of several rows on one prompt read its landmarks once.

    Raises:
        NotImplementedError: as in `scores_of`.
    """
    scores = functools.partial(scores_of, scale=scale, interpret=interpret)
    run = jax.custom_batching.custom_vmap(scores)

    @run.def_vmap
    def run_rows(size: int, batched: Any, q: jax.Array, chunks: Chunks) -> tuple[jax.Array, bool]:
        if any(jax.tree.leaves(batched[1])) or not batched[0]:
            axes = jax.tree.map(lambda one: 0 if one else None, tuple(batched))
            return jax.vmap(scores, axes)(q, chunks), True
        _, batch, length, *head = q.shape
        found = scores(q.swapaxes(0, 1).reshape(batch, size * length, *head), chunks)
        return jnp.moveaxis(found.reshape(*found.shape[:2], size, length, -1), 2, 0), True

    result: jax.Array = run(q, chunks)
    return result


def scores_of(q: jax.Array, chunks: Chunks, scale: float, interpret: bool) -> jax.Array:
    """See `pallas_kernels.chunk_scores`.

    Raises:
        NotImplementedError: heads are wider than 256, a chunk has more than 16 landmarks, there are too many chunks for
            `finish`, an array is empty, or a dtype is not float32, bfloat16 or float16.
    """
    if chunks.parts > MOST_PARTS:
        raise NotImplementedError(
            f"chunk_scores: the kernel takes up to {MOST_PARTS} landmarks a chunk, got {chunks.parts}"
        )
    kv_heads, bits = chunks.landmarks.shape[1], chunks.bits(q.shape[3])
    queries, kernel = group_rows(q, kv_heads), chunk_logits_kernel
    if chunks.scale is None or bits is None:
        multiplied = q, chunks.landmarks
        can_do("chunk_scores", q.shape[3], *multiplied)
        tile: Any = tile_of_floats(scale, queries, chunks, interpret)
        warp_count = warps(q.shape[3], *multiplied)
    else:
        can_do("chunk_scores", q.shape[3], q, chunks.scale, packed=(chunks.landmarks,))
        sizes = q.shape[0] * kv_heads, queries.shape[2], chunks.candidates.shape[2]
        tile, warp_count, kernel = tile_of(scale, bits, sizes, interpret), 4, packed_logits_kernel
    partial = launch(kernel, queries, chunks, tile, warp_count)
    return finish(partial, chunks.candidates, q.shape[2] // kv_heads, interpret=interpret)


def tile_of_floats(scale: float, q: jax.Array, chunks: Chunks, interpret: bool) -> Tile:
    """Return the sizes of a program for query rows [B, h_kv, R, d] and landmarks that are not packed."""
    landmarks, parts = chunks.landmarks, chunks.parts
    # Float32 tiles take twice the registers, so the block is half as large.
    most = 128 if q.dtype == landmarks.dtype != jnp.float32 else 64
    block = max(LEAST, 1 << ((most // parts).bit_length() - 1)) if parts < most else LEAST
    return Tile(scale, row_block(q.shape[2], q, landmarks), block, interpret)


def launch(
    kernel: Any, queries: jax.Array, chunks: Chunks, tile: Any, warp_count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run one of the two kernels on query rows [B, h_kv, R, d].

    Returns:
        The logits [B, h_kv, R, n], the maxima [B, h_kv, programs, R] and the sums [B, h_kv, programs, R], all float32.
    """
    batch, kv_heads, count = chunks.candidates.shape
    height, programs = queries.shape[2], blocks(count, tile.block)
    operands, anywhere = (queries, chunks), pl.BlockSpec(memory_space=pl.ANY)
    shapes = (batch, kv_heads, height, count), *[(batch, kv_heads, programs, height)] * 2
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    products = batch * kv_heads * height * count * chunks.parts
    logits, top, total = pl.pallas_call(
        functools.partial(kernel, tile=tile),
        grid=(programs, blocks(height, tile.rows), kv_heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 3,
        out_shape=results,
        cost_estimate=estimate(
            flops=2 * products * queries.shape[3], moved=bytes_of((operands, results)), exponentials=products
        ),
        compiler_params=pltriton.CompilerParams(num_warps=warp_count, num_stages=1),
        interpret=tile.interpret,
        name=kernel.__name__.removesuffix("_kernel"),
    )(*operands)
    return logits, top, total
