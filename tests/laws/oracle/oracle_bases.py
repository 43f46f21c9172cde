"""The NumPy oracles of Loki and InfiniGen, which score tokens in a few columns of a basis."""

import dataclasses
from typing import Any

import numpy as np
from oracle_maths import Array
from oracle_sisters import SetPolicy, highest


@dataclasses.dataclass(frozen=True)
class Loki(SetPolicy):
    """Principal components by NumPy's SVD of the centered keys."""

    budget: int
    columns: int
    recent: int

    def start(self, q: Array, k: Array, layer: int, shared: dict[str, Any]) -> list[Array]:
        """The leading components of each head, [d, r]."""
        bases = []
        for h in range(k.shape[1]):
            _, sizes, rows = np.linalg.svd(k[:, h] - k[:, h].mean(axis=0))
            spread = np.zeros(len(rows))
            spread[: len(sizes)] = sizes**2
            # what the prompt has nothing along is arbitrary, and says nothing unless it is all there
            known = (spread > 1e-5 * spread[0]) | (self.columns == len(rows))
            bases.append((rows * known[:, None])[: self.columns].T)
        return bases

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """The recent tokens and the best of the others."""
        held, h_kv, _ = k.shape
        group, seen, gaps = len(q) // h_kv, [], []
        first = max(held - self.recent, 0)
        for h in range(h_kv):
            products = (k[:first, h] @ memory[h]) @ (q[h * group : (h + 1) * group] @ memory[h]).T
            best, gap = highest(products.max(axis=1) if first else np.zeros(0), self.budget)
            gaps.append(gap)
            seen += [best + list(range(first, held))] * group
        return seen, min(gaps)


@dataclasses.dataclass(frozen=True)
class InfiniGen(SetPolicy):
    """Columns of the queries' singular vectors; a count by threshold, the same for all heads."""

    budget: int
    columns: int
    alpha: float
    dense_layers: int
    recent: int

    foresees = True

    def start(self, q: Array, k: Array, layer: int, shared: dict[str, Any]) -> dict[str, Any]:
        """Chosen columns of each head's basis, [d, r]."""
        group, bases = q.shape[1] // k.shape[1], []
        for h in range(k.shape[1]):
            queries = q[:, h * group : (h + 1) * group].reshape(-1, q.shape[2])
            skew = np.linalg.svd(queries)[2].T
            weight = np.abs(queries @ skew).sum(axis=0) + np.abs(k[:, h] @ skew).sum(axis=0)
            bases.append(skew[:, np.argsort(-weight, kind="stable")[: self.columns]])
        return {"layer": layer, "bases": bases}

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """The recent tokens; of the others, each head's best ones within alpha of its best, as many for all heads."""
        held, h_kv, dim = k.shape
        if memory["layer"] < self.dense_layers:
            return [list(range(held))] * len(q), np.inf
        group, first, scores = len(q) // h_kv, max(held - self.recent, 0), []
        for h, basis in enumerate(memory["bases"]):
            products = (k[:first, h] @ basis) @ (memory["foreseen"][h * group : (h + 1) * group] @ basis).T
            scores.append(products.max(axis=1) / np.sqrt(dim) if first else np.zeros(0))
        near = [min(int((row > row.max() - self.alpha).sum()), self.budget) if first else 0 for row in scores]
        edges = [np.abs(row - (row.max() - self.alpha)).min() for row in scores if first]
        count = min(int(np.round(np.mean(near))), self.budget)
        found = [highest(row, count) for row in scores]
        seen = [best + list(range(first, held)) for best, _ in found for _ in range(group)]
        return seen, min([gap for _, gap in found] + edges)
