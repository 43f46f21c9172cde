"""The Triton kernel of level_scores. One program handles one query and one KV head of one row.

First the program chooses the groups. Then it scores the chunks of these groups, one block after the other. A tile of
products has one row for each landmark of a chunk and each query head. So the sum over the rows of the Hadamard
transform, each with its sign, needs no other tile. The program writes the masses of a block, relative to the largest
logit of the block.

Finally it completes the softmax over all blocks. What was written is read back by other threads, which therefore wait
for each other in between.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.level_scores.groups import MOST, Place, Sizes, choose_groups, chunks_at, wait
from pallas_kernels.level_scores.operands import NearScores, TwoLevels
from pallas_kernels.tiles import LEAST, MASKED, blocks, can_do, dot, iota, spans
from pallas_kernels.unpack import signed_numbers

MOST_PARTS = 16  # landmarks of a chunk
TILE = 2_048  # numbers of a tile of logits


def level_scores_kernel(operands, found, scratch, *, sizes):  # type: ignore[no-untyped-def]
    """One program: choose the groups of one query and KV head, and score their chunks.

    Args:
        operands: refs of q, scores and levels, as in `pallas_kernels.level_scores`.
        found: refs of the results, as NearScores.
        scratch: refs of groups, int32 [B, h_kv, T, count]; of masses, float32 [B, h_kv, T, group, m], which are -1
            where there is no candidate; and of tops, float32 [B, h_kv, T, blocks, heads], the largest logit of each
            block.
        sizes: the sizes of the program.
    """
    q, scores, levels = operands
    groups, masses, tops = scratch
    place = Place(pl.program_id(2), pl.program_id(1), pl.program_id(0))
    choose_groups(scores, groups, place, sizes)
    wait(sizes)
    queries = Queries(q, place, sizes)
    head = iota(0, sizes.heads)
    head_there = head < sizes.group

    def score(j: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Write the masses of one block. Return the largest logits so far, and the sums of all masses."""
        peak, total = before
        at = iota(j * sizes.block, sizes.block)
        ids, there = chunks_at(at, scores, groups, place, sizes)
        pltriton.store(found.ids.at[*place, at], jnp.where(there, ids, 0), mask=at < sizes.chunks)
        logits = block_logits(queries, levels, ids, there, sizes)
        logits = jnp.where(there[None], logits, MASKED).reshape(sizes.parts, sizes.heads, sizes.block)
        top = logits.max(axis=2).max(axis=0)
        mass = jnp.where(there[None, None], jnp.exp(logits - top[None, :, None]), 0.0).sum(axis=0)
        mask = head_there[:, None] & (at < sizes.chunks)[None]
        written = jnp.where(there[None], mass, -1.0)
        pltriton.store(masses.at[*place, head[:, None], at[None]], written, mask=mask)
        pltriton.store(tops.at[*place, j, head], top)
        highest = jnp.maximum(peak, top)
        return highest, total * jnp.exp(peak - highest) + mass.sum(axis=1) * jnp.exp(top - highest)

    start = jnp.full((sizes.heads,), MASKED, jnp.float32), jnp.zeros((sizes.heads,), jnp.float32)
    count = blocks(sizes.chunks, sizes.block)
    peak, total = lax.fori_loop(0, count, score, start)
    share = 1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    wait(sizes)

    def finish(j: jax.Array, nothing: jax.Array) -> jax.Array:
        """Write the scores of one block."""
        at = iota(j * sizes.block, sizes.block)
        mask = head_there[:, None] & (at < sizes.chunks)[None]
        mass = pltriton.load(masses.at[*place, head[:, None], at[None]], mask=mask, other=-1.0)
        top = pltriton.load(tops.at[*place, j, head])
        score = (mass * (jnp.exp(top - peak) * share)[:, None]).max(axis=0)
        score = jnp.where(mass.max(axis=0) < 0, -1.0, score)
        pltriton.store(found.scores.at[*place, at], score, mask=at < sizes.chunks)
        return nothing

    lax.fori_loop(0, count, finish, jnp.int32(0))


# The logits


class Queries:
    """The tiles of the query rows of a program, each of which is loaded once.

    Row j * heads + i of a tile belongs to landmark j and query head i. Rows of heads that do not exist are 0.
    """

    def __init__(self, q: Any, place: Place, sizes: Sizes) -> None:
        row = iota(0, sizes.parts * sizes.heads)
        self.q, self.place, self.group = q, place, sizes.group
        self.part, self.head = lax.div(row, jnp.int32(sizes.heads)), lax.rem(row, jnp.int32(sizes.heads))
        self.tiles: dict[tuple[int, int, int], jax.Array] = {}

    def tile(self, start: int, width: int, count: int) -> jax.Array:
        """Return `width` columns from `start` on. Those after the first `count` are 0."""
        key = start, width, min(count, width)
        if key not in self.tiles:
            column = iota(0, width)
            mask = (self.head < self.group)[:, None] & (column < key[2])[None]
            head = self.place.h * self.group + self.head
            at = self.place.b, self.place.t, head[:, None], (start + column)[None]
            self.tiles[key] = pltriton.load(self.q.at[at], mask=mask, other=0.0)
        return self.tiles[key]

    def sign(self, row: int) -> jax.Array:
        """Return the sign of row `row` of the Hadamard transform in the landmark of each query row, 1 or -1."""
        odd = self.part & row
        odd = odd ^ (odd >> 2)
        return (1 - 2 * ((odd ^ (odd >> 1)) & 1)).astype(jnp.float32)

    def squares(self, tiles: list[jax.Array]) -> jax.Array:
        """Return the squared length of each query row from the tiles of all of its columns."""
        return functools.reduce(jnp.add, [(tile.astype(jnp.float32) ** 2).sum(axis=1) for tile in tiles])


