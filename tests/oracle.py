"""A NumPy oracle: Llama with three KV-cache policies, written from their descriptions and sharing no code with jshadow.

One row, no padding, float64, no cleverness: every key and value of the sequence is kept, and each policy says which
of them a decode step may see. Slow on purpose. Shapes: T tokens held, D model width, V vocabulary, h_q and h_kv query
and KV heads, g = h_q / h_kv, d head width, c chunk size, n chunks. Query head i uses KV head i // g.

Float32 code may pick another chunk than the oracle where two scores nearly tie; `Trace` carries the gaps that tell.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # not at run time: the oracle must import without jax
    from jshadow.config import ModelConfig, RopeConfig

Array: TypeAlias = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Full:
    """Exact attention over every token."""


@dataclasses.dataclass(frozen=True)
class StreamingLLM:
    """Tokens 0 .. sinks-1 and the `window` most recent ones, the current one counted.

    `rebase_positions` rotates keys and query at their index inside the cache (the paper), not where they truly are.
    """

    sinks: int
    window: int
    rebase_positions: bool = True


@dataclasses.dataclass(frozen=True)
class ShadowKV:
    """Landmark-selected chunks with low-rank keys, beside exact outlier chunks and an exact window.

    Attributes:
        rank: columns kept of the prompt's pre-RoPE keys.
        budget: tokens selected a step and KV head; window and outliers come on top.
        chunk_size: tokens a chunk.
        outlier_chunks: chunks a KV head whose exact keys are always attended.
        local_chunks: whole chunks at the end of the prompt that stay in the window.
    """

    rank: int
    budget: int
    chunk_size: int = 8
    outlier_chunks: int = 48
    local_chunks: int = 4


Policy: TypeAlias = Full | StreamingLLM | ShadowKV


class Trace(TypedDict):
    """What one layer did in one decode step. A policy that selects nothing has empty sets and infinite gaps."""

    step: int  # 0 for the first call of Oracle.step after prefill
    layer: int
    selected: list[set[int]]  # [h_kv] ids of the selected chunks
    outliers: list[set[int]]  # [h_kv] ids of the outlier chunks, fixed at prefill
    scores: Array  # [h_kv, n] by chunk id; -inf where the chunk is an outlier
    gap: float  # smallest over KV heads of (last score in - first score out) / last score in
    outlier_gap: float  # the same at the outliers' cut, but the plain difference of the two cosines
    attended: int  # tokens attended; the same for every KV head
    output: Array  # [h_q, d] attention output before the o projection


@dataclasses.dataclass
class Compressed:
    """What ShadowKV derives from one layer's prompt; n chunks, the rest of the prompt is the window."""

    landmarks: Array  # [h_kv, n, d] mean post-RoPE key of each chunk
    outliers: list[list[int]]  # [h_kv][o] ascending chunk ids
    outlier_gap: float
    rebuilt: Array  # [prompt, h_kv, d] post-RoPE keys rebuilt from the rank-r factors


@dataclasses.dataclass
class LayerCache:
    """Every key (before RoPE) and value of one layer, in order of position: [T, h_kv, d] each."""

    k_pre: Array
    v: Array
    compressed: Compressed | None


