"""Operations on the bits of many numbers at once, with which the kernel of select_chunks compares scores.

A thread holds 32 numbers ("keys") of 32 bits in 32 registers. It can hold the same bits as 32 "planes": bit i of plane
b is bit b of key i. One instruction then looks at the same bit of 32 keys.
"""

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32  # bits of an int32
LOWER = {16: 0xFFFF, 8: 0xFF00FF, 4: 0xF0F0F0F, 2: 0x33333333, 1: 0x55555555}  # the lower half of each 2 * shift bits
SIDE = 4  # neighboring keys of a lane


def bit_planes(tiles: list[jax.Array]) -> list[jax.Array]:
    """Transpose the bits of 32 keys of each lane. Key 4 i + j of a lane is in column j of tile i.

    Args:
        tiles: 8 arrays, int32 [lanes, SIDE].

    Returns:
        32 planes, int32 [lanes]. Bit i of plane b is bit b of key i.
    """
    for shift in (16, 8, 4):
        tiles = exchanged(tiles, shift // SIDE, shift)
    planes = [column.reshape(tile.shape[0]) for tile in tiles for column in lax.split(tile, [1] * SIDE, axis=1)]
    for shift in (2, 1):
        planes = exchanged(planes, shift, shift)
    return planes


def exchanged(words: list[jax.Array], distance: int, shift: int) -> list[jax.Array]:
    """Exchange bits between each two words that are `distance` apart in the list.

    Of each 2 * shift bits, the upper half of the first word and the lower half of the second change places. With the
    distances and shifts 16, 8, 4, 2 and 1 in turn, this transposes the bits of 32 words.
    """
    mask, words = LOWER[shift], list(words)
    for index in range(len(words)):
        if not index & distance:
            low, high = words[index], words[index + distance]
            words[index] = low & mask | (high & mask) << shift
            words[index + distance] = low >> shift & mask | high & ~mask
    return words


def bits_of(words: jax.Array) -> jax.Array:
    """Return how many bits of each word are set."""
    return lax.population_count(words)


def below(bit: jax.Array) -> jax.Array:
    """Return words whose bits 0 .. bit - 1 are set; `bit` is int32, 0 to 31."""
    return (1 << bit) - 1


def reach(words: jax.Array, most: jax.Array) -> jax.Array:
    """Return the largest number of low bits, up to 31, of which at most `most` are set.

    If more than `most` bits of the word are set, this is the position of the next of them.
    """
    size = jnp.zeros_like(words)
    for step in (16, 8, 4, 2, 1):
        size = jnp.where(bits_of(words & below(size + step)) <= most, size + step, size)
    return size


def first_bits(words: jax.Array, most: jax.Array) -> jax.Array:
    """Keep the lowest `most` bits that are set in each word, and clear the others. Both are int32 of one shape."""
    return jnp.where(bits_of(words) <= most, words, words & below(reach(words, most)))
