"""The Triton kernels of level_scores.

The first kernel chooses the groups of a query and a KV head. The second has a program for each block of their chunks.
It writes the logit of each chunk: the logarithm of the sum of the masses of its landmarks. The third completes the
softmax over all blocks.

Logits are multiplied by log2(e), because GPUs compute powers of 2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.chunk_scores.packed import BLOCK, LANES, LEAST_PEAK, ROWS
from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.level_scores import floats, packed
from pallas_kernels.level_scores.groups import MOST, Place, Sizes, choose_groups
from pallas_kernels.level_scores.operands import NearScores, TwoLevels
from pallas_kernels.tiles import LEAST, MASKED, blocks, can_do, group_rows, iota, power_of_two
from pallas_kernels.unpack import exp2

MOST_PARTS = 16  # landmarks of a chunk
TILE = 2_048  # numbers of a tile of products
FINISHED = 256  # chunks whose scores are completed at once
CHOOSING = 16  # warps of a program that only chooses groups


def level_groups_kernel(scores, groups, *, sizes):  # type: ignore[no-untyped-def]
    """One program: choose the groups of one query and KV head. The grid is (queries, KV heads, batch)."""
    choose_groups(scores, groups, Place(pl.program_id(2), pl.program_id(1), pl.program_id(0)), sizes)


def level_logits_kernel(operands, groups, ids, logits, top, total, *, sizes):  # type: ignore[no-untyped-def]
    """One program: write the chunks of one block and their logits. The grid is (queries * blocks, KV heads, batch).

    Args:
        operands: refs of q, [B, h_kv * T, group, d]; of scores, [B, h_kv, T, n]; and of levels, as TwoLevels. All rows
            of the details are rows of one array [B, h_kv, n * (s - 1), ...] if they are packed, and so are all spreads.
        groups: ref of the chosen groups, int32 [B, h_kv, T, count].
        ids: ref of the chunks, int32 [B, h_kv, T, m].
        logits: ref, float32 [B, h_kv, T, group, m].
        top: ref of the largest logit of each block, float32 [B, h_kv, T, blocks, group].
        total: ref of the masses of each block, relative to its largest logit. The shape is that of `top`.
    """
    number = blocks(sizes.chunks, sizes.block)
    program = pl.program_id(0)
    place = Place(pl.program_id(2), pl.program_id(1), lax.div(program, jnp.int32(number)))
    j = program - place.t * number
    score = (floats if sizes.bits is None else packed).score
    peak, mass = score(operands, ids, (groups, logits), place, sizes, j)
    head = iota(0, sizes.heads)
    for ref, value in ((top, peak), (total, mass)):
        pltriton.store(ref.at[*place, jnp.full_like(head, j), head], value, mask=head < sizes.group)


def level_finish_kernel(logits, top, total, scores, *, sizes):  # type: ignore[no-untyped-def]
    """One program: complete the scores of FINISHED chunks. The grid is (queries * blocks, KV heads, batch).

    The arguments are those of `level_logits_kernel`; scores is a ref, float32 [B, h_kv, T, m].
    """
    number = blocks(sizes.chunks, FINISHED)
    program = pl.program_id(0)
    place = Place(pl.program_id(2), pl.program_id(1), lax.div(program, jnp.int32(number)))
    head, block = iota(0, sizes.heads), iota(0, power_of_two(top.shape[3]))
    mask = (block < top.shape[3])[:, None] & (head < sizes.group)[None]
    at = block[:, None], head[None]
    peaks = pltriton.load(top.at[*place, *at], mask=mask, other=LEAST_PEAK)
    peak = peaks.max(axis=0)
    sums = pltriton.load(total.at[*place, *at], mask=mask, other=0.0)
    mass = (sums * exp2(peaks - peak[None], sizes.interpret)).sum(axis=0)
    complete(program - place.t * number, logits, scores, (peak, mass), place, sizes)


def complete(
    j: jax.Array, logits: Any, scores: Any, softmax: tuple[jax.Array, jax.Array], place: Place, sizes: Sizes
) -> None:
    """Write the scores of block j of FINISHED chunks. `softmax` is the maximum and the mass of each query row."""
    peak, mass = softmax
    share = 1 / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)
    head, at = iota(0, sizes.heads), iota(j * FINISHED, FINISHED)
    mask = (head < sizes.group)[:, None] & (at < sizes.chunks)[None]
    logit = pltriton.load(logits.at[*place, head[:, None], at[None]], mask=mask, other=MASKED)
    score = (exp2(logit - peak[:, None], sizes.interpret) * share[:, None]).max(axis=0)
    score = jnp.where(logit.max(axis=0) > LEAST_PEAK, score, -1.0)
    pltriton.store(scores.at[*place, at], score, mask=at < sizes.chunks)


# Calls


def sizes_of(q: jax.Array, levels: TwoLevels, interpret: bool, **options: Any) -> Sizes:
    """Return the sizes of a program; `options` are groups, size and scale.

    Raises:
        NotImplementedError: a chunk has more than MOST_PARTS landmarks, a KV head has more than 16 query heads and the
            landmarks are packed, heads are wider than 256, an array is empty, or a dtype is not float32, bfloat16 or
            float16.
    """
    dim, group = q.shape[3], q.shape[2] // levels.means.shape[1]
    parts, bits = levels.parts(dim), levels.bits(dim)
    if parts > MOST_PARTS:
        raise NotImplementedError(f"level_scores: the kernel takes up to {MOST_PARTS} landmarks a chunk, got {parts}")
    heads = 1 << (group - 1).bit_length()
    if bits is None:
        arrays = q, levels.means, levels.details
        can_do("level_scores", dim, *arrays)
        heads = max(heads, LEAST // parts)
        most = TILE // 2 if any(x.dtype == jnp.float32 for x in arrays) else TILE
        block = max(LEAST, min(128, most // (parts * heads)))
    else:
        can_do("level_scores", dim, q, packed=(levels.means, levels.details))
        heads, block = max(heads, LANES), BLOCK
        if heads > ROWS:
            raise NotImplementedError(f"level_scores: the kernel takes up to {ROWS} query heads a KV head, got {group}")
    return Sizes(
        **options,
        parts=parts,
        queries=q.shape[1],
        group=group,
        heads=heads,
        block=block,
        bits=bits,
        interpret=interpret,
    )


def by_row(levels: TwoLevels, parts: int) -> TwoLevels:
    """Return packed details, all scales and all spreads as arrays with one row for each row of a level."""

    def rows(x: jax.Array | None, each: int) -> Any:
        return None if x is None else x.reshape(*x.shape[:2], x.shape[2] * each, x.shape[3] // each)

    details = levels.details if levels.detail_scale is None else rows(levels.details, parts - 1)
    return levels._replace(
        details=details, detail_scale=rows(levels.detail_scale, parts - 1), spread=rows(levels.spread, parts)
    )


@functools.partial(jax.jit, static_argnames=("count", "size", "scale", "interpret"))
def level_scores(
    q: jax.Array, scores: jax.Array, levels: TwoLevels, *, count: int, size: int, scale: float, interpret: bool
) -> NearScores:
    """See `pallas_kernels.level_scores`.

    Raises:
        NotImplementedError: there are more than MOST chunks, or `sizes_of` raises it.
    """
    batch, heads, length, chunks = scores.shape
    if chunks > MOST:
        raise NotImplementedError(f"level_scores: the kernel takes up to {MOST} chunks, got {chunks}")
    sizes = sizes_of(q, levels, interpret, groups=count, size=size, scale=scale)
    rows = group_rows(q, heads).reshape(batch, heads * length, sizes.group, q.shape[3])
    operands, anywhere = (rows, scores, by_row(levels, sizes.parts)), pl.BlockSpec(memory_space=pl.ANY)

    def shape(*last: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((batch, heads, length, *last), dtype)

    def run(kernel: Any, programs: int, given: Any, out: Any, warps: int = 4, **work: int) -> Any:
        """Run a kernel with `programs` programs for each query and KV head."""
        return pl.pallas_call(
            functools.partial(kernel, sizes=sizes),
            grid=(programs * length, heads, batch),
            in_specs=list(jax.tree.map(lambda _: anywhere, given)),
            out_specs=jax.tree.map(lambda _: anywhere, out),
            out_shape=out,
            cost_estimate=estimate(**{"flops": 0, "moved": bytes_of((given, out))} | work),
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name=kernel.__name__.removesuffix("_kernel"),
        )(*given)

    groups = run(level_groups_kernel, 1, (scores,), shape(count, dtype=jnp.int32), CHOOSING)
    number, products = blocks(sizes.chunks, sizes.block), batch * length * q.shape[2] * sizes.chunks * sizes.parts
    out = [shape(sizes.chunks, dtype=jnp.int32), shape(sizes.group, sizes.chunks)] + [shape(number, sizes.group)] * 2
    near = bytes_of(levels) * length * sizes.chunks // chunks
    work = {"flops": 2 * products * q.shape[3], "moved": bytes_of((q, out)) + near, "exponentials": products}
    ids, *partial = run(level_logits_kernel, number, (operands, groups), out, **work)
    finished = blocks(sizes.chunks, FINISHED)
    return NearScores(run(level_finish_kernel, finished, tuple(partial), shape(sizes.chunks)), ids)
