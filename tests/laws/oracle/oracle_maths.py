"""The oracle's arithmetic: plain float64 NumPy. T tokens, h_q and h_kv query and KV heads, d head width.

Query head i uses KV head i // (h_q / h_kv).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # not at run time: the oracle must import without jax
    from jshadow.models.config import RopeConfig

type Array = NDArray[np.float64]


def attention(q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of the queries [g, d] that share one KV head, over its keys and values [tokens, d]."""
    return np.asarray(softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Exact causal attention of q [T, h_q, d] over k and v [T, h_kv, d]; result [T, h_q, d]."""
    group = q.shape[1] // k.shape[1]
    future = np.triu(np.ones((len(q), len(q)), dtype=bool), k=1)
    outputs = []
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[-1])
        logits[future] = -np.inf
        outputs.append(softmax(logits) @ v[:, head // group])
    return np.stack(outputs, axis=1)


def inverse_frequencies(rope: "RopeConfig", d: int) -> Array:
    """Angle per position of each of the d / 2 pairs, after the scaling that `rope.kind` names."""
    freqs = rope.theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    if rope.kind in ("default", "linear"):
        return freqs / (rope.factor if rope.kind == "linear" else 1.0)
    if rope.kind != "llama3":
        raise ValueError(f"the oracle knows no RoPE kind {rope.kind!r}")
    turns = rope.original_context * freqs / (2 * np.pi)  # within the original context
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return freqs * (kept + (1 - kept) / rope.factor)


def apply_rope(x: Array, positions: NDArray[np.integer[Any]], rope: "RopeConfig") -> Array:
    """Rotate the pairs (i, i + d/2) of x [T, heads, d] by positions [T] times their frequency."""
    angles = positions[:, None, None] * inverse_frequencies(rope, x.shape[-1])  # [T, 1, d / 2]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def lowest(values: Array, count: int) -> list[int]:
    """Indices of the `count` lowest of values [n]; ties go to the lower index."""
    return [int(i) for i in np.argsort(values, kind="stable")[:count]]


def tokens_of(chunks: Sequence[int], c: int) -> NDArray[np.int64]:
    """Positions of all the tokens of the given chunks, in order."""
    return (np.asarray(chunks, dtype=np.int64)[:, None] * c + np.arange(c)).reshape(-1)


def softmax(logits: Array) -> Array:
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Rows x [..., D] over their root mean square, times scale [D]."""
    return np.asarray(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale)


def linear(x: Array, node: Mapping[str, Any]) -> Array:
    """Rows x [..., in] times the kernel [in, out], plus the bias [out] where there is one."""
    return np.asarray(x @ node["kernel"] + node.get("bias", 0.0))


def to_float64(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tree of arrays in float64 NumPy."""
    return {k: to_float64(x) if isinstance(x, Mapping) else np.asarray(x, dtype=np.float64) for k, x in tree.items()}
