"""The NumPy oracle of LESS: every evicted token by itself, none summed up.

Written from the description: held tokens weigh exp(score), an evicted token phi(q) psi(k), all under one normalizer. No
state is kept: what is not held was evicted. Which tokens are held is the oracle's H2O.
"""

import math
from typing import Any

import numpy as np
from oracle import Trace
from oracle_maths import Array, apply_rope
from oracle_sisters import SetOracle


def gelu(x: Array) -> Array:
    """x times the share of a normal distribution below it."""
    return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


def phi(kernel: dict[str, Array], head: int, q: Array) -> Array:
    """Features [R] of a query [d]."""
    return np.abs(gelu(gelu(q @ kernel["first"][head]) @ kernel["second"][head]))


def psi(kernel: dict[str, Array], head: int, k: Array) -> Array:
    """Features [R] of a key [d]."""
    scaled = gelu(gelu(k @ kernel["first"][head]) @ kernel["second"][head]) * kernel["scale"][head]
    return np.abs(scaled @ (np.eye(len(scaled)) + kernel["interaction"][head]))


class LESSOracle(SetOracle):
    """The model under the oracle's H2O, what that evicted weighed by kernels; `fitted` as jshadow has it."""

    fitted: dict[str, dict[str, Array]]

    def attend(self, layer: int, cache: Any, q_pre: Array) -> Trace:
        """One token after another, held and evicted."""
        held, h_kv, dim = cache.k_pre.shape
        memory = self.memory[layer]
        q = apply_rope(q_pre, np.array([held - 1]), self.config.rope)[0]
        seen, _ = self.policy.see(memory, q, cache.k_post)
        own = {
            kernel: {name: np.asarray(x[layer], np.float64) for name, x in parts.items()}
            for kernel, parts in self.fitted.items()
        }
        group, outs, probs = len(q) // h_kv, [], []
        for head, positions in enumerate(seen):
            kv = head // group
            exact = {p: math.exp(cache.k_post[p, kv] @ q[head] / math.sqrt(dim)) for p in positions}
            features = phi(own["phi"], kv, q[head])
            rough = {
                p: float(features @ psi(own["psi"], kv, cache.k_post[p, kv])) for p in range(held) if p not in exact
            }
            weights = exact | rough
            total = sum(weights.values())
            outs.append(sum(weight * cache.v[p, kv] for p, weight in weights.items()) / total)
            probs.append(np.array([exact[p] for p in positions]) / sum(exact.values()))
        self.policy.saw(memory, seen, probs, held)
        return self.noted(layer, output=np.array(outs)[None])
