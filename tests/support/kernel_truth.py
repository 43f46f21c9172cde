"""The GPU ops in float64 NumPy: written from their docstrings, sharing nothing with the package."""

import inspect
import math
from typing import Any

import numpy as np
from random_arrays import wide as wide


def codes_in(rows: np.ndarray, bits: int) -> np.ndarray:
    """Codes of rows of w bytes or words: item j has the numbers j, j + w, ..., the first lowest."""
    each = 8 * rows.itemsize // bits
    return np.concatenate([rows.astype(int) >> bits * place & 2**bits - 1 for place in range(each)], axis=-1)


def two_s_complement(codes: np.ndarray, bits: int) -> np.ndarray:
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)


def numbers_of(rows: Any, scale: Any, dim: int) -> np.ndarray:
    """Landmarks of rows of numbers, or of codes that fill bytes, with their steps [..., 1]."""
    rows = np.asarray(rows)
    if scale is None:
        return wide(rows).reshape(*rows.shape[:-1], -1, dim)
    rows = rows.reshape(*np.shape(scale), -1)
    bits = 8 * rows.shape[-1] // dim
    return two_s_complement(codes_in(rows, bits), bits) * wide(scale)[..., None]


def softmax(logits: np.ndarray, there: Any = True) -> np.ndarray:
    """Over the last axis, of what is there. All zeros if nothing is."""
    logits = np.where(there, logits, -np.inf)
    weight = np.exp(logits - np.maximum(logits.max(axis=-1, keepdims=True), -1e300))
    return weight / np.maximum(weight.sum(axis=-1, keepdims=True), 1e-300)


def grouped(q: Any, heads: int) -> np.ndarray:
    """Queries by KV head [B, h_kv, T, group, d]."""
    q = wide(q)
    return q.reshape(*q.shape[:2], heads, -1, q.shape[3]).transpose(0, 2, 1, 3, 4)


def chunk_scores(
    q: Any, landmarks: Any, candidates: Any, scale: float, landmark_scale: Any = None, spread: Any = None
) -> np.ndarray:
    there = np.asarray(candidates)
    marks = numbers_of(landmarks, landmark_scale, q.shape[3]).reshape(*there.shape, -1, q.shape[3])
    half = np.zeros(marks.shape[:4]) if spread is None else (scale * wide(spread)).reshape(marks.shape[:4]) ** 2 / 2
    return mass_of(grouped(q, there.shape[1]), marks[:, :, None], half[:, :, None], there[:, :, None], scale)


def mass_of(q: np.ndarray, marks: np.ndarray, half: np.ndarray, there: np.ndarray, scale: float) -> np.ndarray:
    """Scores of chunks [B, h, T, n] for queries [B, h, T, group, d] and landmarks [B, h, T, n, s, d]."""
    logits = scale * np.einsum("...gd,...nsd->...gns", q, marks) + np.einsum("...gd,...gd,...ns->...gns", q, q, half)
    flags = np.repeat(there, logits.shape[-1], axis=-1)[..., None, :]
    mass = softmax(logits.reshape(*logits.shape[:-2], -1), flags).reshape(logits.shape).sum(axis=-1).max(axis=-2)
    return np.where(there, mass, -1.0)


