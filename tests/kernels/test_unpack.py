"""The assembly of the kernels, run by a small emulator of PTX. It unpacks all codes in all places of a register."""

import re
import struct

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.select_chunks.planes import LOWER, swap_assembly, swapped
from pallas_kernels.unpack import middle_assembly, reduce_assembly, scaled_assembly, shifted_assembly


def halves(register: int) -> np.ndarray:
    """The two bfloat16 numbers of a register, as float64."""
    return np.array([register & 0xFFFF, register >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def single(register: int) -> np.float64:
    """The float32 number of a register, as float64."""
    return np.float64(np.uint32(register).view(np.float32))


def register_of(number: np.float64) -> int:
    """The register of a number that is rounded to float32."""
    return int(np.float32(number).view(np.uint32))


def run(text: str, registers: dict[str, int]) -> dict[str, int]:
    """Run the assembly on the given registers of four bytes. Returns all registers."""
    values = dict(registers)

    def value(name: str) -> int:
        constant = re.fullmatch("0f([0-9A-F]{8})", name)
        return values[name] if name in values else int(constant[1], 16) if constant else int(name, 0)

    for line in filter(None, map(str.strip, text.strip("{}\n ").split(";"))):
        name, *operands = re.split(r"[ ,]+", line)
        if name == ".reg":
            continue
        target, numbers = operands[0], [value(operand) for operand in operands[1:]]
        if name == "mov.b32":
            result = numbers[0]
        elif name == "shr.u32":
            result = numbers[0] >> numbers[1]
        elif name == "shl.b32":
            result = numbers[0] << numbers[1] & 0xFFFFFFFF
        elif name == "and.b32":
            result = numbers[0] & numbers[1]
        elif name == "prmt.b32":
            source = (numbers[0] | numbers[1] << 32).to_bytes(8, "little")
            result = int.from_bytes([source[numbers[2] >> 4 * i & 7] for i in range(4)], "little")
        elif name == "lop3.b32":
            bits = [[number >> i & 1 for i in range(32)] for number in numbers[:3]]
            result = sum((numbers[3] >> (4 * a + 2 * b + c) & 1) << i for i, (a, b, c) in enumerate(zip(*bits)))  # noqa: B905
        elif name == "fma.rn.bf16x2":
            exact = halves(numbers[0]) * halves(numbers[1]) + halves(numbers[2])
            low, high = exact.astype(ml_dtypes.bfloat16).view(np.uint16)
            result = int(low) | int(high) << 16
        elif name == "mul.rn.f32":
            result = register_of(single(numbers[0]) * single(numbers[1]))
        elif name == "fma.rn.f32":
            result = register_of(single(numbers[0]) * single(numbers[1]) + single(numbers[2]))
        elif name == "cvt.rn.bf16x2.f32":
            high, low = (np.float32(single(number)).astype(ml_dtypes.bfloat16).view(np.uint16) for number in numbers)
            result = int(low) | int(high) << 16
        else:
            raise NotImplementedError(line)
        values[target] = result
    return values


@pytest.mark.parametrize("place", [0, 1])
def test_the_assembly_moves_every_code_to_the_upper_half_of_its_byte(place):
    for byte in range(256):
        four = [byte, (byte + 91) % 256, (7 * byte + 3) % 256, 255 - byte]
        codes = [one >> 4 * place & 15 for one in four]
        got = run(shifted_assembly(place), {"$1": int.from_bytes(four, "little")})["$0"]
        assert np.array([got], np.uint32).view(np.int8).tolist() == [16 * (c - 16 if c >= 8 else c) for c in codes]


@pytest.mark.parametrize(("bits", "place"), [(4, 0), (4, 1), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_the_assembly_unpacks_mid_rise_codes(bits, place):
    for byte in range(256):
        four = [byte, (byte + 91) % 256, (7 * byte + 3) % 256, 255 - byte]
        want = [(one >> bits * place & 2**bits - 1) + 0.5 - 2 ** (bits - 1) for one in four]
        got = run(middle_assembly(place, bits), {"$2": int.from_bytes(four, "little")})
        assert [*halves(got["$0"]), *halves(got["$1"])] == want


@pytest.mark.parametrize("place", range(4))
def test_the_assembly_scales_signed_codes(place):
    """The products are those of float32, rounded to bfloat16, for every code and scales of all exponents of float16.

    The other codes of both words are random.
    """
    rng = np.random.default_rng(place)
    for first, second in np.ndindex(16, 16):
        others = rng.integers(0, 2**16, 2) & ~(15 << 4 * place)
        low, high = (int(word) | code << 4 * place for word, code in zip(others, (first, second), strict=True))
        codes = np.array([first, second], np.float32)
        codes -= 16 * (codes >= 8)
        for scales in rng.integers(0, 0x7C00, (8, 2)).astype(np.uint16).view(np.float16).astype(np.float32):
            near = scales.astype(ml_dtypes.bfloat16)
            rest = (scales - near.astype(np.float32)).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(near.astype(np.float32) + rest.astype(np.float32), scales)
            parts = [int.from_bytes(part.tobytes(), "little") for part in (near, rest)]
            got = run(scaled_assembly(place), {"$1": low | high << 16, "$2": parts[0], "$3": parts[1]})
            want = (codes * scales).astype(ml_dtypes.bfloat16).astype(np.float64)
            np.testing.assert_array_equal(halves(got["$0"]), want)
            assert not np.signbit(halves(got["$0"])[codes == 0]).any()


@pytest.mark.parametrize("shift", LOWER)
def test_the_assembly_exchanges_bits_of_two_words(shift):
    for low, high in np.random.default_rng(shift).integers(0, 2**32, (50, 2)).tolist():
        want = [int(word) & 0xFFFFFFFF for word in swapped(*np.array([low, high], np.uint32).view(np.int32), shift)]
        assert [run(one, {"$1": low, "$2": high})["$0"] for one in swap_assembly(shift)] == want


def test_the_assembly_reduces_angles():
    """Its float32 operations bring angles between -pi and pi, and change neither sine nor cosine."""
    rng = np.random.default_rng(0)
    angle = np.concatenate([rng.uniform(0, 1.6e6, 5_000), rng.uniform(0, 10, 500), [0, np.pi, 2 * np.pi]]).astype("f4")
    values = {"$1": angle}

    def value(name: str) -> np.ndarray:
        constant = re.fullmatch("0f([0-9A-F]{8})", name)
        return np.float32(struct.unpack("<f", struct.pack("<I", int(constant[1], 16)))[0]) if constant else values[name]

    for line in filter(None, map(str.strip, reduce_assembly().strip("{}\n ").split(";"))):
        name, target, *operands = re.split(r"[ ,]+", line)
        if name == "mov.f32":
            values[target] = value(operands[0])
        elif name == "fma.rn.f32":
            first, second, third = (np.float64(value(operand)) for operand in operands)
            values[target] = (first * second + third).astype("f4")
        elif name == "cvt.rmi.f32.f32":
            values[target] = np.floor(value(operands[0]))
        else:
            assert name == ".reg", line
    small = values["$0"].astype("f8")
    assert np.abs(small).max() < np.pi + 1e-3
    for got, want in zip((np.cos(small), np.sin(small)), cos_sin_of(angle), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-7)
