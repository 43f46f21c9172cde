"""The oracle's ShadowKV and ShadowKV+: what one layer derives from a prompt, and what one piece of tokens attends.

Written from the specification: every key and value is kept, sets of chunks say which of them a query sees and whether
with its exact key or with the one rebuilt from the prompt's singular vectors. T tokens held, t tokens of a piece, n
chunks of c tokens, g query heads a KV head.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

import ml_dtypes
import numpy as np
from oracle_codec import token_codes
from oracle_maths import Array, apply_rope, attention, lowest, softmax, tokens_of

if TYPE_CHECKING:
    from jshadow.models.config import RopeConfig

# Float32 softmax and its sum over the queries of a piece, relative to float64: what may move a bfloat16 score.
SOFTMAX_ERROR = 4e-6
SUM_ERROR = 1e-6
# The same of a product of float32 matrices.
FLOAT32 = 1e-7


@dataclasses.dataclass(frozen=True)
class ShadowKV:
    """Landmark-selected chunks with low-rank keys, beside exact outlier chunks and an exact window.

    The settings are those of jshadow, in one record. What is not obvious:

    Attributes:
        outlier_chunks: None: 24 for 1024 tokens of budget.
        score_dim: selection logits are divided by its square root; None: the head width.
        score_dtype: "bfloat16" rounds each query head's softmax before sum and maximum.
        exact_preload: chunks that the last prompt query selects keep exact keys until they first miss a step.
        landmark_tokens: a chunk's score adds up its landmarks' softmax. None: chunk_size.
        landmark_levels: 2: chunks are scored by their landmarks in the fours of neighbors whose best by the landmarks'
            mean are the best, as many fours as chunks are chosen.
        landmark_order: 2: a landmark's logit has half the variance that products with its keys would have, were each
            number of a key as far from the mean as their root mean square; of levels, both have their own.
        outlier_rule: "both": of outlier_chunks the smaller half are, of the chunks the landmarks leave, those with the
            key that the projection moves farthest.
        key_weights: "queries": what is projected are keys times the root of the mean square of the prompt's last 64
            queries there, and distances of keys are measured so; "none": the keys themselves.
    """

    rank: int
    budget: int
    chunk_size: int = 8
    outlier_chunks: int | None = 48
    local_chunks: int = 4
    turn_selection: str = "each"
    extend_piece: int = 16
    score_dim: int | None = None
    score_dtype: str = "float32"
    exact_preload: bool = False
    chunk_multiple: int = 1
    landmark_tokens: int | None = None
    landmark_levels: int = 1
    landmark_order: int = 1
    outlier_rule: str = "landmark"
    key_weights: str = "none"

    @property
    def parts(self) -> int:
        """Landmarks of a chunk."""
        return self.chunk_size // (self.landmark_tokens or self.chunk_size)

    def chunks(self, tokens: int) -> int:
        """Chunks of a prompt."""
        chunks = max(0, tokens // self.chunk_size - self.local_chunks)
        return chunks - chunks % self.chunk_multiple


@dataclasses.dataclass(frozen=True)
class ShadowKVPlus(ShadowKV):
    """ShadowKV whose new tokens use the prompt's low-rank keys too.

    Attributes:
        extra_outlier_chunks: joined chunks a KV head that may keep exact keys.
        later_keys: "int6" or "int4": the keys after the prompt's chunks, minus the mean of the prompt's and divided by
            units, are whole multiples of a 31st or a seventh of their largest number. The unit of a number is the
            square root of its standard deviation in the prompt, with a tenth of the head's mean variance added.
            "projected": they are projected like the prompt's.
    """

    extra_outlier_chunks: int = 16
    later_keys: str = "int6"


class Trace(TypedDict):
    """What one layer did with one piece of tokens. A policy that selects nothing has empty sets and infinite gaps.

    The gaps say how nearly a choice went the other way, 0 where float32 cannot be expected to make the same one. All
    but `gap` hang on the prompt and on the tokens so far, and so never grow.
    """

    step: int  # 0 for the first piece after prefill; a decode step is a piece of one token
    layer: int
    queries: int  # tokens of the piece
    selected: list[set[int]]  # [h_kv] ids of the selected chunks
    outliers: list[set[int]]  # [h_kv] ids of the outlier chunks, fixed at prefill
    extra: list[set[int]]  # [h_kv] ids of the joined chunks that are kept exact
    scores: Array  # [h_kv, n] by chunk id; -inf where the chunk is no candidate
    gap: float  # smallest over KV heads of (last score in - first score out) / last score in
    outlier_gap: float  # the same at the outliers' cut, but the plain difference of cosines, or of key lengths
    extra_gap: float  # smallest difference of cosines to the threshold of extra outliers, and the gap of later codes
    preload_gap: float  # as `gap`, of the last prompt query; infinite unless it selects
    factor_error: float  # by how much float32 low-rank keys may be off, over the largest singular value
    attended: float  # tokens attended, summed over the queries, mean over the KV heads
    output: Array  # [t, h_q, d] attention output before the o projection


def trace_of(pieces: int, layers: int, layer: int, heads: int, **known: Any) -> Trace:
    """The trace of a piece of one token after `pieces` pieces of all layers, with what is known of it."""
    empty: dict[str, Any] = {name: [set() for _ in range(heads)] for name in ("selected", "outliers", "extra")}
    gaps = dict.fromkeys(("gap", "outlier_gap", "extra_gap", "preload_gap"), np.inf)
    rest = {"queries": 1, "scores": np.zeros((heads, 0)), "factor_error": 0.0, "attended": 0, "output": np.zeros(0)}
    return Trace(**{"step": pieces // layers, "layer": layer, **empty, **gaps, **rest, **known})  # type: ignore[typeddict-item]


@dataclasses.dataclass
class Memory:
    """What ShadowKV derives from one layer's prompt."""

    chunks: int
    outliers: list[list[int]]  # [h_kv][o] ascending chunk ids
    outlier_gap: float
    threshold: list[float]  # [h_kv] a joined chunk below it is badly represented; -inf: none is
    projection: Array  # [h_kv * d, h_kv * d] V_r V_r^T, between weighing and its inverse
    weights: Array  # [h_kv, d] what the numbers of a key are multiplied with; 1 where they are not weighed
    factor_error: float
    rebuilt: Array  # [T, h_kv, d] post-RoPE keys after projection, of the prompt and of every new token
    worst: Array  # [h_kv, n] least cosine of a key of each chunk to the mean of its part; grows where chunks join
    longest: Array  # [h_kv] a joined chunk with a key that the projection moves farther is badly kept; inf: none is,
    # -1: all are
    exact: list[set[int]]  # [h_kv] preloaded chunks that have been selected in every step so far
    preload_gap: float = np.inf
    mean: Array | None = None  # [h_kv, d] mean pre-RoPE key of the prompt where later keys have an own code
    units: Array | float = 1.0  # [h_kv, d] units of that code
    first_later: int = 0  # the first token of that code
    multiples: int = 31  # the largest multiple of a number of that code
    code_gap: float = np.inf  # how near, over the largest one, a number of a later key came to the middle of two codes


