"""The Triton kernel that chooses chunks. One program handles one KV head of one row.

1. `store_chosen` finds the k largest scores, with the functions in `scores.py`. One bit for each score says whether it
   is chosen. The program stores these bits as words of 32, and the number of chosen scores before each word.
2. `listed`: lane j of k lanes finds the j-th chosen chunk, by a search over these numbers.
3. `looked_up`, or `searched` if the candidates have numbers: lane p of P lanes finds out whether the chunk in place p
   of the cache is chosen, and its index among the chosen chunks.
4. `chosen_places`: the same lanes choose the places that are freed, and number them. They store the place of each
   chosen chunk that has one, and the list of the freed places.
5. Lane j takes the place of its chunk, or the next freed place.

The threads exchange their numbers in memory between these steps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.select_chunks.operands import MOST_AGE, Candidates, Chosen
from pallas_kernels.select_chunks.planes import WORD, below, bits_of, reach
from pallas_kernels.select_chunks.scores import SCORE_BITS, best_of, chosen_words, lanes_of, planes_of
from pallas_kernels.tiles import barrier, can_do, iota, number_of, power_of_two

MOST = 32_768  # candidates of a head; the bits of their scores must fit into the registers of one program
MOST_PLACES = 2_048
AGE_BITS = MOST_AGE.bit_length()
MOST_CHUNK = jnp.iinfo(jnp.int32).max
PICKED, BEFORE = range(2)  # the rows of `Scratch.words`


class Scratch(NamedTuple):
    """Memory through which the threads of a program exchange numbers. Nothing reads it later.

    Attributes:
        words: int32 [B, h, 2, words]. PICKED: each bit is one candidate, and says whether it is chosen. BEFORE: how
            many candidates before the word are chosen.
        found: int32 [B, h, k], the place of each chosen chunk that is in the cache, and else P.
        freed: int32 [B, h, P], the places that are freed, in rising order.
    """

    words: Any
    found: Any
    freed: Any


class Head:
    """One head's part of an array. An index of the last axis is enough to load and store."""

    def __init__(self, ref: Any, head: tuple[jax.Array, ...]) -> None:
        self.ref, self.head, self.size = ref, head, ref.shape[-1]

    def load(self, index: jax.Array, mask: Any = None, other: Any = None) -> jax.Array:
        """Load elements, and `other` where the mask is False."""
        return pltriton.load(self.ref.at[(*self.head, index)], mask=mask, other=other)

    def store(self, index: jax.Array, value: jax.Array, mask: Any = None) -> None:
        """Store elements where the mask is True."""
        pltriton.store(self.ref.at[(*self.head, index)], value, mask=mask)


def select_chunks_kernel(candidates, results, scratch, *, interpret):  # type: ignore[no-untyped-def]
    """One program: choose the chunks of one head, and their places."""
    head = pl.program_id(1), pl.program_id(0)
    asked = pltriton.load(candidates.asked.at[head[0]])
    mine, out, freed, found = (
        jax.tree.map(lambda ref: Head(ref, head), refs)
        for refs in (candidates._replace(asked=None), results, scratch.freed, scratch.found)
    )
    count, places = out.ids.size, out.held.size
    words = tuple(Head(scratch.words, (*head, row)) for row in (PICKED, BEFORE))
    store_chosen(mine.scores, asked, (count, places), words, interpret)
    lane, place = iota(0, power_of_two(count)), iota(0, power_of_two(places))
    is_entry, is_place = lane < count, place < places
    found.store(lane, jnp.full_like(lane, places), is_entry)
    barrier(interpret)

    ids, is_chosen = listed(words, mine.scores.size, lane)
    if mine.numbers is not None:
        ids = mine.numbers.load(ids, is_chosen, 0)
    out.ids.store(lane, jnp.where(is_chosen, ids, 0), is_entry)
    total = number_of(is_chosen)
    old = mine.resident.load(place, is_place, -1)
    if mine.numbers is None:
        stays, rank = looked_up(words, mine.scores.size, old)
    else:
        barrier(interpret)
        stays, rank = searched(out.ids, total, old)
    hits = number_of(stays)
    age = None if mine.ages is None else mine.ages.load(place, is_place, 0)
    goes, turn = chosen_places(is_place & ~stays, age, total - hits)
    found.store(jnp.where(stays, rank, count), place, stays)
    freed.store(jnp.where(goes, turn - 1, places), place, goes)
    barrier(interpret)

    # A place that gets a missed chunk is written below.
    out.held.store(place, old if age is not None else jnp.where(stays | ~asked, old, -1), is_place & ~goes)
    if age is not None:
        later = jnp.where(stays | goes, 0, jnp.minimum(age + 1, MOST_AGE))
        out.ages.store(place, jnp.where(asked, later, age), is_place)
    seat = found.load(lane, is_entry, places)
    is_missed = is_chosen & (seat == places)
    turn = jnp.cumsum(is_missed.astype(jnp.int32), axis=0)
    seat = jnp.where(is_missed, freed.load(jnp.where(is_missed, turn - 1, 0), is_missed, places), seat)
    out.places.store(lane, seat, is_entry)
    out.held.store(jnp.where(is_missed, seat, places), ids, is_missed)
    out.missed.store(jnp.where(is_missed, turn - 1, count), lane, is_missed)
    out.missed.store(lane, jnp.full_like(lane, count), is_entry & (lane >= total - hits))
    for part, number in ((results.total, total), (results.hits, hits)):
        pltriton.store(part.at[head], number)


