"""The NumPy oracle of InfLLM, query by query: written from the paper's description, sharing no code with jshadow."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import LayerCache, Oracle, Trace
from oracle_maths import Array, apply_rope, softmax
from oracle_sisters import highest


@dataclasses.dataclass
class Memory:
    """One layer: attention that each token got from windows, by KV head and position."""

    mass: list[dict[int, float]]
    gap: float = np.inf


@dataclasses.dataclass(frozen=True)
class InfLLM:
    """Settings, named as in jshadow."""

    window: int
    sinks: int
    budget: int
    unit: int
    representatives: int
    query_block: int

    def blocks(self, position: int) -> int:
        """Blocks that the window of a query has left."""
        return max(position - self.window + 1 - self.sinks, 0) // self.unit

    def tokens(self, block: int) -> list[int]:
        """Positions of a block."""
        start = self.sinks + block * self.unit
        return list(range(start, start + self.unit))

    def choose(self, memory: Memory, far: Array, k_pre: Array, first: int) -> list[int]:
        """Blocks for queries far [n, h_q, d] from position `first` on."""
        h_kv = k_pre.shape[1]
        mean = far.mean(axis=0).reshape(h_kv, -1, far.shape[-1]).sum(axis=1)
        scores = np.zeros(self.blocks(first))
        for block in range(len(scores)):
            for head in range(h_kv):
                mass = np.array([memory.mass[head][p] for p in self.tokens(block)])
                kept, gap = highest(mass, self.representatives)
                memory.gap = min(memory.gap, gap)
                key = k_pre[[self.tokens(block)[i] for i in kept], head].mean(axis=0)
                scores[block] += mean[head] @ key
        chosen, gap = highest(scores, self.budget // self.unit)
        memory.gap = min(memory.gap, gap)
        return chosen

    def attend(
        self, memory: Memory, i: int, q: Array, far: Array, cache: Any, first: int, chosen: Sequence[int]
    ) -> tuple[Array, int]:
        """Output [h_q, d] of query i of a unit that begins at `first`, and how many tokens it saw."""
        k_pre, k_post, v = cache
        h_kv = k_pre.shape[1]
        near = list(range(max(0, i - self.window + 1), i + 1))
        left = range(i - self.window + 1)
        away = [p for p in left if p < self.sinks or p >= self.sinks + self.blocks(first) * self.unit]
        away += [p for block in chosen for p in self.tokens(block)]
        outs = []
        for head in range(len(q)):
            own = head // (len(q) // h_kv)
            close = k_post[near, own] @ q[head] / np.sqrt(q.shape[1])
            distant = k_pre[away, own] @ far[head] / np.sqrt(q.shape[1])
            outs.append(softmax(np.concatenate([close, distant])) @ v[near + away, own])
            for p, share in zip(near, softmax(close), strict=True):
                memory.mass[own][p] = memory.mass[own].get(p, 0.0) + float(share)
        return np.array(outs), len(near) + len(away)


class InfLLMOracle(Oracle):
    """The model under InfLLM, prompt included."""

    policy: Any

    def prefill(self, tokens: Sequence[int]) -> Array:
        """Unit by unit; logits of the last token [V]."""
        self.caches, self.trace, self.memory = [], [], []
        policy, rope, positions = self.policy, self.config.rope, np.arange(len(tokens))
        x = self.weights["embed"]["embedding"][np.asarray(tokens)]
        for layer in range(self.config.num_layers):
            weights = self.weights[f"layer_{layer}"]
            q_pre, k_pre, v = self.project(weights, x)
            q, k = apply_rope(q_pre, positions, rope), apply_rope(k_pre, positions, rope)
            far = self.far(q_pre)
            memory = Memory([{} for _ in range(k.shape[1])])
            out = np.zeros_like(q)
            for first in range(0, len(tokens), policy.query_block):
                unit = range(first, min(first + policy.query_block, len(tokens)))
                chosen = policy.choose(memory, far[unit], k_pre, first)
                for i in unit:
                    out[i], _ = policy.attend(memory, i, q[i], far[i], (k_pre, k, v), first, chosen)
            x = self.finish_block(weights, x, out)
            self.caches.append(LayerCache(k_pre, k, v))
            self.memory.append(memory)
        return self.logits(x[-1])

    def far(self, q_pre: Array) -> Array:
        """Queries as they stand before everything beyond the window."""
        return apply_rope(q_pre, np.full(len(q_pre), self.policy.window), self.config.rope)

    def attend(self, layer: int, cache: Any, q_pre: Array) -> Trace:
        """One step: a unit of one query."""
        i, memory = len(cache.k_pre) - 1, self.memory[layer]
        q, far = apply_rope(q_pre, np.array([i]), self.config.rope), self.far(q_pre)
        chosen = self.policy.choose(memory, far, cache.k_pre, i)
        rows = (cache.k_pre, cache.k_post, cache.v)
        out, seen = self.policy.attend(memory, i, q[0], far[0], rows, i, chosen)
        sets = [set(chosen) for _ in range(cache.k_pre.shape[1])]
        return self.noted(layer, selected=sets, gap=memory.gap, attended=seen, output=out[None])
