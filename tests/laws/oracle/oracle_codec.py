"""An independent oracle of what ShadowKV keeps beyond low rank: transform-coded keys, landmarks and values of few bits.

Written from their description alone, in float64 and one number after the other where that is clearer. T tokens, W
key columns (all KV heads side by side), r columns that have bits.

The transform code: the mean of the real tokens; eigenvectors of the centered keys, by falling variance; a profile
(n8, n4, n2) of columns with 8, 4 and 2 bits; a mid-rise quantizer each, which ends at `LOAD` standard deviations or at
`REACH` of the column's largest magnitude, whichever is more. A token is a row of bytes: 8-bit columns, then 4-bit, then
2-bit; in a part of w bytes, byte j holds the columns j, j + w, ..., the first in the lowest bits.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from oracle_maths import Array, softmax

LOAD = {8: 8.0, 4: 3.2, 2: 1.9}
REACH = {8: 1.0, 4: 0.7, 2: 0.5}


@dataclasses.dataclass(frozen=True)
class Coder:
    """What a prompt's keys are coded with.

    Attributes:
        mean: [W].
        basis: columns [W, r].
        bits: of each column, int [r].
        step: of each column's quantizer [r]; 0 for one that is constant.
    """

    mean: Array
    basis: Array
    bits: Array
    step: Array

    def coefficients(self, keys: Array) -> Array:
        """Keys [T, W] in the basis [T, r]."""
        return (keys - self.mean) @ self.basis

    def codes(self, keys: Array) -> Array:
        """Codes of keys [T, W], int [T, r]."""
        codes = np.zeros((len(keys), len(self.bits)), int)
        for t, row in enumerate(self.coefficients(keys)):
            for j, (x, step, bits) in enumerate(zip(row, self.step, self.bits, strict=True)):
                if step > 0:
                    codes[t, j] = min(max(int(np.floor(x / step)) + 2 ** (bits - 1), 0), 2**bits - 1)
        return codes

    def margin(self, keys: Array) -> Array:
        """How far each coefficient lies from where its code would change, in steps [T, r]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            place = self.coefficients(keys) / self.step
        half = 2.0 ** (self.bits - 1)
        edge = np.clip(np.round(place), 1 - half, half - 1)
        return np.where(self.step > 0, np.abs(place - edge), np.inf)

    def values(self, codes: Array) -> Array:
        """What codes [T, r] stand for."""
        return (codes + 0.5 - 2.0 ** (self.bits - 1)) * self.step

    def keys(self, codes: Array) -> Array:
        """Keys [T, W] of codes."""
        return self.values(codes) @ self.basis.T + self.mean


def coder_of(keys: Array, profile: Sequence[int]) -> Coder:
    """The coder of a prompt's keys [T, W]."""
    mean = keys.mean(axis=0)
    variance, vectors = np.linalg.eigh(np.cov(keys, rowvar=False, bias=True).reshape(keys.shape[1], -1))
    order = np.argsort(-variance, kind="stable")[: sum(profile)]
    bits = np.array([8] * profile[0] + [4] * profile[1] + [2] * profile[2])
    sigma = np.sqrt(np.maximum(variance[order], 0))
    constant = sigma <= 1e-5 * sigma.max(initial=0)
    step = column_steps((keys - mean) @ vectors[:, order], bits)
    return Coder(mean, vectors[:, order], bits, np.where(constant, 0, step))


def column_steps(columns: Array, bits: Array) -> Array:
    """Step of the quantizer of each of the centered columns [T, r], whether it is constant or not."""
    ends = []
    for column, b in zip(columns.T, bits, strict=True):
        ends.append(max(LOAD[int(b)] * np.sqrt((column**2).mean()), REACH[int(b)] * np.abs(column).max()))
    return 2 * np.array(ends) / 2.0**bits