class Oracle:
    """A Llama model and one row's cache under a policy: `prefill` once, then `step` token by token."""

    def __init__(self, weights: Mapping[str, Any], config: "ModelConfig", policy: Policy) -> None:
        """Take jshadow's weight tree (layer_0/attention/q/kernel [in, out] and so on), as nested mappings."""
        if isinstance(policy, ShadowKV) and policy.rank > config.kv_heads * config.head_dim:
            raise ValueError(f"rank must be at most h_kv * d = {config.kv_heads * config.head_dim}, got {policy.rank}")
        self.weights = to_float64(weights)
        self.config = config
        self.policy = policy
        self.caches: list[LayerCache] = []
        self.trace: list[Trace] = []  # one entry a step and layer, layers of a step in order

    def prefill(self, tokens: Sequence[int]) -> Array:
        """Read the prompt with exact causal attention, then compress every layer; logits of the last token [V]."""
        if len(tokens) == 0:
            raise ValueError("prefill needs at least one token")
        self.caches, self.trace = [], []
        rope, positions = self.config.rope, np.arange(len(tokens))
        x = self.weights["embed"]["embedding"][np.asarray(tokens)]
        for i in range(self.config.num_layers):
            layer = self.weights[f"layer_{i}"]
            q_pre, k_pre, v = self.project(layer, x)
            q, k = apply_rope(q_pre, positions, rope), apply_rope(k_pre, positions, rope)
            x = self.finish_block(layer, x, causal_attention(q, k, v))
            compressed = compress(self.policy, k_pre, k, rope) if isinstance(self.policy, ShadowKV) else None
            self.caches.append(LayerCache(k_pre, v, compressed))
        return self.logits(x[-1])

    def step(self, token: int) -> Array:
        """Append one token to the cache, attend as the policy says; logits [V]."""
        x = self.weights["embed"]["embedding"][[token]]
        for i, cache in enumerate(self.caches):
            layer = self.weights[f"layer_{i}"]
            q_pre, k_pre, v = self.project(layer, x)
            cache.k_pre = np.concatenate([cache.k_pre, k_pre])
            cache.v = np.concatenate([cache.v, v])
            entry = self.attend(i, cache, q_pre[0])
            self.trace.append(entry)
            x = self.finish_block(layer, x, entry["output"][None])
        return self.logits(x[0])

    def attend(self, layer: int, cache: LayerCache, q_pre: Array) -> Trace:
        """Attention of one query [h_q, d], whose own key is the last in the cache, under the policy."""
        held, h_kv, _ = cache.k_pre.shape
        entry = Trace(
            step=len(self.trace) // self.config.num_layers,
            layer=layer,
            selected=[set() for _ in range(h_kv)],
            outliers=[set() for _ in range(h_kv)],
            scores=np.zeros((h_kv, 0)),
            gap=np.inf,
            outlier_gap=np.inf,
            attended=0,
            output=np.zeros(0),
        )
        kept = positions = np.arange(held)
        if isinstance(self.policy, StreamingLLM):
            kept = kept[(kept < self.policy.sinks) | (kept >= held - self.policy.window)]
            positions = np.arange(len(kept)) if self.policy.rebase_positions else kept
        q = apply_rope(q_pre[None], positions[-1:], self.config.rope)[0]
        keys = apply_rope(cache.k_pre[kept], positions, self.config.rope)
        if isinstance(self.policy, ShadowKV):
            shadowkv_attend(self.policy, cache, keys, q, entry)
            return entry
        groups = enumerate(np.split(q, h_kv))
        entry["output"] = np.concatenate([attention(group, keys[:, h], cache.v[kept, h]) for h, group in groups])
        entry["attended"] = len(kept)
        return entry

    def project(self, layer: Mapping[str, Any], x: Array) -> tuple[Array, Array, Array]:
        """Queries [T, h_q, d], keys and values [T, h_kv, d] of the residual stream x [T, D]; nothing is rotated."""
        normed = rms_norm(x, layer["attention_norm"]["scale"], self.config.norm_eps)
        rows = (len(x), -1, self.config.head_dim)
        q, k, v = (linear(normed, layer["attention"][name]).reshape(rows) for name in "qkv")
        return q, k, v

    def finish_block(self, layer: Mapping[str, Any], x: Array, attended: Array) -> Array:
        """The rest of a block: x [T, D] plus the o projection of attended [T, h_q, d], then the gated MLP."""
        x = x + linear(attended.reshape(len(x), -1), layer["attention"]["o"])
        normed = rms_norm(x, layer["mlp_norm"]["scale"], self.config.norm_eps)
        gate = linear(normed, layer["mlp"]["gate"])
        return x + linear(gate / (1 + np.exp(-gate)) * linear(normed, layer["mlp"]["up"]), layer["mlp"]["down"])

    def logits(self, x: Array) -> Array:
        """Logits [V] of one token's residual stream x [D]."""
        normed = rms_norm(x, self.weights["norm"]["scale"], self.config.norm_eps)
        if self.config.tie_embeddings:
            return np.asarray(self.weights["embed"]["embedding"] @ normed)
        return linear(normed, self.weights["head"])