@dataclasses.dataclass
class LayerCache:
    """Every key and value of one layer, in order of position: [T, h_kv, d] each."""

    k_pre: Array
    k_post: Array
    v: Array
    memory: Memory | None = None


def compress(policy: ShadowKV, cache: LayerCache, prompt_queries: Array, rope: "RopeConfig") -> None:
    """ShadowKV's prefill for one layer: the cache's memory, of its prompt and its queries [T, h_q, d] after RoPE."""
    length, h_kv, d = cache.k_pre.shape
    n = policy.chunks(length)
    wanted = 24 * (policy.budget // 1024) if policy.outlier_chunks is None else policy.outlier_chunks
    o = min(wanted, n)
    worst = worst_of(cache.k_post[: n * policy.chunk_size], policy.chunk_size, policy.parts)
    new_keys = isinstance(policy, ShadowKVPlus)
    weights = np.ones((h_kv, d))
    if policy.key_weights == "queries":
        weights = query_weights(prompt_queries[-64:], h_kv, rope.rotary_dim(d))
    weighed = (cache.k_pre * weights).reshape(length, -1)
    projection, error = project_onto_prompt(weighed, policy.rank, new_keys=new_keys)
    projection = weights.reshape(-1, 1) * projection / weights.ravel()
    by_landmark = min(n, wanted - wanted // 2) if policy.outlier_rule == "both" else o
    outliers = [lowest(row, by_landmark) for row in worst]
    cut = 0 < by_landmark < n and policy.parts < policy.chunk_size  # else all are 1, and the id decides
    gaps = [float(np.diff(np.sort(row))[by_landmark - 1]) if cut else np.inf for row in worst]
    threshold = [float(row[ids].max()) if ids else -np.inf for row, ids in zip(worst, outliers, strict=True)]
    moved = cache.k_pre - (cache.k_pre.reshape(length, -1) @ projection).reshape(cache.k_pre.shape)
    moved *= weights
    far = np.linalg.norm(moved[: n * policy.chunk_size], axis=2).reshape(n, policy.chunk_size, h_kv).max(axis=1)
    longest = np.full(h_kv, -1.0 if n <= o and policy.outlier_rule == "both" and wanted > 1 else np.inf)
    for head, row in enumerate(far.T):
        row[outliers[head]] = -np.inf
        outliers[head] = sorted(outliers[head] + lowest(-row, o - by_landmark))
        if by_landmark < o < n:
            last, first_out = -np.sort(-row)[[o - by_landmark - 1, o - by_landmark]]
            gaps.append(float(last - first_out) / np.linalg.norm(cache.k_pre * weights, axis=2).max())
            longest[head] = first_out
    memory = Memory(
        n,
        outliers,
        min(gaps),
        threshold,
        projection,
        weights,
        error,
        rebuilt=cache.k_post[:0],
        worst=worst,
        longest=longest,
        exact=[set() for _ in range(h_kv)],
    )
    if new_keys and policy.later_keys != "projected":
        memory.mean, memory.first_later = cache.k_pre.mean(axis=0), n * policy.chunk_size
        memory.multiples = {"int4": 7, "int6": 31}[policy.later_keys]
        square = ((cache.k_pre - memory.mean) ** 2).mean(axis=0)
        memory.units = np.sqrt(np.sqrt(square + square.mean(axis=1, keepdims=True) / 10)) if length > 1 else 1.0
    cache.memory = memory
    rebuild(cache, rope)
    if policy.exact_preload:
        for head, queries in enumerate(np.split(prompt_queries[-1:], h_kv, axis=1)):
            candidates = np.setdiff1d(np.arange(n), outliers[head])
            ids, _, gap = choose(policy, queries, chunks_of(cache, policy, head)[candidates], fours_of(candidates, n))
            memory.exact[head] = {int(candidates[i]) for i in ids}
            memory.preload_gap = min(memory.preload_gap, gap)


def project_onto_prompt(keys: Array, rank: int, *, new_keys: bool) -> tuple[Array, float]:
    """V_r V_r^T of keys [T, columns], and an estimate of how far a float32 basis from K^T K is off.

    All columns are the identity, whatever the length. Otherwise directions on the two sides of the cut mix by the
    angle FLOAT32 / (difference of their squared singular values). The prompt's own keys have at most the smallest
    kept singular value there; new keys may lie anywhere.
    """
    if rank == keys.shape[1]:
        return np.eye(rank), 0.0
    _, s, vt = np.linalg.svd(keys, full_matrices=False)
    last, first_out = np.append(s / s[0], 0.0)[min(rank, len(s)) - 1 :][:2]
    angle = min(1.0, FLOAT32 / max(last**2 - first_out**2, FLOAT32))
    return vt[:rank].T @ vt[:rank], float(angle if new_keys else angle * last)


def query_weights(queries: Array, h_kv: int, rotated: int) -> Array:
    """[h_kv, d] from rotated queries [t, h_q, d]: of each pair that RoPE turns, the root of the mean square of all
    queries of a KV head, over that of all heads; a hundredth of the latter is added to every mean square."""
    d = queries.shape[2]
    square = np.zeros((h_kv, d))
    for head, group in enumerate(np.split(queries, h_kv, axis=1)):
        for i in range(d):
            pair = [i] if i >= rotated else [i % (rotated // 2), i % (rotated // 2) + rotated // 2]
            square[head, i] = np.mean(group[:, :, pair] ** 2)
    return np.sqrt(square / square.mean() + 0.01)


def rebuild(cache: LayerCache, rope: "RopeConfig") -> None:
    """Add the rebuilt keys of the tokens that came since the last call."""
    memory = cache.memory
    assert memory is not None
    new = np.arange(len(memory.rebuilt), len(cache.k_pre))
    k_pre = cache.k_pre[new]
    coded = (k_pre.reshape(len(new), -1) @ memory.projection).reshape(k_pre.shape)
    if memory.mean is not None:
        own, gap = token_codes((k_pre[new >= memory.first_later] - memory.mean) / memory.units, memory.multiples)
        coded[new >= memory.first_later] = own * memory.units + memory.mean
        memory.code_gap = min(memory.code_gap, gap)
    memory.rebuilt = np.concatenate([memory.rebuilt, apply_rope(coded, new, rope)])


def worst_of(keys: Array, c: int, parts: int) -> Array:
    """Of the chunks of post-RoPE keys [n * c, h_kv, d] the least cosine of one to the mean of its part [h_kv, n]."""
    _, h_kv, d = keys.shape
    chunks = keys.reshape(-1, parts, c // parts, h_kv, d).transpose(3, 0, 1, 2, 4)
    means = chunks.mean(axis=3)
    if c == parts:
        return np.ones(chunks.shape[:2])
    dots = (chunks * means[:, :, :, None]).sum(axis=-1)
    norms = np.linalg.norm(chunks, axis=-1) * np.linalg.norm(means, axis=-1)[..., None]
    return np.asarray((dots / norms).min(axis=(2, 3)))


def chunks_of(cache: LayerCache, policy: ShadowKV, head: int) -> Array:
    """The post-RoPE keys of one head in whole chunks [n, c, d]."""
    whole = len(cache.k_post) // policy.chunk_size
    keys = cache.k_post[: whole * policy.chunk_size, head]
    return keys.reshape(whole, policy.chunk_size, keys.shape[1])


def fours_of(chunks: Array, prompt: int) -> Array:
    """A number for the four neighbors that a chunk belongs to, of the prompt's chunks and of those that joined."""
    return np.where(chunks < prompt, chunks // 4, prompt + (chunks - prompt) // 4)


def choose_by_levels(policy: ShadowKV, queries: Array, keys: Array, fours: Array) -> tuple[list[int], Array, float]:
    """`choose` by the mean of each candidate's landmarks first, and by the landmarks of the best and their neighbors.

    The gap is the smaller one of both choices.
    """
    whole = dataclasses.replace(policy, landmark_levels=1, landmark_tokens=None, budget=policy.chunk_size)
    _, first, _ = choose(whole, queries, keys, fours)
    names = np.unique(fours)
    best = np.array([first[fours == four].max() for four in names])
    order = lowest(-best, len(best))
    k, gap = policy.budget // policy.chunk_size, np.inf
    if k < len(order):
        gap = float((best[order[k - 1]] - best[order[k]]) / best[order[k - 1]])
    near = np.flatnonzero(np.isin(fours, names[order[:k]]))
    fine = dataclasses.replace(policy, landmark_levels=1)
    ids, found, second_gap = choose(fine, queries, keys[near], fours[near])
    scores = np.full(len(keys), -np.inf)
    scores[near] = found
    return [int(near[i]) for i in ids], scores, min(gap, second_gap)


def choose(policy: ShadowKV, queries: Array, keys: Array, fours: Array) -> tuple[list[int], Array, float]:
    """The selection of one KV head.

    Args:
        policy: its budget, chunk size and scoring.
        queries: [t, g, d], after RoPE.
        keys: of the candidates [m, c, d], after RoPE.
        fours: of `fours_of` [m].

    Returns:
        Indices of the chosen candidates, best first; the scores [m]; the gap at the cut.
    """
    k = min(policy.budget // policy.chunk_size, len(keys))
    if k == 0:
        return [], np.zeros(len(keys)), np.inf
    if policy.landmark_levels == 2:
        return choose_by_levels(policy, queries, keys, fours)
    dim = queries.shape[-1] if policy.score_dim is None else policy.score_dim
    parts = keys.reshape(len(keys) * policy.parts, -1, keys.shape[2])
    landmarks = parts.mean(axis=1)
    logits = queries @ landmarks.T / np.sqrt(dim)
    if policy.landmark_order == 2:
        far = ((parts - landmarks[:, None]) ** 2).mean(axis=(1, 2))
        logits = logits + (queries**2).sum(axis=-1, keepdims=True) / dim * far / 2
    mass = softmax(logits)
    if policy.parts > 1:
        assert policy.score_dtype == "float32", "what is rounded before it is added up is not followed here"
        mass = mass.reshape(*mass.shape[:2], len(keys), -1).sum(axis=-1)  # [t, g, m]
    scores = total(policy, mass)
    order = lowest(-scores, len(scores))
    if k == len(scores):
        return order, scores, np.inf
    if policy.score_dtype == "float32":
        last, first_out = scores[order[k - 1]], scores[order[k]]
        return order[:k], scores, float((last - first_out) / last)
    # Equal bfloat16 scores are no near tie, the id decides. A softmax next to where its rounding changes is one.
    low, high = total(policy, mass, -1.0), total(policy, mass, 1.0)
    inside, outside = np.array(order[:k])[:, None], np.array(order[k:])[None]
    sure = (low[inside] > high[outside]) | ((low[inside] == high[outside]) & (inside < outside))
    return order[:k], scores, np.inf if sure.all() else 0.0


def total(policy: ShadowKV, mass: Array, error: float = 0.0) -> Array:
    """Scores [m]: the softmax masses [t, g, m], rounded where the policy says so, summed over queries, best head's.

    `error` is -1, 0 or 1 times what float32 may be off. Its sum of bfloat16 numbers is not, unless they differ so much
    in size that 24 bits do not hold them.
    """
    if policy.score_dtype == "float32":
        return np.asarray(mass.sum(axis=0).max(axis=0))
    mass = (mass * (1 + error * SOFTMAX_ERROR)).astype(ml_dtypes.bfloat16).astype(np.float64)
    sums = mass.sum(axis=0)
    last_bit = np.ldexp(1.0, np.frexp(mass)[1] - 8).min(axis=0)  # of the smallest addend's 8
    inexact = (len(mass) > 1) & (sums > 2**24 * last_bit)
    return np.asarray((sums * (1 + error * SUM_ERROR * inexact)).max(axis=0))


def extra_outliers(policy: ShadowKV, cache: LayerCache, head: int) -> tuple[list[int], float]:
    """Joined chunks of one KV head that are kept exact, and how near the threshold a chunk came that might be."""
    limit, memory, c = getattr(policy, "extra_outlier_chunks", 0), cache.memory, policy.chunk_size
    assert memory is not None
    kept: list[int] = []
    gap = np.inf
    for chunk in range(memory.chunks, memory.worst.shape[1]):
        if len(kept) < limit:
            moved = (memory.rebuilt - cache.k_post[: len(memory.rebuilt)])[chunk * c : (chunk + 1) * c, head]
            far = np.linalg.norm(moved * memory.weights[head], axis=1).max()
            length = np.linalg.norm(cache.k_post[:, head] * memory.weights[head], axis=1).max()
            gap = min(gap, abs(far - memory.longest[head]) / length)
            if policy.parts < c:
                gap = min(gap, abs(float(memory.worst[head, chunk]) - memory.threshold[head]))
            if memory.worst[head, chunk] < memory.threshold[head] or far > memory.longest[head]:
                kept.append(chunk)
    return kept, gap


def attend_piece(policy: ShadowKV, cache: LayerCache, q: Array, entry: Trace) -> None:
    """One piece of one layer: its queries q [t, h_q, d] after RoPE, its keys already in the cache; fills the entry."""
    memory = cache.memory
    assert memory is not None
    c, (held, h_kv, _) = policy.chunk_size, cache.k_post.shape
    positions = np.arange(held - len(q), held)
    n = memory.chunks
    if isinstance(policy, ShadowKVPlus):  # chunks that leave the window become chunks like the prompt's
        assert len(q) == 1, "ShadowKV+ knows no shared selection"
        n = max(n, (held - 1) // c + 1 - max(2, policy.local_chunks + policy.chunk_multiple))
        joined = worst_of(cache.k_post[memory.worst.shape[1] * c : n * c], c, policy.parts)
        memory.worst = np.concatenate([memory.worst, joined], axis=1)
    entry["scores"] = np.full((h_kv, n), -np.inf)
    entry["outliers"], entry["outlier_gap"] = [set(ids) for ids in memory.outliers], memory.outlier_gap
    entry["preload_gap"], entry["factor_error"] = memory.preload_gap, memory.factor_error
    outputs, attended = [], 0
    for head, queries in enumerate(np.split(q, h_kv, axis=1)):
        extra, extra_gap = extra_outliers(policy, cache, head)
        extra_gap = min(extra_gap, memory.code_gap)
        always = memory.outliers[head] + extra
        candidates = np.setdiff1d(np.arange(n), always)
        ids, scores, gap = choose(
            policy, queries, chunks_of(cache, policy, head)[candidates], fours_of(candidates, memory.chunks)
        )
        selected = {int(candidates[i]) for i in ids}
        memory.exact[head] &= selected
        exact = tokens_of(always + sorted(memory.exact[head]), c)
        low_rank = tokens_of(sorted(selected - memory.exact[head]), c)
        window = np.arange(n * c, held)
        seen = np.concatenate([exact, low_rank, window])
        rows = (np.arange(len(seen)) >= len(exact)) & (np.arange(len(seen)) < len(exact) + len(low_rank))
        keys = np.where(rows[:, None], memory.rebuilt[seen, head], cache.k_post[seen, head])
        values = cache.v[seen, head]
        visible = seen <= positions[:, None]  # [t, seen]
        outputs.append([attention(one, keys[own], values[own]) for one, own in zip(queries, visible, strict=True)])
        attended += int(visible.sum())
        entry["scores"][head, candidates] = scores
        entry["selected"][head], entry["extra"][head] = selected, set(extra)
        entry["gap"], entry["extra_gap"] = min(entry["gap"], gap), min(entry["extra_gap"], extra_gap)
    entry["attended"] = attended / h_kv
    entry["output"] = np.concatenate(outputs, axis=1)
