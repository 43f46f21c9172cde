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
SELECT = {16: (0x5410, 0x7632), 8: (0x6240, 0x7351)}  # the bytes that `prmt` takes; 4 to 7 are those of the second word


def bit_planes(keys: list[jax.Array], interpret: bool) -> list[jax.Array]:
    """Transpose the bits of 32 keys of each lane.

    Args:
        keys: 32 arrays, int32 [lanes].

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
    words = list(words)
    for index in range(len(words)):
        if not index & shift:
            pair = words[index], words[index + shift]
            words[index], words[index + shift] = swapped(*pair, shift) if interpret else swapped_by_gpu(*pair, shift)
    return words


def swapped(low: jax.Array, high: jax.Array, shift: int) -> tuple[jax.Array, jax.Array]:
    """Exchange bits between two words, as `exchanged` says."""
    mask = LOWER[shift]
    return low & mask | (high & mask) << shift, low >> shift & mask | high & ~mask


def swap_assembly(shift: int) -> tuple[str, str]:
    """Return the PTX of the two results $0 of `swapped`, of the words $1 and $2.

    The last number of `lop3` makes it choose between the bits of its first two words by the bits of the mask. LLVM
    would choose with two instructions.
    """
    if shift in SELECT:
        first, second = (f"prmt.b32 $0, $1, $2, {chosen};" for chosen in SELECT[shift])
        return first, second
    return (
        f"{{.reg .b32 up; shl.b32 up, $2, {shift}; lop3.b32 $0, $1, up, {LOWER[shift]}, 0xE4;}}",
        f"{{.reg .b32 down; shr.u32 down, $1, {shift}; lop3.b32 $0, $2, down, {LOWER[shift]}, 0xD8;}}",
    )


def swapped_by_gpu(low: jax.Array, high: jax.Array, shift: int) -> tuple[jax.Array, ...]:
    """Run `swap_assembly`."""

    def result(assembly: str) -> jax.Array:
        [word] = pltriton.elementwise_inline_asm(
            assembly,
            args=[low, high],
            constraints="=r,r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(low.shape, jnp.int32)],
        )
        return word

    return tuple(map(result, swap_assembly(shift)))


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
