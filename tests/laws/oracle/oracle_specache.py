"""The NumPy oracle of SpeCache: two queries a step over a low-bit copy, written from the paper's description.

Every exact row is kept; what a step may see of it follows from how many tokens are held.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import LayerCache, Oracle
from oracle_kivi import KIVI
from oracle_maths import Array, apply_rope, softmax
from oracle_sisters import highest


@dataclasses.dataclass(frozen=True)
class SpeCache(KIVI):
    """Settings, named as in jshadow."""

    fetched: int


class SpeCacheOracle(Oracle):
    """The model under SpeCache. `wanted` holds, of each layer and KV head, the positions that are exact in a step."""

    policy: Any

    def prefill(self, tokens: Sequence[int]) -> Array:
        """Exact; then a step on the most likely token, of which the guess and the wanted rows alone remain."""
        logits = super().prefill(tokens)
        self.wanted: list[list[list[int]]] = [[[]] * self.config.kv_heads for _ in self.caches]
        self.gap = np.inf
        best = int(np.argmax(logits))
        kept = [LayerCache(cache.k_pre, cache.k_post, cache.v) for cache in self.caches]
        self.guess = best
        self.guess = int(np.argmax(self.two(best)[0]))
        self.caches, self.trace = kept, []
        return logits

    def piece(self, tokens: Sequence[int]) -> Array:
        """One token, and the guess behind it."""
        rows = self.two(int(tokens[0]))
        self.guess = int(np.argmax(rows[1]))
        return rows[:1]

    def two(self, token: int) -> Array:
        """Logits [2, V] of the token and of the guess; only the token's rows are kept."""
        rope = self.config.rope
        x = self.weights["embed"]["embedding"][np.array([token, self.guess])]
        for i, cache in enumerate(self.caches):
            layer, at = self.weights[f"layer_{i}"], len(cache.k_pre) + np.arange(2)
            q_pre, k_pre, v = self.project(layer, x)
            q, k = apply_rope(q_pre, at, rope), apply_rope(k_pre, at, rope)
            cache.k_pre = np.concatenate([cache.k_pre, k_pre[:1]])
            cache.k_post = np.concatenate([cache.k_post, k[:1]])
            cache.v = np.concatenate([cache.v, v[:1]])
            out = self.attend_two(i, cache, q, k[1], v[1])
            x = self.finish_block(layer, x, out)
        return self.logits(x)

    def attend_two(self, layer: int, cache: Any, q: Array, k_guess: Array, v_guess: Array) -> Array:
        """Outputs [2, h_q, d]; notes what the next step wants."""
        held, h_kv, dim = cache.k_post.shape
        k_low, v_low = self.policy.distort(cache.k_post, cache.v)
        candidates = held // self.policy.residual * self.policy.residual  # low-bit in the next step
        group, out, wanted = q.shape[1] // h_kv, np.zeros_like(q), []
        for h in range(h_kv):
            keys, values = k_low[:, h].copy(), v_low[:, h].copy()
            exact = self.wanted[layer][h]
            keys[exact], values[exact] = cache.k_post[exact, h], cache.v[exact, h]
            both = np.concatenate([keys, k_guess[None, h]]), np.concatenate([values, v_guess[None, h]])
            given = np.zeros(held)
            for head in range(h * group, (h + 1) * group):
                out[0, head] = softmax(keys @ q[0, head] / np.sqrt(dim)) @ values
                probs = softmax(both[0] @ q[1, head] / np.sqrt(dim))
                out[1, head] = probs @ both[1]
                given += probs[:held] / group
            chosen, gap = highest(given[:candidates], self.policy.fetched)
            self.gap = min(self.gap, gap)
            wanted.append(chosen)
        self.wanted[layer] = wanted
        sets = [set(positions) for positions in wanted]
        self.trace.append(self.noted(layer, selected=sets, gap=self.gap, attended=held, output=out[:1]))
        return out
