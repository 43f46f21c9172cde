"""An independent oracle of the key codes of single heads, in float64: rotated keys, and rows of packed numbers.

A row has the low two bits of all numbers, then their third bit. Each part fills w bytes, and byte j holds the numbers
j, j + w, ..., the first in the lowest bits. Numbers of 4 bits are one part. The row of a rotated key ends with its
length, the upper half of a float32 number.
"""

import functools
import itertools
import math

import numpy as np
from oracle_maths import Array


def unpacked(rows: Array, bits: int) -> Array:
    """The numbers [T, d] in rows of bytes [T, d * bits / 8], one bit after the other."""
    dim = rows.shape[1] * 8 // bits
    numbers, first = np.zeros((len(rows), dim), int), 0
    for place, size in {2: [(0, 2)], 3: [(0, 2), (2, 1)], 4: [(0, 4)], 6: [(0, 4), (4, 2)]}[bits]:
        width = dim * size // 8
        for j in range(dim):
            byte = rows[:, first + j % width].astype(int)
            numbers[:, j] |= (byte // 2 ** (j // width * size)) % 2**size << place
        first += width
    return numbers


def density(x: float) -> float:
    """The density of a Gaussian number of variance 1."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    """The probability that a Gaussian number of variance 1 is below x."""
    return (1 + math.erf(x / math.sqrt(2))) / 2


@functools.cache
def lloyd_levels(bits: int) -> tuple[float, ...]:
    """The levels of least squared error for Gaussian numbers, by Lloyd's method: each is the mean of its numbers."""
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(2000):
        ends = [-math.inf, *((levels[1:] + levels[:-1]) / 2), math.inf]
        levels = np.array([(density(a) - density(b)) / (below(b) - below(a)) for a, b in itertools.pairwise(ends)])
    return tuple(levels)


@functools.cache
def turn(dim: int) -> Array:
    """The rotation [dim, dim], by Gram and Schmidt on the columns of the random matrix, one after the other."""
    columns = np.random.RandomState(0).standard_normal((dim, dim))
    for j in range(dim):
        for _ in range(2):
            columns[:, j] -= columns[:, :j] @ (columns[:, :j].T @ columns[:, j])
        columns[:, j] /= np.linalg.norm(columns[:, j])
    return columns


def rotated_keys(rows: Array, bits: int) -> Array:
    """The keys [T, d] of rows of bytes [T, d * bits / 8 + 2]."""
    codes = unpacked(rows[:, :-2], bits)
    lengths = (rows[:, -2].astype(np.uint32) << 16 | rows[:, -1].astype(np.uint32) << 24).view(np.float32)
    dim = codes.shape[1]
    return np.array(lloyd_levels(bits))[codes] @ turn(dim).T * (lengths.astype(float) / math.sqrt(dim))[:, None]


def token_keys(rows: Array, bits: int, dim: int) -> Array:
    """Keys [T, dim] of rows of ShadowKV+: codes in two's complement, times a scale in the row's last bytes.

    With 6 bits, a row has the low four bits of all numbers, then their upper two bits.
    """
    width, half = dim * bits // 8, 2 ** (bits - 1)
    codes = unpacked(rows[:, :width], bits)
    scale = np.ascontiguousarray(rows[:, width:]).view(np.float32 if rows.shape[1] == width + 4 else np.float16)
    return np.where(codes < half, codes, codes - 2 * half) * scale.astype(np.float64)
