"""How a program of the kernel of select_chunks finds the largest scores of its head.

Scores that are not negative have the same order as their bits, read as whole numbers. A program finds the k-th largest
number from its highest bit to its lowest. In each round it counts the numbers that have the bit, among those that agree
in the higher bits. It holds the bits as planes, so one instruction looks at a bit of 32 scores.

A word is 32 neighboring scores. A lane holds one, two or four neighboring words.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.select_chunks.planes import WORD, below, bit_planes, bits_of, reach
from pallas_kernels.tiles import iota, power_of_two

SCORE_BITS = 31  # of a score that is not negative
MOST_WORDS = 4  # of a lane
MOST_PLACES_OF_LANE = 16
Words = list[jax.Array]  # the words of each lane, int32 [lanes]


def lanes_of(size: int, places: int) -> tuple[int, int]:
    """Return how many words each lane holds, and the number of lanes, a multiple of the 32 lanes of a warp.

    A program has as few warps as its registers allow. In each round, every warp counts and waits for the others.

    Args:
        size: number of scores.
        places: number of places of the cache.
    """
    words = power_of_two(-(-size // WORD))
    lanes = max(32, words // MOST_WORDS, power_of_two(places) // MOST_PLACES_OF_LANE)
    return max(1, words // lanes), lanes


def planes_of(load: Callable[[jax.Array], jax.Array], groups: int, lanes: int, interpret: bool) -> list[Words]:
    """Load the scores, and return the planes of the bits of each word.

    A tile is loaded as whole cache lines. Then each lane gets a row of it, which is a word.

    Args:
        load: loads the scores at the given indices. Past the end they are below 0.
        groups: number of words of each lane.
        lanes: number of lanes.
    """
    planes = []
    for group in range(groups):
        at = WORD * (groups * iota(0, lanes) + group)[:, None] + iota(0, WORD)
        keys = lax.bitcast_convert_type(load(at), jnp.int32)
        columns = lax.split(keys, [1] * WORD, axis=1)
        planes.append(bit_planes([column.reshape(lanes) for column in columns], interpret))
    return planes


def total(words: Words) -> jax.Array:
    """Return the sum of the words of each lane."""
    return sum(words[1:], words[0])


def best_of(planes: list[Words], count: int) -> tuple[Words, Words, jax.Array]:
    """Find the `count` largest keys that are not negative.

    Args:
        planes: the bits of the keys, a result of `planes_of`.
        count: how many keys to find.

    Returns:
        Two lists of words, in which each bit stands for a key. The first says which keys are larger than the smallest
        of the `count` largest keys. The second says which keys equal it. The third result is how many of the equal
        keys are taken, int32. If fewer than `count` keys are not negative, it is larger than the number of equal keys.
    """
    above = [jnp.zeros_like(plane[0]) for plane in planes]
    equal = [~plane[SCORE_BITS] for plane in planes]
    left = jnp.int32(count)
    for bit in reversed(range(SCORE_BITS)):
        ones = [one & plane[bit] for one, plane in zip(equal, planes, strict=True)]
        number = total([bits_of(one) for one in ones]).sum(dtype=jnp.int32)
        # All bits are set if these keys and others are among the largest. With a comparison, the compiler would select
        # by its result, which takes twice the instructions.
        taken = number - left >> WORD - 1
        above = [old | one & taken for old, one in zip(above, ones, strict=True)]
        equal = [one ^ old & taken for old, one in zip(equal, ones, strict=True)]
        left -= number & taken
    return above, equal, left


def chosen_words(above: Words, equal: Words, left: jax.Array) -> tuple[Words, Words]:
    """Choose all keys that are `above`, and the first `left` of those that are `equal`.

    Returns:
        Which keys of each word are chosen, and how many are chosen before the word.
    """
    both = [bits_of(first) << 16 | bits_of(second) for first, second in zip(above, equal, strict=True)]
    own = total(both)
    ahead = jnp.cumsum(own, axis=0) - own
    room, before = [], []  # room: how many of the equal keys of a word, and of those after it, are chosen
    for number in both:
        room.append(left - (ahead & 0xFFFF))
        before.append((ahead >> 16) + jnp.minimum(ahead & 0xFFFF, left))
        ahead = ahead + number
    # At most one word has equal keys that are chosen and others that are not.
    cut = [(space > 0) & (space < (number & 0xFFFF)) for space, number in zip(room, both, strict=True)]
    word, most = (total([jnp.where(here, x, 0) for here, x in zip(cut, xs, strict=True)]) for xs in (equal, room))
    first = word & below(reach(word, most))
    picked = [
        one | jnp.where(here, first, jnp.where(space > 0, other, 0))
        for one, other, here, space in zip(above, equal, cut, room, strict=True)
    ]
    return picked, before
