"""Cases of the op append_rows, and its definition in NumPy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from random_arrays import array


@dataclass(frozen=True)
class Appends:
    """New tokens and a buffer. `rotated` is how many columns RoPE rotates; None: all."""

    slots: int
    dim: int
    tokens: int = 1
    group: int = 1
    kv_heads: int = 1
    batch: int = 1
    rotated: int | None = None
    factor: float = 1.0
    dtype: str = "float32"
    buffer: str | None = None  # dtype of the buffer; None: that of the tokens


APPENDS = (
    Appends(96, 128, group=4, kv_heads=2, batch=3, dtype="bfloat16"),
    Appends(7, 64, tokens=3, group=7, kv_heads=3, batch=2),
    Appends(5, 80, tokens=3, group=2, kv_heads=2, batch=2, dtype="bfloat16"),
    Appends(11, 256, tokens=2, group=5, batch=2, factor=1.3),
    Appends(9, 128, tokens=3, kv_heads=2, batch=2, rotated=32, factor=1.3, dtype="bfloat16"),
    Appends(3, 80, group=3, kv_heads=2, rotated=20),
)
OTHER_DTYPES = (Appends(1, 64, batch=2, dtype="float16"), Appends(6, 96, tokens=4, group=3, batch=2, buffer="bfloat16"))
REAL_APPENDS = (
    Appends(1_024, 128, group=4, kv_heads=8, batch=4, dtype="bfloat16"),
    Appends(1_024, 128, tokens=16, group=4, kv_heads=8, dtype="bfloat16"),
    Appends(1_024, 128, group=4, kv_heads=8, batch=4),
)


def append_inputs(case: Appends) -> dict[str, Any]:
    """Arguments of append_rows. About a third of the tokens is not valid, and some slots are past the end."""
    rng, tokens = np.random.default_rng(case.slots), (case.batch, case.tokens)
    half = (case.dim if case.rotated is None else case.rotated) // 2

    def draw(*shape: int, dtype: str = case.dtype) -> Any:
        return array(rng.standard_normal(shape), dtype)

    buffer, kind = (case.batch, case.kv_heads, case.slots, case.dim), case.buffer or case.dtype
    slots = np.stack([rng.permutation(case.slots + case.tokens)[: case.tokens] for _ in range(case.batch)])
    angles = rng.uniform(0, 1e5, (*tokens, half))
    return {
        "k": draw(*buffer, dtype=kind),
        "v": draw(*buffer, dtype=kind),
        "q_new": draw(*tokens, case.kv_heads * case.group, case.dim),
        "k_new": draw(*tokens, case.kv_heads, case.dim),
        "v_new": draw(*tokens, case.kv_heads, case.dim),
        "cos": array(np.cos(angles), np.float32),
        "sin": array(np.sin(angles), np.float32),
        "slots": array(slots, np.int32),
        "valid": array(rng.random(tokens) < 0.7),
        "factor": case.factor,
    }


def written(inputs: dict[str, Any]) -> np.ndarray:
    """Which slots of the buffer are written, bool [B, W]."""
    slots, places = np.asarray(inputs["slots"]), np.arange(inputs["k"].shape[2])
    return ((slots[..., None] == places) & np.asarray(inputs["valid"])[..., None]).any(axis=1)


def append_truth(k, v, q_new, k_new, v_new, cos, sin, factor, slots, valid) -> tuple[np.ndarray, ...]:
    """The definition in float64."""
    arrays = (k, v, q_new, k_new, v_new, cos, sin)
    keys, values, queries, new_k, new_v, cos, sin = (np.array(x, np.float64) for x in arrays)
    slots, half = np.asarray(slots), cos.shape[2]
    for rows, scale in ((queries, factor), (new_k, 1.0)):
        turned = (rows[..., :half] + 1j * rows[..., half : 2 * half]) * (cos + 1j * sin)[:, :, None] * scale
        rows[..., :half], rows[..., half : 2 * half] = turned.real, turned.imag
    for b, t in np.argwhere(np.asarray(valid) & (slots < keys.shape[2])):
        keys[b, :, slots[b, t]], values[b, :, slots[b, t]] = new_k[b, t], new_v[b, t]
    return queries, keys, values