def compress(policy: ShadowKV, k_pre: Array, k_post: Array, rope: "RopeConfig") -> Compressed:
    """ShadowKV's prefill for one layer: landmarks, outliers and low-rank keys of the prompt's keys [T, h_kv, d]."""
    length, h_kv, d = k_pre.shape
    c = policy.chunk_size
    n = max(0, length // c - policy.local_chunks)
    o = min(policy.outlier_chunks, n)
    chunks = k_post[: n * c].reshape(n, c, h_kv, d).transpose(2, 0, 1, 3)  # [h_kv, n, c, d]
    landmarks = chunks.mean(axis=2)
    dots = np.einsum("hncd,hnd->hnc", chunks, landmarks)
    norms = np.linalg.norm(chunks, axis=-1) * np.linalg.norm(landmarks, axis=-1)[..., None]
    worst = (dots / norms).min(axis=2)  # [h_kv, n]
    outliers = [sorted(lowest(row, o)) for row in worst]
    gaps = [float(np.diff(np.sort(row))[o - 1]) if 0 < o < n else np.inf for row in worst]

    u, s, vt = np.linalg.svd(k_pre.reshape(length, h_kv * d), full_matrices=False)
    low_rank = (u[:, : policy.rank] * s[: policy.rank]) @ vt[: policy.rank]
    rebuilt = apply_rope(low_rank.reshape(length, h_kv, d), np.arange(length), rope)
    return Compressed(landmarks, outliers, min(gaps), rebuilt)


def shadowkv_attend(policy: ShadowKV, cache: LayerCache, k_post: Array, q: Array, entry: Trace) -> None:
    """One ShadowKV decode step of one layer: exact keys [T, h_kv, d], rotated query [h_q, d]; fills the entry."""
    state = cache.compressed
    assert state is not None
    h_kv, n, d = state.landmarks.shape
    c = policy.chunk_size
    window = np.arange(n * c, len(k_post))
    entry["scores"] = np.full((h_kv, n), -np.inf)
    entry["outliers"], entry["outlier_gap"] = [set(ids) for ids in state.outliers], state.outlier_gap
    outputs = []
    for head, queries in enumerate(np.split(q, h_kv)):
        candidates = np.setdiff1d(np.arange(n), state.outliers[head])
        k = min(policy.budget // c, len(candidates))
        logits = queries @ state.landmarks[head, candidates].T / np.sqrt(d)  # [g, candidates]
        scores = softmax(logits).max(axis=0) if len(candidates) else np.zeros(0)
        entry["scores"][head, candidates] = scores
        selected = sorted(int(candidates[i]) for i in lowest(-scores, k))
        if 0 < k < len(candidates):
            falling = -np.sort(-scores)
            entry["gap"] = min(entry["gap"], float((falling[k - 1] - falling[k]) / falling[k - 1]))

        exact = np.concatenate([tokens_of(state.outliers[head], c), window])
        fetched = tokens_of(selected, c)
        keys = np.concatenate([k_post[exact, head], state.rebuilt[fetched, head]])
        values = np.concatenate([cache.v[exact, head], cache.v[fetched, head]])
        outputs.append(attention(queries, keys, values))
        entry["selected"][head] = set(selected)
        entry["attended"] = len(keys)
    entry["output"] = np.concatenate(outputs)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of the queries [g, d] that share one KV head, over its keys and values [tokens, d]."""
    return np.asarray(softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Exact causal attention of q [T, h_q, d] over k and v [T, h_kv, d]; result [T, h_q, d]."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    future = np.triu(np.ones((len(q), len(q)), dtype=bool), k=1)
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    return np.asarray(np.einsum("hqk,khd->qhd", softmax(np.where(future, -np.inf, logits)), v))


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
