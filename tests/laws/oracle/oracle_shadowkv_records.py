"""The records of the oracle's ShadowKV and ShadowKV+: settings, what a layer remembers, and the trace of a step."""

import dataclasses
from typing import Any, TypedDict

import numpy as np
from oracle_maths import Array


@dataclasses.dataclass(frozen=True)
class ShadowKV:
    """Landmark-selected chunks with low-rank keys, beside exact outlier chunks and an exact window.

    Attributes:
        rank: columns kept of the prompt's pre-RoPE keys.
        budget: tokens selected a step and KV head; window and outliers come on top.
        chunk_size: tokens a chunk.
        outlier_chunks: chunks a KV head whose exact keys are always attended; None: 24 for 1024 tokens of budget.
        local_chunks: whole chunks at the end of the prompt that stay in the window.
        turn_selection: "each" new token selects for itself, or "shared": one selection serves a piece of a turn.
        extend_piece: tokens of a piece; the last one of a turn is shorter.
        score_dim: selection logits are divided by its square root; None: the head width.
        score_dtype: "bfloat16" rounds each query head's softmax before sum and maximum.
        exact_preload: chunks that the last prompt query selects keep exact keys until they first miss a step.
        chunk_multiple: the number of chunks is rounded down to a multiple of it.
        landmark_tokens: tokens of a landmark; a chunk's score adds up its landmarks' softmax. None: chunk_size.
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
