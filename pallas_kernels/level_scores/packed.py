"""The logits of chunks whose landmarks are packed, with the products and tiles of `chunk_scores.packed`.

The axes of a tile are [rows / 4, 4 warps, 8 groups of lanes, 4 chunks, 4 rows]; the first is missing if there are four
query rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.chunk_scores import packed
from pallas_kernels.chunk_scores.finish import joined
from pallas_kernels.chunk_scores.operands import Chunks
from pallas_kernels.level_scores.groups import Place, Sizes, chunks_at
from pallas_kernels.tiles import MASKED, iota
from pallas_kernels.unpack import exp2


class Queries(NamedTuple):
    """The query rows of a program in fixed point, for the means and for the details."""

    means: packed.Queries
    details: packed.Queries


def tile_of(bits: int, sizes: Sizes) -> packed.Tile:
    """Return the sizes of a program for one level."""
    return packed.Tile(sizes.scale, sizes.heads, 1, bits, sizes.interpret)


def load_queries(q: Any, place: Place, sizes: Sizes) -> Queries:
    """Load the query rows of a program from q [B, h_kv * T, group, d], and turn them into fixed point."""
    rows = packed.Place(place.b, place.row(sizes), iota(0, sizes.heads))

    def made(bits: int) -> packed.Queries:
        return packed.fixed_point(q, rows, q.shape[3] * bits // 8, tile_of(bits, sizes))

    assert sizes.bits is not None
    means, details = sizes.bits
    first = made(means)
    return Queries(first, first if details == means else made(details))


def score(
    operands: Any, ids: Any, scratch: Any, place: Place, sizes: Sizes, j: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write the chunks of block j and their logits. Return the maximum and the sum of their masses of each query row.

    Args:
        operands: refs of the queries, of the scores, and of the landmarks.
        ids: ref of the chunks.
        scratch: refs of the chosen groups, and of the logits.
        place: the indices of the query and the KV head.
        j: the number of the block.

    Returns:
        float32 [heads] each. Masses are relative to the maximum.
    """
    groups, logits = scratch
    queries = load_queries(operands[0], place, sizes)
    at, row = chunks_of(j), queries.means.number[..., None, None, None, :]
    number, there = chunks_at(at, operands[1], groups, place, sizes)
    pltriton.store(ids.at[*place, at], jnp.where(there, number, 0), mask=at < sizes.chunks)
    logit = tile_logits(queries, operands, (number, there), place, sizes)
    rows, places = jnp.broadcast_arrays(row, at[..., None])
    pltriton.store(logits.at[*place, rows, places], logit, mask=(rows < sizes.group) & (places < sizes.chunks))
    # First over the chunks of a lane, then over the lanes and the warps.
    peak = jnp.maximum(logit.max(axis=-2), packed.LEAST_PEAK)
    mass = exp2(logit - peak[..., None, :], sizes.interpret).sum(axis=-2)
    highest = peak.max(axis=-2).max(axis=-2)
    mass = (mass * exp2(peak - highest[..., None, None, :], sizes.interpret)).sum(axis=-2).sum(axis=-2)
    return highest.reshape(sizes.heads), mass.reshape(sizes.heads)


def chunks_of(j: jax.Array) -> jax.Array:
    """Return the places of the chunks of a tile, int32 [4 warps, 8 groups of lanes, 4 chunks]."""
    warp, lanes, chunk = (iota(0, size) for size in (4, 8, 4))
    return j * packed.BLOCK + 32 * warp[:, None, None] + 4 * lanes[None, :, None] + chunk


def tile_logits(
    queries: Queries, operands: Any, chunks: tuple[jax.Array, jax.Array], place: Place, sizes: Sizes
) -> jax.Array:
    """Return the logits of a tile of chunks, float32; MASKED where there is no candidate.

    Args:
        queries: the query rows.
        operands: refs of the queries, of the scores, and of the landmarks.
        chunks: the chunks, and which of them are candidates, [4, 8, 4] each.
        place: the indices of the program.
    """
    (_, scores, levels), (b, h, _), (ids, there) = operands, place, chunks
    assert sizes.bits is not None
    tiles = [tile_of(bits, sizes) for bits in sizes.bits]
    ids = jnp.where(there, ids, scores.shape[3])  # past the end, where nothing is loaded

    def row_of(number: int) -> jax.Array:
        """Return row `number` of the Hadamard transform of the logits."""
        if number == 0:
            chunks = Chunks(levels.means, scores, levels.mean_scale)
            return packed.landmark_logits(queries.means, chunks, packed.Place(b, h, ids), tiles[0])
        rows = packed.Place(b, h, ids * (sizes.parts - 1) + (number - 1))
        return packed.landmark_logits(
            queries.details, Chunks(levels.details, scores, levels.detail_scale), rows, tiles[1]
        )

    each = transformed([row_of(number) for number in range(sizes.parts)])
    lanes_there = packed.by_lane(there)
    if levels.spread is not None:
        half_square = queries.means.half_square[..., None, None, None, :]
        for part in range(sizes.parts):
            mark = packed.by_lane(ids * sizes.parts + part)
            spread = pltriton.load(levels.spread.at[b, h, mark, jnp.zeros_like(mark)], mask=lanes_there, other=0.0)
            each[part] += spread.astype(jnp.float32) ** 2 * half_square
    each = [jnp.where(lanes_there, logit, MASKED) for logit in each]
    return joined(each, sizes.interpret)


def transformed(rows: list[jax.Array]) -> list[jax.Array]:
    """Return the Hadamard transform of a list of arrays, whose length is a power of two."""
    half = len(rows) // 2
    if half == 0:
        return rows
    pairs = list(zip(rows[:half], rows[half:], strict=True))
    return transformed([first + second for first, second in pairs]) + transformed(
        [first - second for first, second in pairs]
    )
