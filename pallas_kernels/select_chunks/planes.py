"""Operations on the bits of many numbers at once, with which the kernel of select_chunks compares scores.

A thread holds 32 numbers ("keys") of 32 bits in 32 registers. It can hold the same bits as 32 "planes": bit i of plane
b is bit b of key i. One instruction then looks at the same bit of 32 keys.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

WORD = 32  # bits of an int32
LOWER = {16: 0xFFFF, 8: 0xFF00FF, 4: 0xF0F0F0F, 2: 0x33333333, 1: 0x55555555}  # the lower half of each 2 * shift bits
# Which bytes of two words PTX's prmt takes for the first and the second new word. Bytes 4 to 7 are the second word's.
BYTES = {16: (0x5410, 0x7632), 8: (0x6240, 0x7351)}


def bit_planes(keys: list[jax.Array], interpret: bool) -> list[jax.Array]:
    """Transpose the bits of 32 keys of each lane.

    Args:
        keys: 32 arrays, int32 [lanes].
        interpret: whether JAX's interpreter runs the kernel.

    Returns:
        32 planes, int32 [lanes]. Bit i of plane b is bit b of key i.
    """
    for shift in (16, 8, 4, 2, 1):
        keys = exchanged(keys, shift, interpret)
    return keys


def exchanged(words: list[jax.Array], shift: int, interpret: bool) -> list[jax.Array]:
    """Exchange bits between each two words that are `shift` apart in the list.

    Of each 2 * shift bits, the upper half of the first word and the lower half of the second change places. With the
    shifts 16, 8, 4, 2 and 1 in turn, this transposes the bits of 32 words.
    """
    mask, words = LOWER[shift], list(words)
    for index in range(len(words)):
        if not index & shift:
            low, high = words[index], words[index + shift]
            if shift in BYTES and not interpret:
                pair = [chosen_bytes(low, high, bytes_) for bytes_ in BYTES[shift]]
            else:
                pair = [low & mask | (high & mask) << shift, low >> shift & mask | high & ~mask]
            words[index], words[index + shift] = pair
    return words


def byte_assembly(chosen: int) -> str:
    """Return the PTX that takes four bytes of two words $1 and $2. Each digit of `chosen` is the index of a byte."""
    return f"prmt.b32 $0, $1, $2, 0x{chosen:X};"


def chosen_bytes(low: jax.Array, high: jax.Array, chosen: int) -> jax.Array:
    """Run `byte_assembly` on int32 arrays of the same shape."""
    [words] = pltriton.elementwise_inline_asm(
        byte_assembly(chosen),
        args=[low, high],
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(low.shape, jnp.int32)],
    )
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
