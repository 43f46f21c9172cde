"""Cases of the op append_rows, and its definition in NumPy."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from random_arrays import array

from pallas_kernels import NewTokens, append_rows


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
OTHER_DTYPES = (
    Appends(1, 64, batch=2, dtype="float16"),
    Appends(6, 96, tokens=4, group=3, batch=2, buffer="bfloat16"),
)
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

    buffer = (case.batch, case.kv_heads, case.slots, case.dim)
    slots = np.stack([rng.permutation(case.slots + case.tokens)[: case.tokens] for _ in range(case.batch)])
    angles = rng.uniform(0, 1e5, (*tokens, half))
    return {
        "k": draw(*buffer, dtype=case.buffer or case.dtype),
        "v": draw(*buffer, dtype=case.buffer or case.dtype),
        "q_new": draw(*tokens, case.kv_heads * case.group, case.dim),
        "k_new": draw(*tokens, case.kv_heads, case.dim),
        "v_new": draw(*tokens, case.kv_heads, case.dim),
        "cos": array(np.cos(angles), np.float32),
        "sin": array(np.sin(angles), np.float32),
        "slots": array(slots, np.int32),
        "valid": array(rng.random(tokens) < 0.7),
        "factor": case.factor,
    }


@functools.partial(jax.jit, static_argnames=("factor", "unit", "implementation"))
def append_call(
    k: Any, v: Any, *, q_new: Any, k_new: Any, v_new: Any, implementation: str = "auto", **rest: Any
) -> Any:
    """Call append_rows with flat arguments: those of `append_inputs`, and `first` and `unit`."""
    options = {name: rest.pop(name) for name in ("factor", "unit") if name in rest}
    return append_rows(k, v, NewTokens(q_new, k_new, v_new, **rest), **options, implementation=implementation)


def append_truth(
    k: Any, v: Any, q_new: Any, k_new: Any, v_new: Any, cos: Any, sin: Any, factor: float, **places: Any
) -> tuple[np.ndarray, ...]:
    """The definition, one token at a time, in float64."""
    keys, values, queries, new_k, new_v = (np.array(x, np.float64) for x in (k, v, q_new, k_new, v_new))
    slots, valid = (np.asarray(places[name]) for name in ("slots", "valid"))
    cos, sin, half = np.asarray(cos), np.asarray(sin), cos.shape[2]
    for b, t in np.ndindex(*valid.shape):
        turn = cos[b, t].astype(np.float64) + 1j * sin[b, t].astype(np.float64)
        for rows, scale in ((queries[b, t], factor), (new_k[b, t], 1.0)):
            turned = (rows[:, :half] + 1j * rows[:, half : 2 * half]) * turn * scale
            rows[:, :half], rows[:, half : 2 * half] = turned.real, turned.imag
        if valid[b, t] and slots[b, t] < keys.shape[2]:
            keys[b, :, slots[b, t]], values[b, :, slots[b, t]] = new_k[b, t], new_v[b, t]
    return queries, keys, values
