"""The Triton kernel of level_scores. One program handles one query and one KV head of one row.

First the program chooses the groups. Then it scores the chunks of these groups, one block after the other. A tile of
products has one row for each landmark of a chunk and each query head. So the sum over the rows of the Hadamard
transform, each with its sign, needs no other tile. The program writes the masses of a block, relative to the largest
logit of the block.

Finally it completes the softmax over all blocks. What was written is read back by other threads, which therefore wait
for each other in between.
"""

import functools
from typing import Any, NamedTuple

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
    queries = load_queries(q, levels, place, sizes)
    head = iota(0, sizes.heads)
    head_there = head < sizes.group

    def score(j: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Write the masses of one block. Return the largest logits so far, and the sums of all masses."""
        peak, total = before
        at = iota(j * sizes.block, sizes.block)
        ids, there = chunks_at(at, scores, groups, place, sizes)
        pltriton.store(found.ids.at[*place, at], jnp.where(there, ids, 0), mask=at < sizes.chunks)
        logits = block_logits(q, queries, levels, place, (ids, there), sizes)
        logits = jnp.where(there[None], logits, MASKED).reshape(sizes.parts, sizes.heads, sizes.block)
        top = logits.max(axis=0).max(axis=1)
        mass = jnp.where(there[None], jnp.exp(logits - top[None, :, None]).sum(axis=0), 0.0)
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


class Queries(NamedTuple):
    """The query rows of a program. Row j * heads + i of a tile belongs to landmark j and query head i.

    Attributes:
        part: int32 [R], the landmark of each row.
        squares: float32 [R], the squared length of each row.
        signs: float32 [R], 1 or -1 for each row of the Hadamard transform: its sign in the landmark of each query row.
        tiles: columns of all rows [R, width], by the first column, the width, and the number of columns that exist. The
            others are 0, and so are rows of heads that do not exist.
    """

    part: jax.Array
    squares: jax.Array
    signs: list[jax.Array]
    tiles: dict[tuple[int, int, int], jax.Array]


def load_queries(q: Any, levels: Any, place: Place, sizes: Sizes) -> Queries:
    """Load the query rows of a program."""
    b, h, t = place
    row, tiles = iota(0, sizes.parts * sizes.heads), {}
    part, head = lax.div(row, jnp.int32(sizes.heads)), lax.rem(row, jnp.int32(sizes.heads))

    def keys(level: Any, bits: int | None) -> list[tuple[int, int, int]]:
        return [key for _, _, each in columns_of(q, level, bits) for key in each]

    first = keys(levels.means, sizes.mean_bits)
    for start, width, count in first + keys(levels.details, sizes.detail_bits):
        if (start, width, count) not in tiles:
            column = iota(0, width)
            mask = (head < sizes.group)[:, None] & (column < count)[None]
            at = b, t, (h * sizes.group + head)[:, None], (start + column)[None]
            tiles[start, width, count] = pltriton.load(q.at[at], mask=mask, other=0.0)
    squares = functools.reduce(jnp.add, [(tiles[key].astype(jnp.float32) ** 2).sum(axis=1) for key in first])
    signs = []
    for number in range(sizes.parts):
        odd = part & number
        odd ^= odd >> 2
        odd = (odd ^ (odd >> 1)) & 1
        signs.append((1 - 2 * odd).astype(jnp.float32))
    return Queries(part, squares, signs, tiles)


def columns_of(q: Any, level: Any, bits: int | None) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """Return the tiles of the columns of one row of a level: (start, width, keys of `Queries.tiles`).

    A column is a number, or a byte if the level is packed. There is a key for each place of the bytes.
    """
    dim = q.shape[3]
    size, places = (dim, 1) if bits is None else (dim * bits // 8, 8 // bits)
    most = 32 if q.dtype == jnp.float32 or level.dtype == jnp.float32 else 64
    return [
        (start, width, [(place * size + start, width, min(width, size - start)) for place in range(places)])
        for start, width in spans(size, most)
    ]


def block_logits(
    q: Any, queries: Queries, levels: Any, place: Place, chunks: tuple[jax.Array, jax.Array], sizes: Sizes
) -> jax.Array:
    """Return the logits of the landmarks of n chunks, float32 [R, n].

    Args:
        q: ref of the queries.
        queries: their rows.
        levels: refs of the landmarks.
        place: the indices of the program.
        chunks: the n chunks, and which of them are candidates.
        sizes: the sizes of the program.
    """
    (b, h, _), (ids, there) = place, chunks

    def product(level: Any, scale: Any, bits: int | None, row: int) -> jax.Array:
        """Return the products with row `row` of a level."""
        width = q.shape[3] if bits is None else q.shape[3] * bits // 8
        out = jnp.zeros((sizes.parts * sizes.heads, sizes.block), jnp.float32)
        for start, columns, keys in columns_of(q, level, bits):
            column = iota(start, columns)
            mask = there[:, None] & (column < width)[None]
            at = b, h, ids[:, None], (row * width + column)[None]
            loaded = pltriton.load(level.at[at], mask=mask, other=0 if bits else 0.0)
            for byte_place, key in enumerate(keys):
                numbers = signed_numbers(loaded, byte_place, bits, q.dtype, sizes.interpret) if bits else loaded
                out += dot(queries.tiles[key], numbers, transposed=True)
        if scale is not None:
            step = pltriton.load(scale.at[b, h, ids, jnp.full_like(ids, row)], mask=there, other=0.0)
            out *= (sizes.scale * step.astype(jnp.float32))[None]
        else:
            out *= sizes.scale
        return out

    logits = product(levels.means, levels.mean_scale, sizes.mean_bits, 0)
    for row in range(1, sizes.parts):
        found = product(levels.details, levels.detail_scale, sizes.detail_bits, row - 1)
        logits += queries.signs[row][:, None] * found
    if levels.spread is not None:
        at = b, h, ids[None], queries.part[:, None]
        spread = pltriton.load(levels.spread.at[at], mask=jnp.broadcast_to(there[None], logits.shape), other=0.0)
        logits += (queries.squares * (sizes.scale**2 / 2))[:, None] * spread.astype(jnp.float32) ** 2
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
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="level_scores",
    )(operands)
    return result
