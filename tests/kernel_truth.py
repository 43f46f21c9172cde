"""The GPU ops in float64 NumPy, element by element: written from their docstrings, sharing nothing with the package."""

from typing import Any

import numpy as np


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    weight = np.exp(scores - scores.max())
    return weight / weight.sum()


def chunk_scores(q: Any, landmarks: Any, candidates: Any, scale: float) -> np.ndarray:
    q, landmarks, candidates = wide(q), wide(landmarks), np.asarray(candidates)
    batch, heads, count = candidates.shape
    group = q.shape[2] // heads
    out = np.full((batch, heads, q.shape[1], count), -1.0)
    for b, h, t in np.ndindex(batch, heads, q.shape[1]):
        there = candidates[b, h]
        if there.any():
            own = q[b, t, h * group : (h + 1) * group]
            out[b, h, t, there] = np.max([softmax(landmarks[b, h][there] @ one * scale) for one in own], axis=0)
    return out


def sparse_attention(q: Any, pieces: Any, scale: float) -> np.ndarray:
    q, out = wide(q), np.zeros(q.shape)
    for b, t, head in np.ndindex(q.shape[:3]):
        keys, values = [], []
        for k, v, valid in pieces:
            k, v = wide(k), wide(v)
            h = head * k.shape[1] // q.shape[2]
            seen = np.broadcast_to(np.asarray(valid), (*k.shape[:2], q.shape[1], k.shape[-2]))[b, h, t]
            own = (b, h) if k.ndim == 4 else (b, h, t)
            keys.append(k[own][seen])
            values.append(v[own][seen])
        if sum(map(len, keys)):
            out[b, t, head] = softmax(np.concatenate(keys) @ q[b, t, head] * scale) @ np.concatenate(values)
    return out


def chunk_of(ids: Any, units: int, tail: Any, tail_unit: Any, b: int, h: int, j: int) -> tuple[int, bool, int]:
    """Row of the prompt or of the tail, whether of the tail, and the chunk in the sequence."""
    most = units + (0 if tail is None else tail.shape[1])
    one = min(max(int(ids[b, h, j]), 0), most - 1)
    if one < units:
        return one, False, one
    return one - units, True, one - units + int(tail_unit[b])


def reconstruct_keys(
    left: Any, right: Any, ids: Any, inverse: Any, tail: Any = None, tail_unit: Any = None
) -> np.ndarray:
    left, right, inverse, ids = wide(left), wide(right), np.asarray(inverse), np.asarray(ids)
    tail = None if tail is None else wide(tail)
    rank, dim, half = right.shape[2], right.shape[3], len(inverse)
    chunk = left.shape[2] // rank
    out = np.zeros((*ids.shape, chunk, dim))
    for b, h, j in np.ndindex(ids.shape):
        row, later, place = chunk_of(ids, left.shape[1], tail, tail_unit, b, h, j)
        key = (tail if later else left)[b, row].reshape(chunk, rank) @ right[b, h]
        angle = (place * chunk + np.arange(chunk, dtype=np.float32))[:, None] * inverse  # rounded, as the ops do
        turned = (key[:, :half] + 1j * key[:, half : 2 * half]) * np.exp(1j * wide(angle))
        out[b, h, j] = np.concatenate([turned.real, turned.imag, key[:, 2 * half :]], axis=1)
    return out.reshape(*ids.shape[:2], -1, dim)


def fetched_values(
    values: Any, left: Any, right: Any, ids: Any, kept: Any = None, stay: Any = None, tail: Any = None,
    tail_unit: Any = None, values_tail: Any = None, **_: Any,
) -> np.ndarray:  # fmt: skip
    """In the dtype of the values: they are moved, not computed."""
    values, ids = np.asarray(values), np.asarray(ids)
    out = np.zeros((*ids.shape, values.shape[3]), values.dtype)
    for b, h, j in np.ndindex(ids.shape):
        row, later, _ = chunk_of(ids, left.shape[1], tail, tail_unit, b, h, j)
        out[b, h, j] = (np.asarray(values_tail) if later else values)[b, h, row]
        if stay is not None and np.asarray(stay)[b, h, j]:
            out[b, h, j] = np.asarray(kept)[b, h, j]
    return out.reshape(*ids.shape[:2], -1, right.shape[3])
