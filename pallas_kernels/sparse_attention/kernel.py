"""The Triton kernel of attention over several pieces.

One call handles one piece. The grid is (splits of the piece's rows, blocks of query rows, KV heads, batch). A program
runs online softmax over its split and writes an unnormalized output, the maximum score and the sum of exponentials. XLA
merges the partial results of all programs and pieces by log-sum-exp.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.sparse_attention.operands import Piece
from pallas_kernels.tiles import MASKED, blocks, can_do, dot, group_rows, iota, row_block, spans, warps

PROGRAMS = 512  # about four for each multiprocessor of an H200 or A100; more would only write more partial outputs


class Tile(NamedTuple):
    """Static sizes of one program.

    Attributes:
        scale: factor by which the scores are multiplied.
        group: number of query heads of a KV head.
        rows: number of query rows.
        block: number of rows of the piece that are loaded at once.
        steps: number of blocks that the program loads one after the other.
    """

    scale: float
    group: int
    rows: int
    block: int
    steps: int


def piece_attention_kernel(q, piece, out, top, total, *, tile):  # type: ignore[no-untyped-def]
    """One program: compute attention of a block of query rows over `steps` blocks of a piece.

    q is [B, h_kv, M, d], and k and v are [B, h_kv, N, d]. For each query row the program writes the unnormalized output
    [d] to `out`, the maximum score to `top`, and the sum of exp(score - maximum) to `total`, all float32.
    """
    j, i, h, b = (pl.program_id(axis) for axis in range(4))
    k, v, valid = piece
    row = iota(i * tile.rows, tile.rows)
    row_there = row < q.shape[2]
    cut = [(iota(start, width), iota(start, width) < q.shape[3]) for start, width in spans(q.shape[3])]
    queries = [
        pltriton.load(q.at[b, h, row[:, None], d[None]], mask=row_there[:, None] & there[None], other=0.0)
        for d, there in cut
    ]
    query = lax.div(row, jnp.int32(tile.group))

    def seen_by(n, n_there):  # type: ignore[no-untyped-def]
        # An axis of size 1 is broadcast, so its index is always 0.
        at = [x if size > 1 else x * 0 for x, size in zip((b, h, query[:, None], n[None]), valid.shape, strict=True)]
        return pltriton.load(valid.at[tuple(at)], mask=row_there[:, None] & n_there[None], other=False)

    def step(s, carry):  # type: ignore[no-untyped-def]
        peak, mass, parts = carry
        n = iota((j * tile.steps + s) * tile.block, tile.block)
        n_there = n < k.shape[2]
        score = jnp.zeros((tile.rows, tile.block), jnp.float32)
        for query_part, (d, there) in zip(queries, cut, strict=True):
            mask = n_there[:, None] & there[None]
            key = pltriton.load(k.at[b, h, n[:, None], d[None]], mask=mask, other=0.0)
            score += dot(query_part, key, transposed=True)
        score = jnp.where(seen_by(n, n_there), score * tile.scale, MASKED)
        new = jnp.maximum(peak, score.max(axis=1))
        weight = jnp.where(score > MASKED, jnp.exp(score - new[:, None]), 0.0)
        shrink = jnp.exp(peak - new)
        values = [
            pltriton.load(v.at[b, h, n[:, None], d[None]], mask=n_there[:, None] & there[None], other=0.0)
            for d, there in cut
        ]
        short = weight.astype(v.dtype)
        parts = tuple(part * shrink[:, None] + dot(short, x) for part, x in zip(parts, values, strict=True))
        return new, mass * shrink + weight.sum(axis=1), parts

    rows = tile.rows
    start = jnp.full((rows,), MASKED), jnp.zeros((rows,)), tuple(jnp.zeros((rows, d.shape[0])) for d, _ in cut)
    peak, mass, parts = lax.fori_loop(0, tile.steps, step, start) if tile.steps > 1 else step(0, start)
    pltriton.store(top.at[b, h, j, row], peak, mask=row_there)
    pltriton.store(total.at[b, h, j, row], mass, mask=row_there)
    for part, (d, there) in zip(parts, cut, strict=True):
        pltriton.store(out.at[b, h, j, row[:, None], d[None]], part, mask=row_there[:, None] & there[None])


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
    batch, length, q_heads, dim = q.shape
    kv_heads = pieces[0].k.shape[1]
    group, queries = q_heads // kv_heads, group_rows(q, kv_heads)
    partial_results = [partial_attention(queries, piece, scale, group, interpret) for piece in pieces]
    top = functools.reduce(jnp.maximum, [peak.max(axis=2) for _, peak, _ in partial_results])
    mass, out = jnp.zeros(()), jnp.zeros(())
    for part, peak, total in partial_results:
        shrink = jnp.exp(peak - top[:, :, None])
        mass = mass + (total * shrink).sum(axis=2)
        out = out + (part * shrink[..., None]).sum(axis=2)
    out = out / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[..., None]
    out = out.reshape(batch, kv_heads, length, group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape).astype(q.dtype)


def partial_attention(
    queries: jax.Array, piece: Piece, scale: float, group: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute attention of query rows [B, h_kv, M, d] over one piece, split over programs.

    Returns:
        Unnormalized outputs [B, h_kv, splits, M, d], maxima [B, h_kv, splits, M] and sums [B, h_kv, splits, M], all
        float32.
    """
    k, v, _ = piece
    batch, kv_heads, height, dim = queries.shape
    rows = row_block(height, queries, k, v)
    block = 32 if jnp.float32 in (queries.dtype, k.dtype, v.dtype) else 64
    count, others = blocks(k.shape[2], block), batch * kv_heads * blocks(height, rows)
    steps = blocks(count, max(1, PROGRAMS // others))
    splits = blocks(count, steps)
    anywhere, shape = pl.BlockSpec(memory_space=pl.ANY), (batch, kv_heads, splits, height)
    results = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, dim), shape, shape)]
    scores = batch * kv_heads * height * k.shape[2]
    out, top, total = pl.pallas_call(
        functools.partial(piece_attention_kernel, tile=Tile(scale, group, rows, block, steps)),
        grid=(splits, blocks(height, rows), kv_heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, (queries, piece))),
        out_specs=[anywhere] * 3,
        out_shape=results,
        cost_estimate=estimate(flops=4 * scores * dim, moved=bytes_of((queries, piece, results)), exponentials=scores),
        compiler_params=pltriton.CompilerParams(num_warps=warps(dim, queries, k, v), num_stages=2),
        interpret=interpret,
        name="piece_attention",
    )(queries, piece)
    return out, top, total
