"""The logits of chunks whose landmarks are not packed.

A tile of products has one row for each landmark of a chunk and each query head. So the sum over the rows of the
Hadamard transform, each with its sign, needs no other tile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.chunk_scores.packed import LEAST_PEAK
from pallas_kernels.level_scores.groups import Place, Sizes, chunks_at
from pallas_kernels.tiles import LOG2_E, MASKED, dot, iota, summed
from pallas_kernels.unpack import exp2


class Queries(NamedTuple):
    """The query rows of a program. Row j * heads + i of a tile belongs to landmark j and query head i.

    Attributes:
        part: int32 [R], the landmark of each row.
        half_square: float32 [R], (scale * |q|)**2 / 2, the logit of a spread of 1.
        signs: float32 [R], 1 or -1 for each row of the Hadamard transform: its sign in the landmark of each query row.
        tiles: [R, width] for each span of the columns. Rows of heads that do not exist are 0.
    """

    part: jax.Array
    half_square: jax.Array
    signs: list[jax.Array]
    tiles: list[jax.Array]


def load_queries(q: Any, means: Any, place: Place, sizes: Sizes) -> Queries:
    """Load the query rows of a program from q [B, h_kv * T, group, d]."""
    row, tiles = iota(0, sizes.parts * sizes.heads), []
    part, head = lax.div(row, jnp.int32(sizes.heads)), lax.rem(row, jnp.int32(sizes.heads))
    for start, width in summed(q.shape[3], q, means):
        column = iota(start, width)
        mask = (head < sizes.group)[:, None] & (column < q.shape[3])[None]
        at = place.b, place.row(sizes), head[:, None], column[None]
        tiles.append(pltriton.load(q.at[at], mask=mask, other=0.0))
    squares = functools.reduce(jnp.add, [(tile.astype(jnp.float32) ** 2).sum(axis=1) for tile in tiles])
    signs = []
    for number in range(sizes.parts):
        odd = part & number
        odd ^= odd >> 2
        odd = (odd ^ (odd >> 1)) & 1
        signs.append((1 - 2 * odd).astype(jnp.float32))
    return Queries(part, squares * (sizes.scale**2 / 2 * LOG2_E), signs, tiles)


def score(
    operands: Any, ids: Any, scratch: Any, place: Place, sizes: Sizes, j: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write the chunks of block j and their logits. Arguments and results are those of `packed.score`."""
    groups, logits = scratch
    queries = load_queries(operands[0], operands[2].means, place, sizes)
    head, at = iota(0, sizes.heads), iota(j * sizes.block, sizes.block)
    number, there = chunks_at(at, operands[1], groups, place, sizes)
    pltriton.store(ids.at[*place, at], jnp.where(there, number, 0), mask=at < sizes.chunks)
    logit = tile_logits(queries, operands[2], (number, there), place, sizes)
    mask = (head < sizes.group)[:, None] & (at < sizes.chunks)[None]
    pltriton.store(logits.at[*place, head[:, None], at[None]], logit, mask=mask)
    peak = jnp.maximum(logit.max(axis=1), LEAST_PEAK)
    return peak, exp2(logit - peak[:, None], sizes.interpret).sum(axis=1)


def tile_logits(
    queries: Queries, levels: Any, chunks: tuple[jax.Array, jax.Array], place: Place, sizes: Sizes
) -> jax.Array:
    """Return the logits of n chunks, float32 [heads, n]; MASKED where there is no candidate.

    Args:
        queries: the query rows.
        levels: refs of the landmarks.
        chunks: the chunks, and which of them are candidates, [n] each.
        place: the indices of the program.
    """
    ids, there = chunks

    def product(level: Any, first: int) -> jax.Array:
        """Return the products of the queries and one landmark of each chunk, whose numbers begin at column `first`."""
        out, start = jnp.zeros((sizes.parts * sizes.heads, sizes.block), jnp.float32), 0
        for query in queries.tiles:
            column = iota(start, query.shape[1])
            mask = there[:, None] & (column < levels.means.shape[3])[None]
            numbers = pltriton.load(
                level.at[place.b, place.h, ids[:, None], (first + column)[None]], mask=mask, other=0.0
            )
            out += dot(query, numbers, transposed=True)
            start += query.shape[1]
        return out

    logits = product(levels.means, 0)
    for row in range(1, sizes.parts):
        logits += queries.signs[row][:, None] * product(levels.details, (row - 1) * levels.means.shape[3])
    logits *= sizes.scale * LOG2_E
    if levels.spread is not None:
        mask = jnp.broadcast_to(there[None], logits.shape)
        mark = ids[None] * sizes.parts + queries.part[:, None]
        spread = pltriton.load(
            levels.spread.at[place.b, place.h, mark, jnp.zeros_like(mark)], mask=mask, other=0.0
        ).astype(jnp.float32)
        logits += queries.half_square[:, None] * spread**2
    logits = logits.reshape(sizes.parts, sizes.heads, sizes.block)
    highest = logits.max(axis=0)
    mass = exp2(logits - highest[None], sizes.interpret).sum(axis=0)
    return jnp.where(there[None], highest + jnp.log(mass) * LOG2_E, MASKED)
