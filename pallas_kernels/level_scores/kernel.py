"""The Triton kernel of level_scores. One program handles one query and one KV head of one row.

First the program chooses the groups. Then it scores the chunks of these groups, one block after the other, and writes
the logit of each chunk: the logarithm of the sum of the masses of its landmarks. Finally it completes the softmax over
all blocks. Other threads read what a thread wrote. So all threads wait for each other in between.

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
from pallas_kernels.tiles import LEAST, MASKED, barrier, blocks, can_do, group_rows, iota
from pallas_kernels.unpack import exp2

MOST_PARTS = 16  # landmarks of a chunk
TILE = 2_048  # numbers of a tile of products
FINISHED = 256  # chunks whose scores are completed at once


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
    share = 1 / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)
    barrier(sizes.interpret)
    head = iota(0, sizes.heads)

    def finish(j: jax.Array, nothing: jax.Array) -> jax.Array:
        """Write the scores of some of the chunks."""
        at = iota(j * FINISHED, FINISHED)
        mask = (head < sizes.group)[:, None] & (at < sizes.chunks)[None]
        logit = pltriton.load(logits.at[*place, head[:, None], at[None]], mask=mask, other=MASKED)
        score = (exp2(logit - peak[:, None], sizes.interpret) * share[:, None]).max(axis=0)
        score = jnp.where(logit.max(axis=0) > LEAST_PEAK, score, -1.0)
        pltriton.store(found.scores.at[*place, at], score, mask=at < sizes.chunks)
        return nothing

    lax.fori_loop(0, blocks(sizes.chunks, FINISHED), finish, jnp.int32(0))


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
    lead = scores.shape[:3]
    results: Any = [jax.ShapeDtypeStruct((*lead, sizes.chunks), kind) for kind in (jnp.float32, jnp.int32)]
    found = NearScores(*results)
    scratch = [
        jax.ShapeDtypeStruct((*lead, count), jnp.int32),
        jax.ShapeDtypeStruct((*lead, sizes.group, sizes.chunks), jnp.float32),
    ]
    rows = group_rows(q, heads).reshape(batch, heads * length, sizes.group, q.shape[3])
    operands, anywhere = (rows, scores, by_row(levels, sizes.parts)), pl.BlockSpec(memory_space=pl.ANY)
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
