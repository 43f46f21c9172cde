"""A NumPy oracle: Llama with KV-cache policies, written from their descriptions and sharing no code with jshadow.

One row, no padding, float64, no cleverness: every key and value of the sequence is kept, and each policy says which
of them a token may see. Slow on purpose. Shapes: T tokens held, t tokens of a piece, D model width, V vocabulary, h_q
and h_kv query and KV heads, d head width. This file is the model and the policies without a memory of the prompt;
ShadowKV is in oracle_shadowkv.py, the arithmetic in oracle_maths.py.

Float32 code may choose otherwise than the oracle where two scores nearly tie; `Trace` carries the gaps that tell.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from oracle_maths import Array, apply_rope, attention, causal_attention, linear, rms_norm, to_float64
from oracle_maths import softmax as softmax
from oracle_maths import tokens_of as tokens_of
from oracle_shadowkv import LayerCache as LayerCache
from oracle_shadowkv import ShadowKV, ShadowKVPlus, Trace, attend_piece, compress, rebuild, trace_of

if TYPE_CHECKING:  # not at run time: the oracle must import without jax
    from jshadow.models.config import ModelConfig


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


type Policy = Full | StreamingLLM | ShadowKV


class Oracle:
    """A Llama model and one row's cache under a policy: `prefill` once, then `step` or `extend`."""

    def __init__(self, weights: Mapping[str, Any], config: "ModelConfig", policy: Policy) -> None:
        """Take jshadow's weight tree (layer_0/attention/q/kernel [in, out] and so on), as nested mappings."""
        if isinstance(policy, ShadowKV) and policy.rank > config.kv_heads * config.head_dim:
            raise ValueError(f"rank must be at most h_kv * d = {config.kv_heads * config.head_dim}, got {policy.rank}")
        if isinstance(policy, ShadowKVPlus) and policy.turn_selection != "each":
            raise ValueError(f"ShadowKVPlus knows turn_selection 'each' only, got {policy.turn_selection!r}")
        self.weights = to_float64(weights)
        self.config = config
        self.policy = policy
        self.caches: list[LayerCache] = []
        self.trace: list[Trace] = []  # one entry a piece and layer, layers of a piece in order

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
            cache = LayerCache(k_pre, k, v)
            self.remember(i, cache, q)
            self.caches.append(cache)
        return self.logits(x[-1])

    def remember(self, layer: int, cache: LayerCache, q: Array) -> None:
        """What the policy takes from a prompt's keys, values and rotated queries [T, h_q, d]."""
        if isinstance(self.policy, ShadowKV):
            compress(self.policy, cache, q, self.config.rope)

    def step(self, token: int) -> Array:
        """Append one token to the cache, attend as the policy says; logits [V]."""
        return self.piece([token])[0]

    def extend(self, tokens: Sequence[int]) -> Array:
        """A turn of t new tokens, one by one or in pieces that share a selection; logits [t, V]."""
        size = 1
        if isinstance(self.policy, ShadowKV) and self.policy.turn_selection == "shared":
            size = self.policy.extend_piece
        pieces = [self.piece(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        return np.concatenate([np.zeros((0, self.config.vocab_size)), *pieces])

    def piece(self, tokens: Sequence[int]) -> Array:
        """Append t tokens to the cache of each layer in turn, attend with one selection; logits [t, V]."""
        x = self.weights["embed"]["embedding"][np.asarray(tokens)]
        for i, cache in enumerate(self.caches):
            layer, positions = self.weights[f"layer_{i}"], len(cache.k_pre) + np.arange(len(x))
            q_pre, k_pre, v = self.project(layer, x)
            k_post = apply_rope(k_pre, positions, self.config.rope)
            cache.k_pre = np.concatenate([cache.k_pre, k_pre])
            cache.k_post = np.concatenate([cache.k_post, k_post])
            cache.v = np.concatenate([cache.v, v])
            entry = self.attend(i, cache, q_pre)
            self.trace.append(entry)
            x = self.finish_block(layer, x, entry["output"])
        return self.logits(x)

    def attend(self, layer: int, cache: LayerCache, q_pre: Array) -> Trace:
        """Attention of a piece's queries [t, h_q, d], whose own keys are the last in the cache, under the policy."""
        held, h_kv, _ = cache.k_pre.shape
        entry = self.noted(layer, queries=len(q_pre))
        if isinstance(self.policy, ShadowKV):
            rebuild(cache, self.config.rope)
            q = apply_rope(q_pre, np.arange(held - len(q_pre), held), self.config.rope)
            attend_piece(self.policy, cache, q, entry)
            return entry
        kept = positions = np.arange(held)
        if isinstance(self.policy, StreamingLLM):
            kept = kept[(kept < self.policy.sinks) | (kept >= held - self.policy.window)]
            positions = np.arange(len(kept)) if self.policy.rebase_positions else kept
        q = apply_rope(q_pre, positions[-1:], self.config.rope)[0]
        keys = apply_rope(cache.k_pre[kept], positions, self.config.rope)
        groups = enumerate(np.split(q, h_kv))
        entry["output"] = np.concatenate([attention(group, keys[:, h], cache.v[kept, h]) for h, group in groups])[None]
        entry["attended"] = len(kept)
        return entry

    def noted(self, layer: int, **known: Any) -> Trace:
        """The trace of a piece in a layer, with what is known of it."""
        return trace_of(len(self.trace), self.config.num_layers, layer, self.config.kv_heads, **known)

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
        """Logits [..., V] of the residual stream x [..., D]."""
        normed = rms_norm(x, self.weights["norm"]["scale"], self.config.norm_eps)
        if self.config.tie_embeddings:
            return np.asarray(normed @ self.weights["embed"]["embedding"].T)
        return linear(normed, self.weights["head"])
