"""The GPU ops in float64 NumPy, element by element: written from their docstrings, sharing nothing with the package."""

import inspect
import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    weight = np.exp(scores - scores.max())
    return weight / weight.sum()


def codes_in(row: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Codes of a row of w bytes, number after number: byte j has the numbers j, j + w, ..., the first lowest."""
    width = count * bits // 8
    assert len(row) == width
    return np.array([int(row[j % width]) >> (j // width * bits) & (2**bits - 1) for j in range(count)], int)


def two_s_complement(codes: np.ndarray, bits: int) -> np.ndarray:
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)


def chunk_scores(
    q: Any, landmarks: Any, candidates: Any, scale: float, landmark_scale: Any = None, spread: Any = None
) -> np.ndarray:
    q, candidates = wide(q), np.asarray(candidates)
    variance = np.zeros((*landmarks.shape[:3], 1)) if spread is None else (scale * wide(spread)) ** 2
    variance = variance.reshape(*candidates.shape, -1)
    if landmark_scale is not None:
        rows, dim = np.asarray(landmarks), q.shape[3]
        bits = 8 * rows.shape[3] // dim
        numbers = [two_s_complement(codes_in(row, dim, bits), bits) for row in rows.reshape(-1, rows.shape[3])]
        landmarks = np.reshape(numbers, (*rows.shape[:3], dim)) * wide(landmark_scale)
    batch, heads, count = candidates.shape
    landmarks = wide(landmarks).reshape(batch, heads, count, -1, q.shape[3])
    group = q.shape[2] // heads
    out = np.full((batch, heads, q.shape[1], count), -1.0)
    for b, h, t in np.ndindex(batch, heads, q.shape[1]):
        there = candidates[b, h]
        if there.any():
            own, half = landmarks[b, h][there], variance[b, h][there] / 2
            mass = [
                softmax((own @ one * scale + one @ one * half).ravel()).reshape(own.shape[:2]).sum(axis=1)
                for one in q[b, t, h * group : (h + 1) * group]
            ]
            out[b, h, t, there] = np.max(mass, axis=0)
    return out


def in_order(k: Any, v: Any, valid: Any, *rest: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A piece of sparse_attention without its list of places: the listed rows one by one. `rest` is [places,] d."""
    k, v, valid, (*places, dim) = wide(k), wide(v), np.asarray(valid), rest
    if not places or places[0] is None:
        return k, v, valid
    listed, chunk = np.asarray(places[0]), k.shape[3] // dim
    out = np.zeros((2, *listed.shape, chunk, dim))
    for b, h, j in np.ndindex(listed.shape):
        if 0 <= listed[b, h, j] < k.shape[2]:
            for row in range(chunk):
                for x, rows in enumerate((k, v)):
                    out[x, b, h, j, row] = rows[b, h, listed[b, h, j], row * dim : (row + 1) * dim]
    k, v = out.reshape(2, *listed.shape[:2], -1, dim)
    return k, v, np.minimum(valid, listed.shape[2]) * np.int32(chunk) if valid.dtype == np.int32 else valid


def sparse_attention(q: Any, pieces: Any, scale: float) -> np.ndarray:
    q, out = wide(q), np.zeros(q.shape)
    for b, t, head in np.ndindex(q.shape[:3]):
        keys, values = [], []
        for piece in pieces:
            k, v, valid = in_order(*piece, q.shape[3])
            h = head * k.shape[1] // q.shape[2]
            flags = np.broadcast_to(valid, (*k.shape[:2], q.shape[1], np.shape(valid)[-1]))[b, h, t]
            rows = np.arange(k.shape[-2])
            seen = rows < flags if flags.dtype == np.int32 else flags[rows * len(flags) // max(len(rows), 1)]
            own = (b, h) if k.ndim == 4 else (b, h, t)
            keys.append(k[own][seen])
            values.append(v[own][seen])
        if sum(map(len, keys)):
            out[b, t, head] = softmax(np.concatenate(keys) @ q[b, t, head] * scale) @ np.concatenate(values)
    return out


def chunk_of(ids: Any, units: int, tail: Any, tail_unit: Any, b: int, h: int, j: int) -> tuple[int, bool, int]:
    """Row of the prompt or of the tail, whether of the tail, and the chunk in the sequence."""
    most = units + (0 if tail is None else tail.shape[-2])
    one = min(max(int(ids[b, h, j]), 0), most - 1)
    tail_unit = None if tail is None else np.asarray(tail_unit)
    if one < units:
        return one, False, one
    return one - units, True, one - units + int(tail_unit[b])


def coded_keys(row: np.ndarray, right: Any, mean: Any, profile: Any, b: int, h: int) -> np.ndarray:
    """Keys [c, d] of a chunk's row of bytes."""
    sizes = [(count, bits, count * bits // 8) for count, bits in zip(profile, (8, 4, 2), strict=True)]
    found = []
    for token in row.reshape(-1, sum(size for _, _, size in sizes)):
        numbers = []
        for count, bits, size in sizes:
            part, token = token[:size], token[size:]
            numbers += list(codes_in(part, count, bits) + 0.5 - 2 ** (bits - 1))
        found.append(numbers)
    return np.array(found) @ wide(right)[b, h] + wide(mean)[b, h]


def reconstruct_keys(
    left: Any,
    right: Any,
    ids: Any,
    inverse: Any,
    tail: Any = None,
    tail_unit: Any = None,
    mean: Any = None,
    profile: Any = None,
) -> np.ndarray:
    left, inverse, ids = np.asarray(left), np.asarray(inverse), np.asarray(ids)
    tail = None if tail is None else np.asarray(tail)
    right, mean = np.asarray(right), None if mean is None else np.asarray(mean)
    dim, half = right.shape[-1], len(inverse)
    rank, chunk = right.shape[2], chunk_size(left, right, profile)
    out = np.zeros((*ids.shape, chunk, dim))
    for b, h, j in np.ndindex(ids.shape):
        row, later, place = chunk_of(ids, left.shape[-2], tail, tail_unit, b, h, j)
        own = (tail if later else left)[b, row]
        if profile is None:
            key = wide(own).reshape(chunk, rank) @ wide(right[b, h])
        else:
            key = coded_keys(own, right, mean, profile, b, h)
        angle = (place * chunk + np.arange(chunk, dtype=np.float32))[:, None] * inverse  # rounded, as the ops do
        turned = (key[:, :half] + 1j * key[:, half : 2 * half]) * np.exp(1j * wide(angle))
        out[b, h, j] = np.concatenate([turned.real, turned.imag, key[:, 2 * half :]], axis=1)
    return out.reshape(*ids.shape[:2], -1, dim)


def kept_or_rebuilt(kept_keys: Any = None, places: Any = None, missed: Any = None, **inputs: Any) -> np.ndarray:
    """The keys that fetch_reconstruct gives: those of `reconstruct_keys`, or the cache with those of missed chunks."""
    names = inspect.signature(reconstruct_keys).parameters
    out = reconstruct_keys(**{name: inputs[name] for name in names if name in inputs})
    if missed is None:
        return out
    return with_missed(wide(kept_keys), places, missed, out.reshape(*inputs["ids"].shape, -1))


def with_missed(cache: np.ndarray, places: Any, missed: Any, rows: np.ndarray) -> np.ndarray:
    """A copy of a cache [B, h, P, w], in which the rows [B, h, k, w] of the missed chunks are in their places."""
    cache, places, missed = np.array(cache), np.asarray(places), np.asarray(missed)
    for b, h, j in np.ndindex(rows.shape[:3]):
        if j in missed[b, h]:
            cache[b, h, places[b, h, j]] = rows[b, h, j]
    return cache


def chunk_size(left: Any, right: Any, profile: Any) -> int:
    """Tokens of a chunk."""
    return left.shape[-1] // (right.shape[2] if profile is None else sum(np.array(profile) * (8, 4, 2)) // 8)


def unpacked_values(row: np.ndarray, chunk: int, dim: int, bits: int, dtype: Any) -> np.ndarray:
    """Values of a chunk's row of 16-bit words: the codes of all tokens, then their scales, then what fills a sector.

    Word j of a token's w words has the numbers j, j + w, ..., the first lowest.
    """
    kind = np.float32 if dtype == "float32" else np.float16
    width, each = math.ceil(dim * bits / 16), np.dtype(kind).itemsize // 2
    assert row.dtype == np.uint16
    assert len(row) == math.ceil(chunk * (width + each) / 16) * 16
    values = np.zeros((chunk, dim), np.float32)
    for token, j in np.ndindex(chunk, dim):
        code = int(row[token * width + j % width]) >> (j // width * bits) & (2**bits - 1)
        first = chunk * width + token * each
        scale = np.frombuffer(row[first : first + each].astype("<u2").tobytes(), kind)[0]
        values[token, j] = np.float32(code - 2**bits if code >= 2 ** (bits - 1) else code) * np.float32(scale)
    return values.ravel()


def fetched_values(
    values: Any,
    left: Any,
    ids: Any,
    tail: Any = None,
    tail_unit: Any = None,
    values_tail: Any = None,
    right: Any = None,
    profile: Any = None,
    value_bits: Any = None,
    value_dtype: Any = None,
    **kept: Any,
) -> np.ndarray:
    """In the dtype of the values: they are moved, not computed, but for the product of a code and its scale."""
    values, ids, dim = np.asarray(values), np.asarray(ids), right.shape[-1]
    chunk = chunk_size(left, right, profile)
    out: list[Any] = []
    for b, h, j in np.ndindex(ids.shape):
        row, later, _ = chunk_of(ids, left.shape[-2], tail, tail_unit, b, h, j)
        came = (np.asarray(values_tail) if later else values)[b, h, row]
        if value_bits is not None:
            came = unpacked_values(came, chunk, dim, value_bits, value_dtype).astype(jnp.dtype(value_dtype))
        out.append(came)
    rows = np.array(out).reshape(*ids.shape, -1)
    if "missed" in kept:
        return with_missed(kept["kept_values"], kept["places"], kept["missed"], rows)
    return rows.reshape(*ids.shape[:2], -1, dim)
