"""The assembly of the kernels, run by a small emulator of PTX. It unpacks all codes in all places of a register."""

import itertools
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.select_chunks.planes import LOWER, swap_assembly, swapped
from pallas_kernels.unpack import middle_assembly, reduce_assembly, scaled_assembly, shifted_assembly

# Registers are arrays of 32-bit words, one number for each run of the assembly.


def halves(words: np.ndarray) -> np.ndarray:
    """The two bfloat16 numbers of each word, float64 [n, 2]."""
    return words.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2)


def of_halves(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(ml_dtypes.bfloat16).view(np.uint32).ravel()


def single(words: np.ndarray) -> np.ndarray:
    """The float32 number of each word, as float64."""
    return words.view(np.float32).astype(np.float64)


def of_single(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32).view(np.uint32)


def permute(low: np.ndarray, high: np.ndarray, places: np.ndarray) -> np.ndarray:
    source = np.stack([low, high], axis=1).view(np.uint8)
    return np.ascontiguousarray(source[:, [places[0] >> 4 * i & 7 for i in range(4)]]).view(np.uint32).ravel()


def logic(*operands: np.ndarray) -> np.ndarray:
    """Bit 4 a + 2 b + c of the last operand is the result for the bits a, b and c of the others."""
    *words, table = operands
    kinds = [bits for bits in itertools.product((0, 1), repeat=3) if table[0] >> int("".join(map(str, bits)), 2) & 1]
    parts = [np.bitwise_and.reduce([x if bit else ~x for x, bit in zip(words, bits, strict=True)]) for bits in kinds]
    return np.bitwise_or.reduce(parts)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "and.b32": np.bitwise_and,
    "prmt.b32": permute,
    "lop3.b32": logic,
    "fma.rn.bf16x2": lambda a, b, c: of_halves(halves(a) * halves(b) + halves(c)),
    "mul.rn.f32": lambda a, b: of_single(single(a) * single(b)),
    "fma.rn.f32": lambda a, b, c: of_single(single(a) * single(b) + single(c)),
    "cvt.rmi.f32.f32": lambda a: of_single(np.floor(single(a))),
    "cvt.rn.bf16x2.f32": lambda high, low: of_halves(np.stack([single(low), single(high)], axis=1).astype(np.float32)),
}


def run(text: str, **registers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Run the assembly. `a` is $1, `b` is $2, `c` is $3. Returns $0 and, if it is written, $1."""
    values = {f"${'abc'.index(name) + 1}": np.asarray(x).astype(np.uint32) for name, x in registers.items()}
    size = len(next(iter(values.values())))
    for line in filter(None, map(str.strip, text.strip("{}\n ").split(";"))):
        name, *operands = re.split(r"[ ,]+", line)
        if name != ".reg":
            for one in operands[1:]:
                constant = int(one[2:], 16) if one.startswith("0f") else None if one in values else int(one, 0)
                values |= {} if constant is None else {one: np.full(size, constant, np.uint32)}
            values[operands[0]] = INSTRUCTIONS[name](*(values[one] for one in operands[1:]))
    return values["$0"], values.get("$1")


BYTES = np.arange(256)
FOUR = np.stack([BYTES, (BYTES + 91) % 256, (7 * BYTES + 3) % 256, 255 - BYTES], axis=1).astype(np.uint8)


@pytest.mark.parametrize("place", [0, 1])
def test_the_assembly_moves_every_code_to_the_upper_half_of_its_byte(place):
    got, _ = run(shifted_assembly(place), a=FOUR.view(np.uint32).ravel())
    codes = (FOUR >> 4 * place & 15).astype(int)
    np.testing.assert_array_equal(got.view(np.int8).reshape(256, 4), 16 * (codes - 16 * (codes >= 8)))


@pytest.mark.parametrize(("bits", "place"), [(4, 0), (4, 1), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_the_assembly_unpacks_mid_rise_codes(bits, place):
    got = run(middle_assembly(place, bits), b=FOUR.view(np.uint32).ravel())
    want = (FOUR >> bits * place & 2**bits - 1) + 0.5 - 2 ** (bits - 1)
    np.testing.assert_array_equal(np.concatenate([halves(x) for x in got], axis=1), want)


@pytest.mark.parametrize("place", range(4))
def test_the_assembly_scales_signed_codes(place):
    """The products are those of float32, rounded to bfloat16, for every code and scales of all exponents of float16.

    The other codes of both words are random.
    """
    rng = np.random.default_rng(place)
    codes = np.indices((16, 16)).reshape(2, 256).T.repeat(8, axis=0)
    words = rng.integers(0, 2**16, codes.shape) & ~(15 << 4 * place) | codes << 4 * place
    codes = (codes - 16 * (codes >= 8)).astype(np.float32)
    scales = rng.integers(0, 0x7C00, codes.shape).astype(np.uint16).view(np.float16).astype(np.float32)
    near = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    rest = (scales - near).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(near + rest, scales)
    got, _ = run(scaled_assembly(place), a=words[:, 0] | words[:, 1] << 16, b=of_halves(near), c=of_halves(rest))
    np.testing.assert_array_equal(halves(got), (codes * scales).astype(ml_dtypes.bfloat16).astype(np.float64))
    assert not np.signbit(halves(got)[codes == 0]).any()


@pytest.mark.parametrize("shift", LOWER)
def test_the_assembly_exchanges_bits_of_two_words(shift):
    low, high = np.random.default_rng(shift).integers(0, 2**32, (2, 50), np.uint32)
    for one, want in zip(swap_assembly(shift), swapped(low.view(np.int32), high.view(np.int32), shift), strict=True):
        np.testing.assert_array_equal(run(one, a=low, b=high)[0], np.asarray(want).view(np.uint32))


def test_the_assembly_reduces_angles():
    """Its float32 operations bring angles between -pi and pi, and change neither sine nor cosine."""
    rng = np.random.default_rng(0)
    angle = np.concatenate([rng.uniform(0, 1.6e6, 5_000), rng.uniform(0, 10, 500), [0, np.pi, 2 * np.pi]]).astype("f4")
    small = single(run(reduce_assembly(), a=of_single(angle))[0])
    assert np.abs(small).max() < np.pi + 1e-3
    for got, want in zip((np.cos(small), np.sin(small)), jax.jit(cos_sin_of)(angle), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-7)