def in_order(k: Any, v: Any, valid: Any, *rest: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A piece of sparse_attention without its list of places: the listed rows one by one. `rest` is [places,] d."""
    k, v, valid, (*places, dim) = wide(k), wide(v), np.asarray(valid), rest
    if not places or places[0] is None:
        return k, v, valid
    listed = np.clip(places[0], 0, max(k.shape[2] - 1, 0))[..., None]  # no query sees a place that does not exist
    if k.shape[2] == 0:
        k, v = (np.zeros((*x.shape[:2], 1, x.shape[3])) for x in (k, v))
    lead, size = listed.shape[:2], listed.shape[2] * (k.shape[3] // dim)
    rows = [np.take_along_axis(x, listed, axis=2).reshape(*lead, size, dim) for x in (k, v)]
    counts = np.minimum(valid, listed.shape[2]) * np.int32(k.shape[3] // dim) if valid.dtype == np.int32 else valid
    return rows[0], rows[1], counts


def sparse_attention(q: Any, pieces: Any, scale: float) -> np.ndarray:
    heads, scores, values = pieces[0][0].shape[1], [], []
    queries = grouped(q, heads)
    for piece in pieces:
        k, v, valid = in_order(*piece, q.shape[3])
        k, v = (
            np.broadcast_to(x[:, :, None] if x.ndim == 4 else x, (*queries.shape[:3], *x.shape[-2:])) for x in (k, v)
        )
        rows = k.shape[3]
        seen = (
            np.arange(rows) < valid if valid.dtype == np.int32 else np.repeat(valid, rows // max(valid.shape[3], 1), 3)
        )
        scores.append(np.where(seen[:, :, :, None], scale * queries @ k.swapaxes(3, 4), -np.inf))
        values.append(v)
    together = np.concatenate(scores, axis=4)
    out = softmax(together, together > -np.inf) @ np.concatenate(values, axis=3)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def chosen(ids: Any, left: Any, tail: Any, tail_unit: Any) -> tuple[np.ndarray, np.ndarray]:
    """For each id that is clipped to what exists, the row of the prompt and its tail, and the chunk of the sequence."""
    units = left.shape[-2]
    rows = np.clip(ids, 0, units + (0 if tail is None else tail.shape[-2]) - 1)
    if tail is None:
        return rows, rows
    return rows, np.where(rows < units, rows, rows - units + np.asarray(tail_unit)[:, None, None])


def taken(prompt: Any, tail: Any, rows: np.ndarray) -> np.ndarray:
    """The rows [B, h, k, w] of a prompt and its tail, which all heads share if these have three axes."""
    both = np.concatenate([np.asarray(x) for x in (prompt, tail) if x is not None], axis=-2)
    both = both if both.ndim == 4 else np.broadcast_to(both[:, None], (*rows.shape[:2], *both.shape[1:]))
    return np.take_along_axis(both, rows[..., None], axis=2)


def reconstruct_keys(left, right, ids, inverse, tail=None, tail_unit=None, mean=None, profile=None) -> np.ndarray:
    (rows, places), chunk = chosen(ids, left, tail, tail_unit), chunk_size(left, right, profile)
    own = taken(left, tail, rows)
    own = own.reshape(*own.shape[:3], chunk, -1)
    if profile is not None:
        ends = np.cumsum([count * bits // 8 for count, bits in zip(profile, (8, 4, 2), strict=True)])
        parts = zip(np.split(own, ends[:2], axis=-1), (8, 4, 2), strict=True)
        own = np.concatenate([codes_in(part, bits) + 0.5 - 2 ** (bits - 1) for part, bits in parts], axis=-1)
    key, half = wide(own) @ wide(right)[:, :, None], len(inverse)
    if mean is not None:
        key += wide(mean)[:, :, None, None]
    at = (places * chunk).astype(np.float32)[..., None] + np.arange(chunk, dtype=np.float32)
    angle = wide(at[..., None] * np.asarray(inverse))  # rounded, as the ops do
    turned = (key[..., :half] + 1j * key[..., half : 2 * half]) * np.exp(1j * angle)
    out = np.concatenate([turned.real, turned.imag, key[..., 2 * half :]], axis=-1)
    return out.reshape(*rows.shape[:2], -1, key.shape[-1])


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


def unpacked_values(rows: np.ndarray, chunk: int, dim: int, bits: int, dtype: Any) -> np.ndarray:
    """Values [..., c, d] of rows of 16-bit words: the codes of all tokens, their scales, and what fills a sector."""
    kind = np.dtype(np.float32 if dtype == "float32" else np.float16)
    width, each = math.ceil(dim * bits / 16), kind.itemsize // 2
    assert rows.dtype == np.uint16
    assert rows.shape[-1] == math.ceil(chunk * (width + each) / 16) * 16
    codes, scales = rows[..., : chunk * width], rows[..., chunk * width : chunk * (width + each)]
    codes = codes_in(codes.reshape(*rows.shape[:-1], chunk, width), bits)[..., :dim]
    steps = np.ascontiguousarray(scales).view(kind).astype(np.float32)
    return two_s_complement(codes, bits).astype(np.float32) * steps[..., None]


def fetched_values(
    values, left, ids, right, tail=None, tail_unit=None, values_tail=None, profile=None, value_bits=None, **rest
) -> np.ndarray:
    """In the dtype of the values: they are moved, not computed, but for the product of a code and its scale."""
    rows, dim = taken(values, values_tail, chosen(ids, left, tail, tail_unit)[0]), right.shape[-1]
    if value_bits is not None:
        kind = rest["value_dtype"]
        rows = unpacked_values(rows, chunk_size(left, right, profile), dim, value_bits, kind).astype(np.dtype(kind))
        rows = rows.reshape(*rows.shape[:3], -1)
    if "missed" in rest:
        return with_missed(rest["kept_values"], rest["places"], rest["missed"], rows)
    return rows.reshape(*rows.shape[:2], -1, dim)


def attend_chunks(q: Any, scale: float, **inputs: Any) -> np.ndarray:
    keys = kept_or_rebuilt(**inputs)
    return sparse_attention(q, [(keys, fetched_values(**inputs), np.ones((1, 1, 1, keys.shape[2]), bool))], scale)
