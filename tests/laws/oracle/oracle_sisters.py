"""The NumPy oracle of the sister methods: each says, for every query head, which positions a new token may see.

Written from the papers' descriptions, sharing no code with jshadow: all keys and values of the sequence are kept in
float64, what a method evicts or does not select is left out of a softmax. See oracle.py for the model around it.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import LayerCache, Oracle, Trace
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


@dataclasses.dataclass(frozen=True)
class KIVI(SetPolicy):
    """Every query sees all tokens, but old keys and values are quantized.

    Attributes:
        bits: bits of a code.
        group: numbers that share a step.
        residual: newest tokens that stay exact.
        near_tie: a number that is this near to the middle between two codes, in steps, gets the farther code instead of
            the nearer one. In float32 such a number may get either code.
    """

    bits: int
    group: int
    residual: int
    near_tie: float = dataclasses.field(default=0.0, kw_only=True)

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """All positions for every query head. Nothing is cut, so the gap is infinite."""
        return [list(range(len(k)))] * len(q), np.inf

    def rounded(self, x: Array) -> Array:
        """Quantize the groups of the last axis, and return the values of the codes."""
        least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        step = (most - least) / (2**self.bits - 1)
        place = (x - least) / np.where(step > 0, step, 1)
        lower = np.floor(place)
        code = np.where(place >= 0.5, 1.0, 0.0) if self.bits == 1 else np.round(place)
        code = np.where(np.abs(place - lower - 0.5) < self.near_tie, 2 * lower + 1 - code, code)
        if self.bits == 1:
            return np.where(code == 1, (least + 3 * most) / 4, (3 * least + most) / 4)
        return least + code * step

    def distort(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Quantize keys of whole blocks by channel and old values by token; k and v are [held, h_kv, d]."""
        held, heads, dim = k.shape
        blocks, old = (held - 1) // self.residual * self.residual, max(held - self.residual, 0)
        keys = k[:blocks].reshape(blocks // self.group, self.group, heads, dim).transpose(0, 2, 3, 1)
        keys = self.rounded(keys).transpose(0, 3, 1, 2).reshape(blocks, heads, dim)
        values = self.rounded(v[:old].reshape(old, heads, dim // self.group, self.group)).reshape(old, heads, dim)
        return np.concatenate([keys, k[blocks:]]), np.concatenate([values, v[old:]])


@dataclasses.dataclass(frozen=True)
class Quantized(SetPolicy):
    """Every query sees all tokens, and each key and value of a head is rounded. For near_tie see KIVI.

    Attributes:
        dtype: "fp8", "int8" or "int4".
    """

    dtype: str
    near_tie: float = dataclasses.field(default=0.0, kw_only=True)

    def see(self, memory: Any, q: Array, k: Array) -> tuple[list[list[int]], float]:
        """All positions for every query head."""
        return [list(range(len(k)))] * len(q), np.inf

    def levels(self) -> Array:
        """The numbers of a code that are not negative, in order. Those of E4M3 have 3 bits after the point."""
        if self.dtype != "fp8":
            return np.arange({"int8": 128, "int4": 8}[self.dtype], dtype=np.float64)
        small = np.arange(8) / 2.0**9
        large = [(1 + part / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for part in range(8)]
        return np.concatenate([small, large[:-1]])  # the last one is NaN

    def rounded(self, x: Array) -> Array:
        """Round the vectors of the last axis, and return the values of the codes."""
        levels, most = self.levels(), np.abs(x).max(axis=-1, keepdims=True)
        step = np.where(most > 0, most, 1) / levels[-1]
        place = np.abs(x) / step
        upper = np.clip(np.searchsorted(levels, place), 1, len(levels) - 1)
        share = (place - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
        up = (share > 0.5) | ((share == 0.5) & (upper % 2 == 0))
        up ^= np.abs(share - 0.5) < self.near_tie
        return np.sign(x) * np.where(up, levels[upper], levels[upper - 1]) * step

    def distort(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Round all keys and values; k and v are [held, h_kv, d]."""
        return self.rounded(k), self.rounded(v)


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
    """The model under the oracle's H2O, what that evicted weighed by kernels; `fitted` as jshadow has it.

    Held tokens weigh exp(score), an evicted token phi(q) psi(k), all under one normalizer. No state is kept.
    """

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
