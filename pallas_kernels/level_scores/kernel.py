"""The Triton kernels of level_scores.

`level_scores_kernel` handles one query and one KV head of one row. First it chooses the groups. Then it scores the
chunks of these groups, one block after the other, and writes the logit of each chunk: the logarithm of the sum of the
masses of its landmarks. Finally it completes the softmax over all blocks. Other threads read what a thread wrote. So
all threads wait for each other in between.

With `split`, three kernels do this. The second has a program for each block of chunks, so that a small batch uses the
whole GPU.

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
from pallas_kernels.tiles import LEAST, MASKED, barrier, blocks, can_do, group_rows, iota, power_of_two
from pallas_kernels.unpack import exp2

MOST_PARTS = 16  # landmarks of a chunk
TILE = 2_048  # numbers of a tile of products
FINISHED = 256  # chunks whose scores are completed at once
CHOOSING = 16  # warps of a program that only chooses groups


def level_scores_kernel(operands, found, scratch, *, sizes):  # type: ignore[no-untyped-def]
    """One program: choose the groups of one query and KV head, and score their chunks.

    Args:
        operands: refs of q, [B, h_kv * T, group, d]; of scores, [B, h_kv, T, n]; and of levels, as TwoLevels. All rows
            of the details are rows of one array [B, h_kv, n * (s - 1), ...] if they are packed, and so are all spreads.
        found: refs of the results, as NearScores.
        scratch: refs of groups, int32 [B, h_kv, T, count], and of logits, float32 [B, h_kv, T, group, m].
        sizes: the sizes of the program.
    """
    groups, logits = scratch
    place = Place(pl.program_id(2), pl.program_id(1), pl.program_id(0))
    choose_groups(operands[1], groups, place, sizes)
    barrier(sizes.interpret)
    score = (floats if sizes.bits is None else packed).score
    peak, mass = score(operands, found.ids, scratch, place, sizes)
    barrier(sizes.interpret)

    def finish(j: jax.Array, nothing: jax.Array) -> jax.Array:
        complete(j, logits, found.scores, (peak, mass), place, sizes)
        return nothing

    lax.fori_loop(0, blocks(sizes.chunks, FINISHED), finish, jnp.int32(0))


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


# The same in three kernels


def level_groups_kernel(scores, groups, *, sizes):  # type: ignore[no-untyped-def]
    """One program: choose the groups of one query and KV head. The grid is (queries, KV heads, batch)."""
    choose_groups(scores, groups, Place(pl.program_id(2), pl.program_id(1), pl.program_id(0)), sizes)


def level_logits_kernel(operands, groups, ids, logits, top, total, *, sizes):  # type: ignore[no-untyped-def]
    """One program: write the chunks of one block and their logits. The grid is (queries * blocks, KV heads, batch).

    Args:
        operands: as in `level_scores_kernel`.
        groups: ref of the chosen groups, int32 [B, h_kv, T, count].
        ids: ref of the chunks, int32 [B, h_kv, T, m].
        logits: ref, float32 [B, h_kv, T, group, m].
        top: ref of the largest logit of each block, float32 [B, h_kv, T, blocks, group].
        total: ref of the masses of each block, relative to its largest logit. The shape is that of `top`.
        sizes: the sizes of the program.
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


def in_three(operands: Any, sizes: Sizes) -> NearScores:
    """Run the three kernels. `operands` are those of `level_scores_kernel`, and `sizes` those of its programs."""
    rows, scores, _ = operands
    batch, heads, length, _ = lead = scores.shape
    number, anywhere = blocks(sizes.chunks, sizes.block), pl.BlockSpec(memory_space=pl.ANY)

    def shape(*last: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((*lead[:3], *last), dtype)

    def run(kernel: Any, grid: int, given: Any, out: Any, warps: int = 4, products: int = 0) -> Any:
        """Run a kernel with `grid` programs for each KV head."""
        return pl.pallas_call(
            functools.partial(kernel, sizes=sizes),
            grid=(grid, heads, batch),
            in_specs=list(jax.tree.map(lambda _: anywhere, given)),
            out_specs=jax.tree.map(lambda _: anywhere, out),
            out_shape=out,
            cost_estimate=estimate(
                flops=2 * products * rows.shape[3], moved=bytes_of((given, out)), exponentials=products
            ),
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=sizes.interpret,
            name=kernel.__name__.removesuffix("_kernel"),
        )(*given)

    groups = run(level_groups_kernel, length, (scores,), shape(sizes.groups, dtype=jnp.int32), CHOOSING)
    out = [shape(sizes.chunks, dtype=jnp.int32), shape(sizes.group, sizes.chunks)]
    out += [shape(number, sizes.group)] * 2
    products = batch * heads * length * sizes.group * sizes.chunks * sizes.parts
    ids, *partial = run(level_logits_kernel, number * length, (operands, groups), out, products=products)
    finished = blocks(sizes.chunks, FINISHED) * length
    return NearScores(run(level_finish_kernel, finished, tuple(partial), shape(sizes.chunks)), ids)


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


@functools.partial(jax.jit, static_argnames=("count", "size", "scale", "interpret", "split"))
def level_scores(
    q: jax.Array,
    scores: jax.Array,
    levels: TwoLevels,
    *,
    count: int,
    size: int,
    scale: float,
    interpret: bool,
    split: bool = False,
) -> NearScores:
    """See `pallas_kernels.level_scores`. `split` computes the same in three kernels.

    Raises:
        NotImplementedError: there are more than MOST chunks, or `sizes_of` raises it.
    """
    batch, heads, length, chunks = scores.shape
    if chunks > MOST:
        raise NotImplementedError(f"level_scores: the kernel takes up to {MOST} chunks, got {chunks}")
    sizes = sizes_of(q, levels, interpret, groups=count, size=size, scale=scale)
    lead = scores.shape[:3]
    results: Any = [jax.ShapeDtypeStruct((*lead, sizes.chunks), kind) for kind in (jnp.float32, jnp.int32)]
    found = NearScores(*results)
    scratch = [
        jax.ShapeDtypeStruct((*lead, count), jnp.int32),
        jax.ShapeDtypeStruct((*lead, sizes.group, sizes.chunks), jnp.float32),
    ]
    rows = group_rows(q, heads).reshape(batch, heads * length, sizes.group, q.shape[3])
    operands, anywhere = (rows, scores, by_row(levels, sizes.parts)), pl.BlockSpec(memory_space=pl.ANY)
    if split:
        return in_three(operands, sizes)
    near = bytes_of(levels) * length * sizes.chunks // chunks
    products = batch * length * q.shape[2] * sizes.chunks * sizes.parts
    result: NearScores
    result, _ = pl.pallas_call(
        functools.partial(level_scores_kernel, sizes=sizes),
        grid=(length, heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, operands)],
        out_specs=[jax.tree.map(lambda _: anywhere, found), [anywhere] * 2],
        out_shape=[found, scratch],
        cost_estimate=estimate(
            flops=2 * products * q.shape[3],
            moved=bytes_of((q, scores, found, scratch)) + near,
            exponentials=products,
        ),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="level_scores",
    )(operands)
    return result
