"""The NumPy oracle of the sister methods: each says, for every query head, which positions a new token may see.

Written from the papers' descriptions, sharing no code with jshadow: all keys and values of the sequence are kept in
float64, what a method evicts or does not select is left out of a softmax. See oracle.py for the model around it.
"""

import abc
import dataclasses
from typing import Any

import numpy as np
from oracle import Oracle, Trace
from oracle_maths import Array, apply_rope, linear, rms_norm, softmax


class SetPolicy(abc.ABC):
    """A method that attends exactly to a subset of the tokens. It may keep notes in `memory`, one a layer."""

    foresees = False

    def start(self, q: Array, k: Array, layer: int, shared: dict[str, Any]) -> Any:
        """Notes after a prompt: rotated queries [T, h_q, d] and keys [T, h_kv, d]; `shared` is that of all layers."""
        return None

    @abc.abstractmethod
    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """Positions that each query head of q [h_q, d] sees among the keys [held, h_kv, d], the newest included.

        Returns:
            One list a query head, and the smallest relative gap of scores at a cut (inf where nothing is cut).
        """

    def distort(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values [held, h_kv, d] as a step attends to them."""
        return k, v

    def saw(self, memory: Any, seen: list[list[int]], probs: list[Array], held: int) -> None:
        """Note the attention that was given."""
        del memory, seen, probs, held


class SetOracle(Oracle):
    """The model under a SetPolicy."""

    policy: Any

    def remember(self, layer: int, cache: Any, q: Array) -> None:
        """One memory a layer."""
        if layer == 0:
            self.memory: dict[int, Any] = {}
            self.shared: dict[str, Any] = {}
        self.memory[layer] = self.policy.start(q, cache.k_post, layer, self.shared)

    def project(self, layer: Any, x: Array) -> tuple[Array, Array, Array]:
        """Also keeps the normed input."""
        self.normed = rms_norm(x, layer["attention_norm"]["scale"], self.config.norm_eps)
        return super().project(layer, x)

    def attend(self, layer: int, cache: Any, q_pre: Array) -> Trace:
        """Softmax over what each head sees."""
        assert len(q_pre) == 1
        held, h_kv, _ = cache.k_pre.shape
        q = apply_rope(q_pre, np.array([held - 1]), self.config.rope)[0]
        if self.policy.foresees and layer:  # this layer's queries, had the layer before changed nothing
            rows = linear(self.before, self.weights[f"layer_{layer}"]["attention"]["q"]).reshape(1, *q.shape)
            self.memory[layer]["foreseen"] = apply_rope(rows, np.array([held - 1]), self.config.rope)[0]
        seen, gap = self.policy.see(self.memory[layer], q, cache.k_post)
        held_rows = self.policy.distort(cache.k_post, cache.v)
        group, outs, probs = len(q) // h_kv, [], []
        for head, positions in enumerate(seen):
            keys, values = (x[positions, head // group] for x in held_rows)
            probs.append(softmax(keys @ q[head] / np.sqrt(q.shape[1])))
            outs.append(probs[-1] @ values)
        self.policy.saw(self.memory[layer], seen, probs, held)
        self.before = self.normed
        sets = [set(seen[h * group]) for h in range(h_kv)]
        attended = float(np.mean([len(positions) for positions in seen]))
        return self.noted(layer, selected=sets, gap=gap, attended=attended, output=np.array(outs)[None])


def highest(scores: Array, count: int) -> tuple[list[int], float]:
    """Indices of the highest scores, ties to the lower index, and the relative gap at the cut."""
    order = np.argsort(-scores, kind="stable")
    if count <= 0 or count >= len(scores):
        return sorted(int(i) for i in order[: max(count, 0)]), np.inf
    last, first = scores[order[count - 1]], scores[order[count]]
    gap = (last - first) / max(abs(last), abs(first), 1e-30)
    return sorted(int(i) for i in order[:count]), float(gap)


def causal_probs(q: Array, k: Array) -> Array:
    """Attention of all queries [T, h_q, d] to all keys [T, h_kv, d] before them: [h_q, T, T]."""
    group, tokens = q.shape[1] // k.shape[1], len(q)
    logits = np.stack([q[:, h] @ k[:, h // group].T for h in range(q.shape[1])]) / np.sqrt(q.shape[2])
    logits[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
    return softmax(logits)


@dataclasses.dataclass(frozen=True)
class H2O(SetPolicy):
    """Brute force: the whole S x S matrix of probabilities, and a dictionary of masses."""

    heavy: int
    recent: int
    normalize: bool = False

    def worth(self, mass: float, position: int, held: int) -> float:
        """What a mass counts."""
        return mass / (held - position) if self.normalize else mass

    def start(self, q: Array, k: Array, layer: int, shared: dict[str, Any]) -> list[dict[int, float]]:
        """Sum over all queries and the group's heads; drop to the budget, the recent ones safe."""
        group, tokens = q.shape[1] // k.shape[1], len(q)
        probs = causal_probs(q, k)
        memory = []
        for h in range(k.shape[1]):
            total = probs[h * group : (h + 1) * group].sum(axis=(0, 1))
            held = {position: float(total[position]) for position in range(tokens)}
            while len(held) > self.heavy + self.recent:
                self.drop(held, tokens)
            memory.append(held)
        return memory

    def drop(self, held: dict[int, float], tokens: int) -> float:
        """Drop the least worth outside the recent window; returns the relative gap to the next."""
        worth = {p: self.worth(mass, p, tokens) for p, mass in held.items() if p < tokens - self.recent}
        first, *rest = sorted(worth, key=lambda p: (worth[p], p))
        del held[first]
        return (worth[rest[0]] - worth[first]) / max(abs(worth[rest[0]]), 1e-30) if rest else np.inf

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """What is held, and the new token; what will be dropped is decided after."""
        for held in memory:
            held[len(k) - 1] = 0.0
        group = len(q) // k.shape[1]
        return [sorted(memory[h // group]) for h in range(len(q))], np.inf

    def saw(self, memory: Any, seen: list[list[int]], probs: list[Array], held: int) -> None:
        """Add, then evict."""
        group = len(seen) // len(memory)
        for head, (positions, given) in enumerate(zip(seen, probs, strict=True)):
            for position, mass in zip(positions, given, strict=True):
                memory[head // group][position] += float(mass)
        for one in memory:
            if len(one) > self.heavy + self.recent:
                self.drop(one, held)


@dataclasses.dataclass(frozen=True)
class Quest(SetPolicy):
    """Page by page: the bound of each, from the page's own keys."""

    budget: int
    unit: int
    recent: int
    dense_layers: int

    def start(self, q: Array, k: Array, layer: int, shared: dict[str, Any]) -> int:
        """The number of the layer."""
        return layer

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """The recent pages and the best of the others; everything in the first layers."""
        held, h_kv, _ = k.shape
        if memory < self.dense_layers:
            return [list(range(held))] * len(q), np.inf
        group, seen, gaps = len(q) // h_kv, [], []
        first = max(held - self.recent, 0) // self.unit * self.unit
        for h in range(h_kv):
            bounds = []
            for page in range(first // self.unit):
                keys = k[page * self.unit : (page + 1) * self.unit, h]
                low, high = keys.min(axis=0), keys.max(axis=0)
                bounds.append(max(np.maximum(one * low, one * high).sum() for one in q[h * group : (h + 1) * group]))
            best, gap = highest(np.array(bounds), self.budget // self.unit)
            gaps.append(gap)
            tokens = [page * self.unit + i for page in best for i in range(self.unit)]
            seen += [tokens + list(range(first, held))] * group
        return seen, min(gaps)


@dataclasses.dataclass(frozen=True)
class SnapKV(SetPolicy):
    """The observation window's attention, pooled with explicit loops."""

    max_capacity_prompt: int
    observation_window: int
    kernel: int
    pooling: str
    granularity: str

    def start(self, q: Array, k: Array, layer: int, shared: dict[str, Any]) -> tuple[list[list[int]], int]:
        """Positions kept for each query head."""
        tokens, (h_q, h_kv) = len(q), (q.shape[1], k.shape[1])
        if tokens <= self.max_capacity_prompt:
            return [list(range(tokens)) for _ in range(h_q)], tokens
        window, group = self.observation_window, h_q // h_kv
        old = tokens - window
        given = causal_probs(q, k)[:, old:, :old].sum(axis=1)  # [h_q, S - w]
        if self.granularity == "kv_head":
            given = np.repeat(given.reshape(h_kv, group, old).mean(axis=1), group, axis=0)
        kept = []
        for row in given:
            pooled = np.zeros(old)
            for i in range(old):
                near = row[max(0, i - self.kernel // 2) : i + self.kernel // 2 + 1]
                pooled[i] = near.max() if self.pooling == "max" else near.sum() / self.kernel
            best, _ = highest(pooled, self.max_capacity_prompt - window)
            kept.append(best + list(range(old, tokens)))
        return kept, tokens

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """What was kept, and everything since."""
        kept, tokens = memory
        return [positions + list(range(tokens, len(k))) for positions in kept], np.inf


@dataclasses.dataclass(frozen=True)
class OmniKV(SetPolicy):
    """Filter layers write a set into `shared`, sparse layers read it."""

    budget: int
    filter_layers: tuple[int, ...]
    selector: str
    observation_window: int

    def start(self, q: Array, k: Array, layer: int, shared: dict[str, Any]) -> dict[str, Any]:
        """The prompt's last queries, each with its position."""
        return {"layer": layer, "shared": shared, "tokens": len(q), "queries": list(enumerate(q))}

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """Everything, and choose; or what was chosen, and everything after the prompt."""
        layer, tokens, held, gap = memory["layer"], memory["tokens"], len(k), np.inf
        memory["queries"].append((held - 1, q))
        if layer in self.filter_layers:
            scores = np.zeros(tokens)
            last = 1 if self.selector == "last" else self.observation_window
            for position, query in memory["queries"][-last:]:
                visible = min(tokens, position + 1)
                each = [
                    k[:visible, h // (len(q) // k.shape[1])] @ query[h] / np.sqrt(q.shape[1]) for h in range(len(q))
                ]
                weight = 0.5 ** (held - 1 - position) if self.selector == "exp" else 1.0
                scores[:visible] += weight * softmax(np.stack(each)).max(axis=0)
            memory["shared"]["chosen"], gap = highest(scores, self.budget)
        dense = layer < self.filter_layers[0] or layer in self.filter_layers or layer - 1 in self.filter_layers
        seen = list(range(held)) if dense else memory["shared"]["chosen"] + list(range(tokens, held))
        return [seen] * len(q), gap
