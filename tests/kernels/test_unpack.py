"""The assembly that unpacks codes, run by a small emulator of PTX on all 256 bytes in all places of a register."""

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.unpack import assembly


def halves(register: int) -> np.ndarray:
    """The two bfloat16 numbers of a register, as float64."""
    return np.array([register & 0xFFFF, register >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def run(text: str, register: int) -> list[float]:
    """Run the assembly on one register of four bytes. Returns the four numbers."""
    values = {"$2": register}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in filter(None, map(str.strip, text.strip("{}\n ").split(";"))):
        name, *operands = re.split(r"[ ,]+", line)
        if name == ".reg":
            continue
        target, numbers = operands[0], [value(operand) for operand in operands[1:]]
        if name == "mov.b32":
            result = numbers[0]
        elif name == "shr.u32":
            result = numbers[0] >> numbers[1]
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
        else:
            raise NotImplementedError(line)
        values[target] = result
    return [*halves(values["$0"]), *halves(values["$1"])]


@pytest.mark.parametrize("place", [0, 1])
def test_the_assembly_unpacks_every_byte(place):
    for byte in range(256):
        four = [byte, (byte + 91) % 256, (7 * byte + 3) % 256, 255 - byte]
        codes = [one >> 4 * place & 15 for one in four]
        want = [code - 16 if code >= 8 else code for code in codes]
        assert run(assembly(place), int.from_bytes(four, "little")) == want