def block_logits(queries: Queries, levels: Any, ids: jax.Array, there: jax.Array, sizes: Sizes) -> jax.Array:
    """Return the logits of the landmarks of n chunks, float32 [parts * heads, n]."""
    b, h = queries.place.b, queries.place.h
    dim = queries.q.shape[3]

    def product(level: Any, scale: Any, bits: int | None, row: int) -> jax.Array:
        """Return the products with row `row` of a level."""
        width = dim if bits is None else dim * bits // 8
        out = jnp.zeros((sizes.parts * sizes.heads, sizes.block), jnp.float32)
        wide = queries.q.dtype == jnp.float32 or level.dtype == jnp.float32
        for start, columns in spans(width, 32 if wide else 64):
            column = iota(start, columns)
            at = b, h, ids[:, None], (row * width + column)[None]
            mask = there[:, None] & (column < width)[None]
            loaded = pltriton.load(level.at[at], mask=mask, other=0 if bits else 0.0)
            for place in range(8 // bits if bits else 1):
                query = queries.tile(place * width + start, columns, width - start)
                numbers = signed_numbers(loaded, place, bits, query.dtype, sizes.interpret) if bits else loaded
                out += dot(query, numbers, transposed=True)
        if scale is not None:
            step = pltriton.load(scale.at[b, h, ids, jnp.full_like(ids, row)], mask=there, other=0.0)
            out *= step.astype(jnp.float32)[None]
        return out

    logits = product(levels.means, levels.mean_scale, sizes.mean_bits, 0)
    for row in range(1, sizes.parts):
        found = product(levels.details, levels.detail_scale, sizes.detail_bits, row - 1)
        logits += queries.sign(row)[:, None] * found
    logits *= sizes.scale
    if levels.spread is not None:
        at = b, h, ids[None], queries.part[:, None]
        spread = pltriton.load(levels.spread.at[at], mask=jnp.broadcast_to(there[None], logits.shape), other=0.0)
        squares = queries.squares([queries.tile(start, width, dim - start) for start, width in spans(dim, 64)])
        logits += (squares * (sizes.scale**2 / 2))[:, None] * spread.astype(jnp.float32) ** 2
    return logits


# Calls


def sizes_of(q: jax.Array, levels: TwoLevels, interpret: bool, **options: Any) -> Sizes:
    """Return the sizes of a program; `options` are groups, size and scale.

    Raises:
        NotImplementedError: a chunk has more than MOST_PARTS landmarks, heads are wider than 256, an array is empty, or
            a dtype is not float32, bfloat16 or float16.
    """
    dim, group = q.shape[3], q.shape[2] // levels.means.shape[1]
    parts = levels.parts(dim)
    if parts > MOST_PARTS:
        raise NotImplementedError(f"level_scores: the kernel takes up to {MOST_PARTS} landmarks a chunk, got {parts}")
    wide = [x for x in (q, levels.means, levels.details) if jnp.issubdtype(x.dtype, jnp.floating)]
    can_do("level_scores", dim, *wide, packed=(levels.means, levels.details))
    heads = max(1 << (group - 1).bit_length(), LEAST // parts)
    most = TILE // 2 if any(x.dtype == jnp.float32 for x in wide) else TILE
    block = max(LEAST, min(128, most // (parts * heads)))
    return Sizes(
        **options,
        parts=parts,
        group=group,
        heads=heads,
        block=block,
        mean_bits=levels.mean_bits(dim),
        detail_bits=levels.detail_bits(dim),
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("count", "size", "scale", "interpret"))
def level_scores(
    q: jax.Array, scores: jax.Array, levels: TwoLevels, *, count: int, size: int, scale: float, interpret: bool
) -> NearScores:
    """See `pallas_kernels.level_scores`.

    Raises:
        NotImplementedError: there are more than MOST chunks, or `sizes_of` raises it.
    """
    if scores.shape[3] > MOST:
        raise NotImplementedError(f"level_scores: the kernel takes up to {MOST} chunks, got {scores.shape[3]}")
    sizes = sizes_of(q, levels, interpret, groups=count, size=size, scale=scale)
    lead = scores.shape[:3]
    results: Any = [jax.ShapeDtypeStruct((*lead, sizes.chunks), kind) for kind in (jnp.float32, jnp.int32)]
    found = NearScores(*results)
    scratch = [
        jax.ShapeDtypeStruct((*lead, count), jnp.int32),
        jax.ShapeDtypeStruct((*lead, sizes.group, sizes.chunks), jnp.float32),
        jax.ShapeDtypeStruct((*lead, blocks(sizes.chunks, sizes.block), sizes.heads), jnp.float32),
    ]
    operands, anywhere = (q, scores, levels), pl.BlockSpec(memory_space=pl.ANY)
    batch, heads, length, chunks = scores.shape
    near = bytes_of(levels) * length * sizes.chunks // chunks
    products = batch * length * q.shape[2] * sizes.chunks * sizes.parts
    result: NearScores
    result, _ = pl.pallas_call(
        functools.partial(level_scores_kernel, sizes=sizes),
        grid=(length, heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, operands)],
        out_specs=[jax.tree.map(lambda _: anywhere, found), [anywhere] * 3],
        out_shape=[found, scratch],
        cost_estimate=estimate(
            flops=2 * products * q.shape[3],
            moved=bytes_of((q, scores, found, scratch[1])) + near,
            exponentials=products,
        ),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="level_scores",
    )(operands)
    return result