def packed(codes: Array, profile: Sequence[int]) -> Array:
    """Codes [T, r] as bytes, uint8 [T, w]."""
    rows = []
    for row in codes.tolist():
        out: list[int] = []
        for count, bits in zip(profile, (8, 4, 2), strict=True):
            part, row = row[:count], row[count:]
            width = count * bits // 8
            out += [sum(part[j + place * width] << (place * bits) for place in range(8 // bits)) for j in range(width)]
        rows.append(out)
    return np.array(rows, np.uint8).reshape(len(codes), -1)


def unpacked(rows: Array, profile: Sequence[int]) -> Array:
    """`packed` backwards: bytes [T, w] to codes int [T, r]."""
    rows, parts = np.asarray(rows, int), []
    for count, bits in zip(profile, (8, 4, 2), strict=True):
        width = count * bits // 8
        part, rows = rows[:, :width], rows[:, width:]
        parts += [part >> (place * bits) & (2**bits - 1) for place in range(8 // bits)]
    return np.concatenate(parts, axis=1)


def rounded_rows(x: Array, bits: int, dtype: str = "float32") -> Array:
    """Rows of the last axis in whole steps, the largest magnitude of each 7 or 127 of them; the scale as it is kept."""
    most = 2 ** (bits - 1) - 1
    kind = np.float32 if dtype == "float32" else np.float16
    scale = np.minimum(np.abs(x).max(axis=-1, keepdims=True) / most, np.finfo(kind).max)
    scale = scale.astype(kind).astype(np.float64)
    return np.clip(np.round(x / np.where(scale > 0, scale, 1)), -most, most) * scale


def host_row_values(rows: Array, tokens: int, dim: int, bits: int, dtype: str = "float32") -> Array:
    """Values [n, tokens, dim] of rows of 16-bit words [n, w]: two's complement codes of all tokens, then their scales.

    Word j of a token has the numbers j, j + width, ... from its lowest bits. Zeros fill a row up to whole 32 bytes.
    """
    kind = np.float32 if dtype == "float32" else np.float16
    width = -(-dim * bits // 16)
    values = np.zeros((len(rows), tokens, dim), np.float32)
    for n, row in enumerate(np.asarray(rows)):
        assert row.dtype == np.uint16
        bytes_ = row.astype("<u2").tobytes()
        assert len(bytes_) % 32 == 0
        scales = np.frombuffer(bytes_, kind, tokens, offset=2 * tokens * width)
        assert not any(bytes_[2 * tokens * width + scales.nbytes :])
        for token in range(tokens):
            codes = row[token * width : (token + 1) * width].astype(int)
            part = np.concatenate([codes >> (place * bits) & (2**bits - 1) for place in range(16 // bits)])[:dim]
            part = np.where(part >= 2 ** (bits - 1), part - 2**bits, part)
            values[n, token] = part.astype(np.float32) * np.float32(scales[token])
    return values


def chunk_scores(queries: Array, landmarks: Array, candidates: Array, scale: float) -> Array:
    """Scores of n chunks by the queries of one KV head [g, d]: landmarks [n, s, d], candidates bool [n]; -1 for others.

    Softmax over the landmarks of all candidates; a chunk's is the sum over its own; the largest of the group's.
    """
    ids = np.flatnonzero(candidates)
    mass = softmax(queries @ landmarks[ids].reshape(-1, landmarks.shape[2]).T * scale)
    scores = np.full(len(landmarks), -1.0)
    scores[ids] = mass.reshape(len(queries), len(ids), -1).sum(axis=2).max(axis=0)
    return scores


def token_codes(keys: Array, most_multiple: int) -> tuple[Array, float]:
    """Keys [..., d] in whole multiples of their largest number divided by `most_multiple`.

    Also how near one of their numbers came to the middle of two multiples, over the largest number of its key.
    """
    most = np.abs(keys).max(axis=-1, keepdims=True, initial=0)
    steps = most_multiple * keys / np.where(most > 0, most, 1)
    gap = float(np.abs(steps - np.floor(steps) - 0.5).min(initial=np.inf)) / most_multiple
    return np.round(steps) * most / most_multiple, gap
