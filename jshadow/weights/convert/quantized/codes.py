"""Codes of quantized weights: small floats, and integers that lie side by side in words."""

import ml_dtypes
import numpy as np

_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def _pairs(numbers: np.ndarray) -> np.ndarray:
    """Return both numbers of each byte as one item of eight bytes, so that one look-up finds both."""
    return np.stack([numbers[_BYTES & 15], numbers[_BYTES >> 4]], axis=1).view(np.complex64)[:, 0]


_E2M1_PAIRS = _pairs(_E2M1)
_INTEGER_PAIRS = _pairs(np.arange(16, dtype=np.float32))


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """Return E4M3 numbers (OCP 8-bit floating point, without infinities) as float32. `codes` has one in each byte."""
    return np.take(_E4M3, codes.view(np.uint8))


def from_e8m0(codes: np.ndarray) -> np.ndarray:
    """Return E8M0 numbers (OCP microscaling formats, section 5.4.1) as float32: 2^(code - 127), and NaN for 255."""
    return np.take(_E8M0, codes.view(np.uint8))


def from_e2m1(codes: np.ndarray) -> np.ndarray:
    """Return E2M1 numbers (OCP microscaling formats, section 5.3.3) as float32 [..., 2 N].

    `codes` has two in each byte, uint8 [..., N]. The lower half of a byte comes first.
    """
    return np.take(_E2M1_PAIRS, np.ascontiguousarray(codes)).view(np.float32)


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return unsigned integers of 1 to 8 bits as float32 [R, count].

    They lie in the words of a row, int32 or uint32 [R, W], from the lowest bit of the first word upwards. An integer
    may begin in one word and end in the next.
    """
    octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return octets[:, :count].astype(np.float32)
    if bits == 4:
        return np.take(_INTEGER_PAIRS, octets).view(np.float32)[:, :count]
    stream = np.unpackbits(octets, axis=1, count=count * bits, bitorder="little").reshape(len(octets), count, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0].astype(np.float32)
