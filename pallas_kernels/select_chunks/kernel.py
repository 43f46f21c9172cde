"""The Triton kernel that chooses chunks. One program handles one KV head of one row.

Scores that are not negative have the same order as their bits, read as whole numbers. A program finds the k-th largest
number from its highest bit to its lowest. In each round it counts the numbers that have the bit, among those that agree
in the higher bits. It holds the bits as planes, so one instruction looks at a bit of 32 scores.

1. Load the scores and find the k-th largest. One bit for each score says that it is larger, another that it is equal.
2. Bring these bits into the order of the scores. Take only the first of the equal scores. Count the chosen scores
   before each word of 32 bits.
3. List the chosen chunks in order: a search over these counts finds the word of the n-th, and its bit. Look up for each
   place whether its resident chunk is chosen. If so, take the chunk off the list.
4. Give the free places to the chunks that are left on the list.

The threads exchange their numbers in memory between these steps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.select_chunks.operands import Candidates, Chosen
from pallas_kernels.select_chunks.planes import SIDE, WORD, below, bit_planes, bits_of, first_bits, reach
from pallas_kernels.tiles import barrier, can_do, iota, number_of, power_of_two

MOST = 32_768  # candidates of a head; the bits of their scores must fit into the registers of one program
MOST_PLACES = 2_048
TILE = 16  # chosen chunks that are compared with all places at once
BITS = 31  # of a score that is not negative
ABOVE, EQUAL, PICKED, BEFORE = range(4)  # the rows of `Scratch.words`


class Scratch(NamedTuple):
    """Memory through which the threads of a program exchange numbers. Nothing reads it later.

    Attributes:
        words: int32 [B, h, 4, words]. Each bit of a word is one candidate. See the constants ABOVE to BEFORE.
        chosen: int32 [B, h, k], the chosen chunks in order, from which those that stay in their place are removed.
    """

    words: Any
    chosen: Any


def planes_of(load, first, lanes, size):  # type: ignore[no-untyped-def]
    """Load the 32 * lanes scores from `first` on, and return the planes of their bits. A score past the end is -1.

    A lane gets SIDE neighboring scores of each of 8 tiles. So a warp loads whole cache lines.
    """
    tiles = []
    for start in range(first, first + WORD * lanes, SIDE * lanes):
        at = start + SIDE * iota(0, lanes)[:, None] + iota(0, SIDE)
        score = load(at) if start < size else jnp.full(at.shape, -1.0, jnp.float32)
        tiles.append(lax.bitcast_convert_type(score, jnp.int32))
    return bit_planes(tiles)


def best_of(planes, count):  # type: ignore[no-untyped-def]
    """Find the `count` largest keys that are not negative.

    Args:
        planes: the bits of the keys. Each entry is a result of `planes_of`.
        count: how many keys to find.

    Returns:
        For each entry, a word whose bits say which keys are larger than the last of the `count` largest, and a word
        whose bits say which keys equal it. The third result is how many of the equal keys are taken, int32. If there
        are fewer keys that are not negative, it is larger than the number of equal keys.
    """
    above, equal = [jnp.zeros_like(plane[0]) for plane in planes], [~plane[BITS] for plane in planes]
    left = jnp.int32(count)
    for bit in reversed(range(BITS)):
        ones = [one & plane[bit] for one, plane in zip(equal, planes, strict=True)]
        number = sum(bits_of(one) for one in ones).sum(dtype=jnp.int32)
        taken = -(number < left).astype(jnp.int32)  # all bits set: these are among the largest, and others are too
        above = [old | one & taken for old, one in zip(above, ones, strict=True)]
        equal = [one ^ old & taken for old, one in zip(equal, ones, strict=True)]
        left -= number & taken
    return above, equal, left


def select_chunks_kernel(candidates, results, scratch, *, interpret):  # type: ignore[no-untyped-def]
    """One program: choose the chunks of one head."""
    h, b = pl.program_id(0), pl.program_id(1)
    scores, asked, resident, numbers = candidates
    ids, valid, hit, missed, held, counts = results
    words, chosen = scratch
    size, count, wide = scores.shape[2], resident.shape[2], words.shape[3]
    groups, lanes = lanes_of(wide)
    wanted_row = pltriton.load(asked.at[b])

    def load(at: jax.Array) -> jax.Array:
        return pltriton.load(scores.at[b, h, at], mask=(at < size) & wanted_row, other=-1.0)

    # 1. Which scores are the largest
    planes = [planes_of(load, WORD * lanes * group, lanes, size) for group in range(groups)]
    *marks, equals = best_of(planes, count)
    for row, mark in zip((ABOVE, EQUAL), marks, strict=True):
        for group, word in enumerate(mark):
            pltriton.store(words.at[b, h, row, group * lanes + iota(0, lanes)], word)
    barrier(interpret)

    # 2. The chosen scores in order
    word = iota(0, wide)
    part, tile = iota(0, WORD // SIDE), word // (lanes * SIDE // WORD)
    at = (tile * SIDE // WORD * lanes + word % (lanes * SIDE // WORD) * (WORD // SIDE))[:, None] + part
    above, equal = (
        (pltriton.load(words.at[b, h, row, at]) >> (tile * SIDE % WORD)[:, None] & (2**SIDE - 1)) << part * SIDE
        for row in (ABOVE, EQUAL)
    )
    above, equal = above.sum(axis=1), equal.sum(axis=1)
    both = bits_of(above) << 16 | bits_of(equal)
    ahead = jnp.cumsum(both, axis=0) - both
    picked = above | first_bits(equal, equals - (ahead & 0xFFFF))
    before = (ahead >> 16) + jnp.minimum(ahead & 0xFFFF, equals)
    total = bits_of(picked).sum(dtype=jnp.int32)
    pltriton.store(words.at[b, h, PICKED, word], picked)
    pltriton.store(words.at[b, h, BEFORE, word], before)
    barrier(interpret)

    # 3. The chosen chunks, and the places in which they are
    lane = iota(0, power_of_two(count))
    there, exists = lane < total, lane < count
    at = jnp.zeros_like(lane)  # the last word before which there are at most `lane` chosen chunks
    for step in (wide >> shift for shift in range(1, wide.bit_length())):
        fewer = pltriton.load(words.at[b, h, BEFORE, at + step]) <= lane
        at = jnp.where(fewer, at + step, at)
    mine = pltriton.load(words.at[b, h, PICKED, at])
    new = WORD * at + reach(mine, lane - pltriton.load(words.at[b, h, BEFORE, at]))
    if numbers is not None:
        new = pltriton.load(numbers.at[b, h, new], mask=there, other=0)
    pltriton.store(chosen.at[b, h, lane], new, mask=there)
    old = pltriton.load(resident.at[b, h, lane], mask=exists, other=-1)
    if numbers is None:
        known = (old >= 0) & (old < size)
        mine = pltriton.load(words.at[b, h, PICKED, old >> 5], mask=known, other=0)
        stays = (mine >> (old & 31) & 1) != 0
        rank = pltriton.load(words.at[b, h, BEFORE, old >> 5], mask=known, other=0) + bits_of(mine & below(old & 31))
        barrier(interpret)
    else:
        barrier(interpret)

        def look(index: jax.Array, found: jax.Array) -> jax.Array:
            rank = iota(index * TILE, TILE)
            new = pltriton.load(chosen.at[b, h, rank], mask=rank < total, other=-2)
            return jnp.maximum(found, jnp.where(new[:, None] == old, rank[:, None] + 1, 0).max(axis=0))

        found = lax.fori_loop(0, -(-count // TILE), look, jnp.zeros_like(lane))
        stays, rank = found > 0, found - 1
        barrier(interpret)
    free = exists & ~stays
    turn = jnp.cumsum(free.astype(jnp.int32), axis=0)  # 1, 2, ... of the free places
    hits = number_of(stays)
    new_chunks = total - hits
    filled = free & (turn <= new_chunks)
    pltriton.store(chosen.at[b, h, jnp.where(stays, rank, count)], jnp.full_like(lane, -1), mask=stays)
    pltriton.store(missed.at[b, h, jnp.where(filled, turn - 1, count)], lane, mask=filled)
    pltriton.store(missed.at[b, h, lane], jnp.full_like(lane, count), mask=exists & (lane >= new_chunks))
    both = iota(0, 2)
    pltriton.store(counts.at[b, h, both], jnp.where(both == 0, total, hits))
    pltriton.store(ids.at[b, h, lane], jnp.where(stays, old, 0), mask=exists & ~filled)
    pltriton.store(held.at[b, h, lane], jnp.where(stays | ~wanted_row, old, -1), mask=exists & ~filled)
    pltriton.store(valid.at[b, h, lane], stays | filled, mask=exists)
    pltriton.store(hit.at[b, h, lane], stays, mask=exists)
    barrier(interpret)

    # 4. The other chunks go to the places in `missed`
    new = pltriton.load(chosen.at[b, h, lane], mask=there, other=-1)
    moves = new >= 0
    turn = jnp.cumsum(moves.astype(jnp.int32), axis=0)
    place = pltriton.load(missed.at[b, h, jnp.where(moves, turn - 1, 0)], mask=moves, other=count)
    for ref in (ids, held):
        pltriton.store(ref.at[b, h, jnp.where(moves, place, count)], new, mask=moves)


def lanes_of(words: int) -> tuple[int, int]:
    """Return how many words of bits each lane holds, and the number of lanes. Each warp has 32 lanes."""
    groups = 1 if words <= 128 else 2
    return groups, words // groups


@functools.partial(jax.jit, static_argnames=("interpret",))
def select_chunks(candidates: Candidates, interpret: bool) -> Chosen:
    """See `pallas_kernels.select_chunks`.

    Raises:
        NotImplementedError: there are more than MOST candidates or MOST_PLACES places, or an array is empty.
    """
    scores, _, resident, _ = candidates
    batch, heads, size = scores.shape
    if size > MOST or resident.shape[2] > MOST_PLACES:
        raise NotImplementedError(
            f"select_chunks: the kernel takes up to {MOST} candidates and {MOST_PLACES} places, got {size} and "
            f"{resident.shape[2]}"
        )
    can_do("select_chunks", 1, scores, packed=(resident,))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    words = max(128, power_of_two(-(-size // WORD)))
    kinds = (jnp.int32, jnp.bool_, jnp.bool_, jnp.int32, jnp.int32)
    shapes: Any = [jax.ShapeDtypeStruct(resident.shape, kind) for kind in kinds]
    results = Chosen(*[*shapes, jax.ShapeDtypeStruct((batch, heads, 2), jnp.int32)])
    scratch = Scratch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, heads, 4, words), resident.shape)))
    chosen: Chosen
    chosen, _ = pl.pallas_call(
        functools.partial(select_chunks_kernel, interpret=interpret),
        grid=(heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, candidates)],
        out_specs=[jax.tree.map(lambda _: anywhere, part) for part in (results, scratch)],
        out_shape=[results, scratch],
        compiler_params=pltriton.CompilerParams(num_warps=lanes_of(words)[1] // 32, num_stages=1),
        cost_estimate=estimate(flops=BITS * scores.size // WORD, moved=bytes_of((candidates, results, scratch))),
        input_output_aliases={2: Chosen._fields.index("held")},  # `resident` becomes `held`, where it is donated
        interpret=interpret,
        name="select_chunks",
    )(candidates)
    return chosen
