"""ShadowKV: low-rank keys, landmarks and outliers on the device, values in host memory (Sun et al. 2024,
arXiv 2410.21465, section 4, algorithms 1 and 2).

Where the paper and its code leave a choice (REFERENCE in the docs), this one is made: float32 selection scores at
1 / sqrt(head_dim), ties to the lower chunk, per-row lengths, selected keys always rebuilt, the outlier count a number
of chunks, and an exact window that holds what follows the last whole chunks of the prompt and all new tokens.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Float

from jshadow.attention import MASKED, Piece, attend, group_queries
from jshadow.chunking import fit_tokens, take_chunks, take_span, to_chunks, top_k, write_rows
from jshadow.config import ModelConfig
from jshadow.errors import ConfigError
from jshadow.lowrank import key_factors
from jshadow.policies.base import Policy, check_fraction, check_range, infeasible
from jshadow.state import (
    CacheSpec,
    Fetched,
    HostLayout,
    HostWrite,
    KeyValues,
    LayerState,
    PromptKV,
    Rebuild,
    Selection,
    StepKV,
)  # fmt: skip

EXACT = jax.lax.Precision.HIGHEST  # choices must not hang on a GPU rounding float32 products to TF32


class ShadowFrozen(struct.PyTreeNode):
    """The prompt, n chunks of c tokens at most.

    Attributes:
        left: left factor of the pre-RoPE keys, one chunk contiguous [B, n, c * rank].
        right: right factor [B, h_kv, rank, d].
        landmarks: mean post-RoPE key of each chunk [B, h_kv, n, d].
        candidates: chunks that may be selected, bool [B, h_kv, n]: whole chunks of the row that are no outliers.
        chunks: chunks of each row, int32 [B]; the window begins at token chunks * c.
        outliers: exact keys and values of the outlier chunks [B, h_kv, o * c, d].
    """

    left: Array
    right: Array
    landmarks: Array
    candidates: Array
    chunks: Array
    outliers: KeyValues


class ShadowLive(struct.PyTreeNode):
    """What decoding changes.

    Attributes:
        window: exact keys (after RoPE) and values from token chunks * c on [B, h_kv, window, d].
        resident: chunks selected in the last step, int32 [B, h_kv, k]; -1 where there is none.
    """

    window: KeyValues
    resident: Array


@dataclasses.dataclass(frozen=True)
class ShadowKV(Policy):
    """Rebuild a few percent of the keys from low-rank factors while their values are fetched.

    Attributes:
        rank: columns of the factors; None: 160 of every 1024 key columns, in multiples of 8.
        chunk_size: tokens in a chunk.
        budget: tokens selected in a step, outliers and window not counted; None: 1.56 % of the capacity, at least 256.
        outlier_chunks: chunks per KV head that are kept exactly, those least like their landmark.
        local_chunks: whole chunks at the end of the prompt that stay in the window.
    """

    rank: int | None = None
    chunk_size: int = 8
    budget: int | None = None
    outlier_chunks: int = 48
    local_chunks: int = 4

    name = "shadowkv"
    paper = "arXiv 2410.21465, section 4"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in rank and budget, check every range."""
        columns = config.key_columns
        rank = min(columns, max(8, round(columns * 160 / 1024 / 8) * 8)) if self.rank is None else self.rank
        check_range(self.name, "chunk_size", self.chunk_size, 1)
        budget = self.budget
        if budget is None:
            budget = max(256, round(capacity * 0.0156), self.chunk_size)
        check_range(self.name, "rank", rank, 1, columns)
        check_range(self.name, "budget", budget, self.chunk_size)
        check_range(self.name, "outlier_chunks", self.outlier_chunks, 0)
        check_range(self.name, "local_chunks", self.local_chunks, 0)
        return dataclasses.replace(self, rank=rank, budget=budget)

    # Counts. Static ones are maxima that follow from the capacity; a row's own follow from its chunks.

    def max_chunks(self, capacity: int) -> int:
        """Chunks of the longest prompt that fits."""
        return max(0, capacity // self.chunk_size - self.local_chunks)

    def max_outliers(self, capacity: int) -> int:
        """Outlier chunks of the longest prompt that fits."""
        return min(self.outlier_chunks, self.max_chunks(capacity))

    def max_selected(self, capacity: int) -> int:
        """Chunks selected in a step for the longest prompt that fits."""
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity) - self.max_outliers(capacity))

    def row_outliers(self, chunks: Array) -> Array:
        """Outlier chunks of rows with that many chunks, int32 [B]."""
        return jnp.minimum(self.outlier_chunks, chunks)

    def row_selected(self, chunks: Array) -> Array:
        """Chunks selected in a step for rows with that many chunks, int32 [B]."""
        assert self.budget is not None
        return jnp.minimum(self.budget // self.chunk_size, chunks - self.row_outliers(chunks))

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """A capacity with nothing to select from."""
        if self.max_selected(capacity) > 0:
            return None
        return (
            f"shadowkv has nothing to select at capacity={capacity}: {self.max_chunks(capacity)} whole chunks, "
            f"outlier_chunks={self.outlier_chunks}; dense cache used"
        )

    def window_slots(self, capacity: int, shortest: int) -> int:
        """The shortest prompt leaves the most tokens to the window."""
        return capacity - self.chunk_size * self.max_chunks(min(shortest, capacity))

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Values of every whole chunk, outliers too (as in the published code)."""
        return HostLayout(heads=spec.kv_heads, units=self.max_chunks(spec.capacity), unit=self.chunk_size)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Zeros: no chunk, an empty window."""
        assert self.rank is not None
        chunks, heads, dim = self.max_chunks(spec.capacity), spec.kv_heads, spec.head_dim

        def zeros(*shape: int) -> Array:
            return jnp.zeros((spec.batch, *shape), spec.dtype)

        exact = zeros(heads, self.max_outliers(spec.capacity) * self.chunk_size, dim)
        frozen = ShadowFrozen(
            left=zeros(chunks, self.chunk_size * self.rank),
            right=zeros(heads, self.rank, dim),
            landmarks=zeros(heads, chunks, dim),
            candidates=jnp.zeros((spec.batch, heads, chunks), bool),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            outliers=KeyValues(exact, exact),
        )
        recent = zeros(heads, spec.window, dim)
        none = jnp.full((spec.batch, heads, self.max_selected(spec.capacity)), -1, jnp.int32)
        return LayerState(frozen, ShadowLive(KeyValues(recent, recent), none))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Factors, landmarks and outliers of the prompt; its values to the host (algorithm 1)."""
        assert self.rank is not None
        size, count, batch = self.chunk_size, self.max_chunks(spec.capacity), spec.batch
        row_chunks = jnp.maximum(0, prompt.lengths // size - self.local_chunks)
        left, right = key_factors(prompt.k_pre, prompt.lengths, self.rank)
        keys, values = (to_chunks(x, count, size) for x in (prompt.k_post, prompt.v))
        landmarks, worst = chunk_landmarks(keys)
        whole = (jnp.arange(count) < row_chunks[:, None])[:, None, :]
        outlier_ids = top_k(jnp.where(whole, -worst, -jnp.inf), self.max_outliers(spec.capacity))
        kept = jnp.arange(outlier_ids.shape[2]) < self.row_outliers(row_chunks)[:, None, None]
        row, head = jnp.ogrid[:batch, : spec.kv_heads]
        candidates = jnp.broadcast_to(whole, worst.shape)
        candidates = candidates.at[row[..., None], head[..., None], jnp.where(kept, outlier_ids, count)].set(
            False, mode="drop"
        )
        frozen = ShadowFrozen(
            left=fit_tokens(left, count * size).reshape(batch, count, size * self.rank).astype(spec.dtype),
            right=right.astype(spec.dtype),
            landmarks=landmarks.astype(spec.dtype),
            candidates=candidates,
            chunks=row_chunks,
            outliers=KeyValues(take_chunks(keys, outlier_ids), take_chunks(values, outlier_ids)),
        )
        recent = (take_span(x, row_chunks * size, spec.window) for x in (prompt.k_post, prompt.v))
        live = state.live.replace(window=KeyValues(*recent))
        rows = values.reshape(batch, spec.kv_heads, count, size * spec.head_dim)
        return LayerState(frozen, live), HostWrite(rows) if count else None

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Limited by the capacity and by the window."""
        used = lengths - state.frozen.chunks * self.chunk_size
        return jnp.minimum(spec.capacity - lengths, spec.window - used)

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """New tokens join the window, exact."""
        slots = step.positions - state.frozen.chunks[:, None] * self.chunk_size
        window = state.live.window
        k = write_rows(window.k, step.k_post, slots, step.valid)
        v = write_rows(window.v, step.v, slots, step.valid)
        return state.replace(live=state.live.replace(window=KeyValues(k, v))), None

    def select(
        self, spec: CacheSpec, state: LayerState, step: StepKV, carry: Any
    ) -> tuple[Selection | None, LayerState, Any]:
        """Chunks with the most softmax mass on their landmark, per KV head (algorithm 2)."""
        count = self.max_selected(spec.capacity)
        if count == 0:
            return None, state, carry
        frozen: ShadowFrozen = state.frozen
        with jax.named_scope("select"):
            scores = landmark_scores(step.q_post, frozen.landmarks, frozen.candidates, step.valid, spec.scale)
            ids = top_k(scores, count)
        valid = jnp.arange(count) < self.row_selected(frozen.chunks)[:, None, None]
        valid = jnp.broadcast_to(valid, ids.shape)
        hit = valid & (ids[..., :, None] == state.live.resident[..., None, :]).any(-1)
        held = jnp.where(step.valid[:, :1, None], jnp.where(valid, ids, -1), state.live.resident)
        rebuild = Rebuild(frozen.left, frozen.right, step.rope_table)
        state = state.replace(live=state.live.replace(resident=held))
        return Selection(ids, valid, hit=hit, rebuild=rebuild), state, carry

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None, carry: Any
    ) -> tuple[Array, LayerState, Any]:
        """Outliers, selected chunks and window, one softmax."""
        frozen, window = state.frozen, state.live.window
        first = frozen.chunks[:, None] * self.chunk_size
        seen = jnp.arange(spec.window) <= (step.positions - first)[:, None, :, None]
        pieces = [Piece(window.k, window.v, seen)]
        slots = frozen.outliers.k.shape[2]
        if slots:
            kept = jnp.arange(slots) < (self.row_outliers(frozen.chunks) * self.chunk_size)[:, None]
            pieces.append(Piece(frozen.outliers.k, frozen.outliers.v, kept[:, None, None]))
        if fetched is not None:
            assert fetched.k is not None
            pieces.append(Piece(fetched.k, fetched.v, fetched.valid[:, :, None]))
        return attend(step.q_post, pieces, spec.scale), state, carry

    def attended(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Window, outliers and selected chunks."""
        chunks = state.frozen.chunks
        sparse = self.row_outliers(chunks) + self.row_selected(chunks)
        return (lengths - chunks * self.chunk_size + sparse * self.chunk_size).astype(jnp.float32)

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Full rank and a budget of everything."""
        return cls(rank=config.key_columns, budget=max(num_tokens, cls.chunk_size))

    @classmethod
    def nominal(cls, fraction: float, num_tokens: int, config: ModelConfig) -> Self:
        """The highest rank that fits; where rank 8 does not, fewer outliers too."""
        check_fraction(fraction)
        limit = fraction * 2 * num_tokens * config.key_columns
        for outliers in (48, 24, 8, 4, 1, 0):
            for rank in range(config.key_columns // 8 * 8 or config.key_columns, 0, -8):
                policy = cls(rank=rank, outlier_chunks=outliers)
                if policy.resolve(config, num_tokens).device_numbers(num_tokens, config) <= limit:
                    return policy
        smallest = cls(rank=min(8, config.key_columns), outlier_chunks=0).resolve(config, num_tokens)
        least = smallest.device_numbers(num_tokens, config)
        raise infeasible(cls.name, fraction, least / (2 * num_tokens * config.key_columns))

    def device_numbers(self, num_tokens: int, config: ModelConfig) -> float:
        """Numbers (not bytes) that one layer keeps on the device for a prompt that fills the capacity."""
        if self.rank is None or self.budget is None:
            raise ConfigError("shadowkv.rank and budget must be resolved before bytes are counted, got None")
        chunks, columns, size = self.max_chunks(num_tokens), config.key_columns, self.chunk_size
        exact = self.max_outliers(num_tokens) * size + self.window_slots(num_tokens, num_tokens)
        # A 16-bit number holds two masks; an id takes two numbers. Wider numbers make both cheaper.
        small = config.kv_heads * (chunks / 2 + 2 * self.max_selected(num_tokens)) + 2
        return chunks * (size * self.rank + columns) + self.rank * columns + 2 * exact * columns + small


def chunk_landmarks(keys: Float[Array, "B h n c d"]) -> tuple[Float[Array, "B h n d"], Float[Array, "B h n"]]:
    """Landmarks and how badly they represent their chunk.

    Args:
        keys: post-RoPE keys [B, h, n, c, d].

    Returns:
        float32 means [B, h, n, d] and least cosine between a mean and a key of its chunk [B, h, n].
    """
    keys = keys.astype(jnp.float32)
    mean = keys.mean(axis=3)
    length = jnp.linalg.norm(keys, axis=-1) * jnp.linalg.norm(mean, axis=-1)[..., None]
    cosine = jnp.einsum("bhncd,bhnd->bhnc", keys, mean, precision=EXACT) / jnp.maximum(
        length, jnp.finfo(jnp.float32).tiny
    )
    return mean, cosine.min(axis=-1)


def landmark_scores(
    q: Float[Array, "B T h_q d"], landmarks: Float[Array, "B h_kv n d"], candidates: Bool[Array, "B h_kv n"],
    valid: Bool[Array, "B T"], scale: float,
) -> Float[Array, "B h_kv n"]:  # fmt: skip
    """Score of each chunk: softmax over the candidates per query head, summed over queries, maximum over the group.

    Args:
        q: [B, T, h_q, d], after RoPE.
        landmarks: [B, h_kv, n, d].
        candidates: bool [B, h_kv, n]; the others take no part in the softmax.
        valid: bool [B, T], queries that count.
        scale: 1 / sqrt(d).

    Returns:
        float32 [B, h_kv, n]; -1 where not a candidate.
    """
    grouped = group_queries(q, landmarks.shape[1])
    logits = jnp.einsum("bhgtd,bhnd->bhgtn", grouped, landmarks, precision=EXACT, preferred_element_type=jnp.float32)
    logits = logits * scale
    logits = jnp.where(candidates[:, :, None, None], logits, MASKED)
    mass = jnp.where(valid[:, None, None, :, None], jax.nn.softmax(logits, axis=-1), 0.0)
    return jnp.where(candidates, mass.sum(axis=3).max(axis=2), -1.0)
