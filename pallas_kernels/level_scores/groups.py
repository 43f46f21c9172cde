"""The sizes of a program of level_scores, and how it chooses groups and finds their chunks.

Scores that are not negative have the same order as their bits, read as whole numbers. The program finds the largest
number that `count` groups reach, bit by bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.tiles import blocks, iota, number_of, power_of_two

MOST = 32_768  # chunks of a head; the scores of their groups must fit into the registers of one program
BITS = 31  # of a score that is not negative
HALF = 1 << 16  # a number below it takes the lower half of 32 bits


class Sizes(NamedTuple):
    """Static sizes of a program.

    Attributes:
        groups: number of groups that are chosen.
        size: number of chunks of a group.
        scale: factor by which the products are multiplied.
        parts: number of landmarks of a chunk.
        queries: number of queries T of a row.
        group: number of query heads of a KV head.
        heads: number of query rows of a tile; at least `group`.
        block: number of chunks that are scored at once.
        bits: bits of a packed number of the means and of the details, or None if landmarks are not packed.
        interpret: whether JAX's interpreter runs the program.
    """

    groups: int
    size: int
    scale: float
    parts: int
    queries: int
    group: int
    heads: int
    block: int
    bits: tuple[int, int] | None
    interpret: bool

    @property
    def chunks(self) -> int:
        """Number of chunks of all chosen groups."""
        return self.groups * self.size


class Place(NamedTuple):
    """The first indices of arrays [B, h_kv, T, ...]: those of the batch, the KV head and the query of a program."""

    b: jax.Array
    h: jax.Array
    t: jax.Array

    def row(self, sizes: "Sizes") -> jax.Array:
        """Return the index of the query and the KV head in an array [B, h_kv * T, ...]."""
        return self.h * sizes.queries + self.t


def choose_groups(scores: Any, groups: Any, place: Place, sizes: Sizes) -> None:
    """Write the numbers of the best groups in rising order. Places that stay empty get -1."""
    number = iota(0, power_of_two(blocks(scores.shape[3], sizes.size)))
    best = jnp.full(number.shape, -1.0, jnp.float32)
    for lane in range(sizes.size):
        at = number * sizes.size + lane
        best = jnp.maximum(best, pltriton.load(scores.at[*place, at], mask=at < scores.shape[3], other=-1.0))
    # The bits of a score, or -1. So no difference of a key and a number of BITS bits overflows.
    key = jnp.maximum(lax.bitcast_convert_type(best, jnp.int32), -1)

    def higher(round_: jax.Array, least: jax.Array) -> jax.Array:
        raised = least | (jnp.int32(1) << (BITS - 1 - round_))
        below = lax.shift_right_logical(key - raised, jnp.int32(BITS)).sum(dtype=jnp.int32)
        return jnp.where(number.shape[0] - below >= sizes.groups, raised, least)

    least = lax.fori_loop(0, BITS, higher, jnp.int32(0))
    # Two counts in one number: that of the greater groups so far, and that of the equal ones, HALF times as large.
    greater, equal = (key > least).astype(jnp.int32), (key == least).astype(jnp.int32)
    both = jnp.cumsum(greater + HALF * equal, axis=0)
    before, equals = both & (HALF - 1), lax.shift_right_logical(both, jnp.int32(16))
    # So many of the groups that equal the least are chosen, the first of them.
    free = sizes.groups - greater.sum(dtype=jnp.int32)
    picked = (greater > 0) | (equal > 0) & (equals <= free)
    # Pallas' interpreter writes the old value where a mask is False, so these lanes point past the end.
    rank = jnp.where(picked, before + jnp.minimum(equals, free) - 1, sizes.groups)
    pltriton.store(groups.at[*place, rank], number, mask=picked)
    empty = iota(0, power_of_two(sizes.groups))
    mask = (empty >= number_of(picked)) & (empty < sizes.groups)
    pltriton.store(groups.at[*place, empty], jnp.full_like(empty, -1), mask=mask)


def chunks_at(at: jax.Array, scores: Any, groups: Any, place: Place, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Return the chunks at the places `at` of all chosen chunks, and which of them are candidates."""
    which = lax.div(at, jnp.int32(sizes.size))
    group = pltriton.load(groups.at[*place, which], mask=at < sizes.chunks, other=-1)
    ids = group * sizes.size + at - which * sizes.size
    there = (group >= 0) & (ids < scores.shape[3])
    score = pltriton.load(scores.at[*place, ids], mask=there, other=-1.0)
    return ids, score >= 0