def store_chosen(scores, asked, sizes, words, interpret):  # type: ignore[no-untyped-def]
    """Find the largest scores, and store which they are in the two rows of `words`. A row that is not asked has none.

    `sizes` are the number of scores to choose and the number of places of the cache.
    """
    count, places = sizes
    groups, lanes = lanes_of(scores.size, places)

    def load(at: jax.Array) -> jax.Array:
        return scores.load(at, (at < scores.size) & asked, -1.0)

    planes = planes_of(load, groups, lanes, interpret)
    rows = chosen_words(*best_of(planes, count))
    for row, values in zip(words, rows, strict=True):
        for group, value in enumerate(values):
            row.store(groups * iota(0, lanes) + group, value)


def listed(words, size, lane):  # type: ignore[no-untyped-def]
    """Return the candidate that is chosen as number `lane`, counted from 0, and whether there is one.

    Args:
        words: the two rows of `Scratch.words`.
        size: number of candidates.
        lane: int32.
    """
    at, step = jnp.zeros_like(lane), power_of_two(-(-size // WORD)) // 2
    while step:  # find the last word before which at most `lane` candidates are chosen
        at = jnp.where(words[BEFORE].load(at + step) <= lane, at + step, at)
        step //= 2
    word, rest = words[PICKED].load(at), lane - words[BEFORE].load(at)
    return WORD * at + reach(word, rest), rest < bits_of(word)


def looked_up(words, size, chunks):  # type: ignore[no-untyped-def]
    """Return which chunks are chosen, and how many chosen chunks are before each. Candidate i must be chunk i.

    Args:
        words: the two rows of `Scratch.words`.
        size: number of candidates.
        chunks: int32.
    """
    known, bit = (chunks >= 0) & (chunks < size), chunks & WORD - 1
    word = words[PICKED].load(chunks >> 5, known, 0)
    rank = words[BEFORE].load(chunks >> 5, known, 0) + bits_of(word & below(bit))
    return (word >> bit & 1) != 0, rank


def searched(ids, total, chunks):  # type: ignore[no-untyped-def]
    """Return which chunks are among the first `total` of `ids`, and how many of these are smaller. `ids` are rising."""
    rank, step = jnp.zeros_like(chunks), power_of_two(ids.size) // 2
    while step:
        smaller = ids.load(rank + step - 1, rank + step <= total, MOST_CHUNK) < chunks
        rank = jnp.where(smaller, rank + step, rank)
        step //= 2
    return (ids.load(rank, rank < total, -1) == chunks) & (chunks >= 0), rank


def chosen_places(free, age, wanted):  # type: ignore[no-untyped-def]
    """Choose `wanted` of the places that are `free`: those with the largest ages, of equal ages the first.

    Args:
        free: bool, True at `wanted` places at least.
        age: int32, 0 to MOST_AGE. None: all ages are equal.
        wanted: how many places to choose, int32.

    Returns:
        Which places are chosen, bool, and their numbers 1, 2, ... in rising order, int32.
    """
    above, equal, left = jnp.zeros_like(free), free, wanted
    if age is not None:
        key, least, more = jnp.where(free, age, -1), jnp.int32(0), jnp.int32(0)
        for bit in reversed(range(AGE_BITS)):  # find the largest `least` that `wanted` ages reach
            number = number_of(key >= least + (1 << bit))
            enough = number >= wanted
            least = jnp.where(enough, least + (1 << bit), least)
            more = jnp.where(enough, more, number)  # how many are larger than `least`, after the last bit
        above, equal, left = key > least, key == least, wanted - more
    both = jnp.cumsum(above.astype(jnp.int32) << 16 | equal.astype(jnp.int32), axis=0)
    first = both & 0xFFFF
    return above | equal & (first <= left), (both >> 16) + jnp.minimum(first, left)


@functools.partial(jax.jit, static_argnames=("count", "interpret"))
def select_chunks(candidates: Candidates, count: int, interpret: bool) -> Chosen:
    """See `pallas_kernels.select_chunks`.

    Raises:
        NotImplementedError: there are more than MOST candidates or MOST_PLACES places, or an array is empty.
    """
    scores, _, resident, ages, _ = candidates
    batch, heads, size = scores.shape
    places = resident.shape[2]
    if size > MOST or places > MOST_PLACES:
        raise NotImplementedError(
            f"select_chunks: the kernel takes up to {MOST} candidates and {MOST_PLACES} places, got {size} and {places}"
        )
    chosen: Any = jax.ShapeDtypeStruct((batch, heads, count), jnp.int32)
    can_do("select_chunks", 1, scores, packed=(resident, chosen))

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((batch, heads, *shape), jnp.int32)

    cache = array(places)
    results = Chosen(chosen, chosen, chosen, cache, None if ages is None else cache, array(), array())
    groups, lanes = lanes_of(size, places)
    scratch = Scratch(array(2, groups * lanes), chosen, cache)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    made: Chosen
    made, _ = pl.pallas_call(
        functools.partial(select_chunks_kernel, interpret=interpret),
        grid=(heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, candidates)],
        out_specs=[jax.tree.map(lambda _: anywhere, part) for part in (results, scratch)],
        out_shape=[results, scratch],
        compiler_params=pltriton.CompilerParams(num_warps=lanes // 32, num_stages=1),
        cost_estimate=estimate(flops=SCORE_BITS * scores.size // WORD, moved=bytes_of((candidates, results, scratch))),
        # If `resident` is donated, `held` takes its buffer. If `ages` are donated, the new ages take theirs.
        input_output_aliases={2: 3} if ages is None else {2: 3, 3: 4},
        interpret=interpret,
        name="select_chunks",
    )(candidates)
    return made
