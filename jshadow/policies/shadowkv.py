"""ShadowKV: low-rank keys, landmarks and outliers on the device, values in host memory (Sun et al. 2024,
arXiv 2410.21465, section 4, algorithms 1 and 2).

Where the paper and its code leave a choice, this one is made: float32 selection scores at 1 / sqrt(head_dim), ties to
the lower chunk, per-row lengths, selected keys always rebuilt, the outlier count a number of chunks, a selection for
each query, and an exact window that holds what follows the last whole chunks of the prompt and all new tokens.
`ShadowKV.reference()` makes the published code's choices instead.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

import pallas_kernels
from jshadow.attention import Piece, attend
from jshadow.chunking import fit_tokens, take_chunks, take_span, to_chunks, top_k, write_rows
from jshadow.config import ModelConfig
from jshadow.errors import ConfigError
from jshadow.landmarks import MANTISSA, chunk_scores, landmark_logits, prompt_landmarks
from jshadow.lowrank import BLOCK, key_factors
from jshadow.policies.base import (
    check_choice,
    check_range,
    check_share,
    within_share,
)
from jshadow.policies.chunk_costs import ChunkCosts
from jshadow.policies.nominal import infeasible, own_share, whole_share
from jshadow.policies.places import in_turn
from jshadow.policies.preload import Preload, exact_keys
from jshadow.state import (
    CacheSpec,
    Fetched,
    HostLayout,
    HostWrite,
    Kept,
    KeyValues,
    LayerState,
    PromptKV,
    Rebuild,
    Selection,
    StepKV,
)  # fmt: skip


class ShadowFrozen(struct.PyTreeNode):
    """The prompt, n chunks of c tokens at most.

    Attributes:
        left: left factor of the pre-RoPE keys, one chunk contiguous [B, n, c * rank].
        right: right factor [B, h_kv, rank, d].
        landmarks: mean post-RoPE key of each chunk [B, h_kv, n, d].
        candidates: chunks that may be selected, bool [B, h_kv, n]: whole chunks of the row that are no outliers.
        chunks: chunks of each row, int32 [B]; the window begins at token chunks * c.
        outliers: exact keys and values of the outlier chunks [B, h_kv, o * c, d].
        preload: chunks that begin with exact keys, only with `exact_preload`.
    """

    left: Array
    right: Array
    landmarks: Array
    candidates: Array
    chunks: Array
    outliers: KeyValues
    preload: Preload | None = None


class ShadowLive(struct.PyTreeNode):
    """What decoding changes.

    Attributes:
        window: exact keys (after RoPE) and values from token chunks * c on [B, h_kv, window, d].
        resident: chunks selected by the last query, int32 [B, h_kv, k]; -1 where there is none.
        fresh: preloaded chunks that every query has selected since, bool [B, h_kv, k]; only with `exact_preload`.
        values: values of the chunks in `resident` [B, h_kv, k, c * d], only with fetch="zero_copy".
    """

    window: KeyValues
    resident: Array
    fresh: Array | None = None
    values: Array | None = None


@dataclasses.dataclass(frozen=True)
class ShadowKV(ChunkCosts):
    """Rebuild a few percent of the keys from low-rank factors while their values are fetched.

    Attributes:
        rank: columns of the factors; None: 160 of every 1024 key columns, in multiples of 8.
        chunk_size: tokens in a chunk.
        budget: tokens selected in a step, outliers and window not counted; None: 1.56 % of the capacity, at least 256.
        outlier_chunks: chunks per KV head that are kept exactly, those least like their landmark; None: 24 per 1,024
            tokens of budget.
        local_chunks: whole chunks at the end of the prompt that stay in the window.
        turn_selection: "each": every query of a turn selects for itself, so that a turn equals as many single steps;
            "shared": the queries of a piece select together.
        extend_piece: tokens of a turn that pass the model at once.
        score_dim: selection scores are divided by its root; None: the head width.
        score_dtype: to which the softmax over landmarks is rounded, "float32" or "bfloat16".
        exact_preload: chunks that the prompt's last query selects keep exact keys while every query selects them.
        chunk_multiple: the number of chunks of a prompt is rounded down to a multiple of it.
        top_p: share of the budget's scores that is enough: fewer chunks where few matter (extend_piece is then 1).
    """

    rank: int | None = None
    chunk_size: int = 8
    budget: int | None = None
    outlier_chunks: int | None = 48
    local_chunks: int = 4
    turn_selection: str = "each"
    extend_piece: int = 16
    score_dim: int | None = None
    score_dtype: str = "float32"
    exact_preload: bool = False
    chunk_multiple: int = 1
    top_p: float = 1.0

    name = "shadowkv"
    paper = "arXiv 2410.21465, section 4"
    budget_fields = ("budget",)

    @classmethod
    def reference(cls) -> Self:
        """The choices of the published code's throughput class (github.com/ByteDance-Seed/ShadowKV, e51904c).

        A turn of at most 4,096 tokens selects once; scores are divided by sqrt(128) whatever the head, and rounded to
        bfloat16; chunks that the prompt's last query selects begin with exact keys; chunks come in eights, outliers
        by the budget. What it does not repeat: tokens dropped at a full window, ties broken at random, equal prompts.
        """
        return cls(
            outlier_chunks=None, turn_selection="shared", extend_piece=4096, score_dim=128, score_dtype="bfloat16",
            exact_preload=True, chunk_multiple=8,
        )  # fmt: skip

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in rank, budget and outlier_chunks, check every range."""
        columns = config.key_columns
        rank = min(columns, max(8, round(columns * 160 / 1024 / 8) * 8)) if self.rank is None else self.rank
        check_range(self.name, "chunk_size", self.chunk_size, 1)
        budget = self.budget
        if budget is None:
            budget = max(256, round(capacity * 0.0156), self.chunk_size)
        check_range(self.name, "rank", rank, 1, columns)
        check_range(self.name, "budget", budget, self.chunk_size)
        outliers = 24 * (budget // 1024) if self.outlier_chunks is None else self.outlier_chunks
        check_range(self.name, "outlier_chunks", outliers, 0)
        check_range(self.name, "local_chunks", self.local_chunks, 0)
        check_choice(self.name, "turn_selection", self.turn_selection, ("each", "shared"))
        check_range(self.name, "extend_piece", self.extend_piece, 1)
        if self.score_dim is not None:
            check_range(self.name, "score_dim", self.score_dim, 1)
        check_choice(self.name, "score_dtype", self.score_dtype, tuple(MANTISSA))
        check_choice(self.name, "exact_preload", self.exact_preload, (False, True))
        check_range(self.name, "chunk_multiple", self.chunk_multiple, 1)
        check_share(self.name, "top_p", self.top_p)
        piece = self.extend_piece if self.top_p == 1 else 1  # what a query attends to is read off its own step
        return dataclasses.replace(self, rank=rank, budget=budget, outlier_chunks=outliers, extend_piece=piece)

    @property
    def q_tail(self) -> int:  # type: ignore[override]
        """The prompt's last query, where it selects."""
        return int(self.exact_preload)

    # Counts. Static ones are maxima that follow from the capacity; a row's own follow from its chunks.

    def max_chunks(self, capacity: int) -> int:
        """Chunks of the longest prompt that fits."""
        return max(0, capacity // self.chunk_size - self.local_chunks) // self.chunk_multiple * self.chunk_multiple

    def prompt_chunks(self, lengths: Array) -> Array:
        """Chunks of prompts of these lengths, int32 [B]; what follows them is the window."""
        chunks = jnp.maximum(0, lengths // self.chunk_size - self.local_chunks)
        return chunks // self.chunk_multiple * self.chunk_multiple

    def max_outliers(self, capacity: int) -> int:
        """Outlier chunks of the longest prompt that fits."""
        assert self.outlier_chunks is not None
        return min(self.outlier_chunks, self.max_chunks(capacity))

    def max_selected(self, capacity: int) -> int:
        """Chunks selected in a step for the longest prompt that fits."""
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity) - self.max_outliers(capacity))

    def row_outliers(self, chunks: Array) -> Array:
        """Outlier chunks of rows with that many chunks, int32 [B]."""
        assert self.outlier_chunks is not None
        return jnp.minimum(self.outlier_chunks, chunks)

    def score_scale(self, spec: CacheSpec) -> float:
        """Factor on the products of queries and landmarks."""
        return spec.scale if self.score_dim is None else float(self.score_dim**-0.5)

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """A capacity with nothing to select from."""
        if self.max_selected(capacity) > 0:
            return None
        return (
            f"{self.name} has nothing to select at capacity={capacity}: {self.max_chunks(capacity)} whole chunks, "
            f"outlier_chunks={self.outlier_chunks}; dense cache used"
        )

    def window_slots(self, capacity: int, shortest: int) -> int:
        """The shortest prompt leaves the most tokens to the window; one slot at least, for a step needs a place."""
        return max(1, capacity - self.chunk_size * self.max_chunks(min(shortest, capacity)))

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
        count = self.max_selected(spec.capacity)
        none = jnp.full((spec.batch, heads, count), -1, jnp.int32)
        live = ShadowLive(KeyValues(recent, recent), none)
        if self.exact_preload:
            frozen = frozen.replace(preload=Preload(none, zeros(heads, count * self.chunk_size, dim)))
            live = live.replace(fresh=none >= 0)
        if spec.fetch == "zero_copy" and count:
            live = live.replace(values=zeros(heads, count, self.chunk_size * dim))
        return LayerState(frozen, live)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Factors, landmarks and outliers of the prompt; its values to the host (algorithm 1)."""
        assert self.rank is not None
        size, count, batch = self.chunk_size, self.max_chunks(spec.capacity), spec.batch
        row_chunks = self.prompt_chunks(prompt.lengths)
        left, right = key_factors(prompt.k_pre, prompt.lengths, self.rank)
        landmarks, worst = prompt_landmarks(prompt.k_post, count, size)
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
            landmarks=jnp.where(whole[..., None], landmarks, 0).astype(spec.dtype),
            candidates=candidates,
            chunks=row_chunks,
            outliers=KeyValues(*(take_chunks(x, outlier_ids, size) for x in (prompt.k_post, prompt.v))),
        )
        recent = (take_span(x, row_chunks * size, spec.window) for x in (prompt.k_post, prompt.v))
        live = state.live.replace(window=KeyValues(*recent))
        if self.exact_preload:
            ids = self.preloaded(spec, frozen, prompt)
            frozen = frozen.replace(preload=Preload(ids, take_chunks(prompt.k_post, ids, size)))
            live = live.replace(fresh=ids >= 0)
        rows = to_chunks(prompt.v, count, size).reshape(batch, spec.kv_heads, count, size * spec.head_dim)
        return LayerState(frozen, live), HostWrite(rows) if count else None

    def preloaded(self, spec: CacheSpec, frozen: ShadowFrozen, prompt: PromptKV) -> Array:
        """Chunks that the prompt's last query selects, int32 [B, h_kv, k]; -1 past a row's own."""
        assert prompt.q_tail is not None
        logits = landmark_logits(
            prompt.q_tail, frozen.landmarks, frozen.candidates[:, :, None], self.score_scale(spec)
        )  # fmt: skip
        scores = chunk_scores(logits, jnp.ones((spec.batch, 1), bool), False, self.score_dtype)[:, :, 0]
        ids = top_k(scores, self.max_selected(spec.capacity))
        return jnp.where(jnp.take_along_axis(scores, ids, axis=2) >= 0, ids, -1)

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
        """Chunks with the most softmax mass on their landmark, per KV head and query (algorithm 2)."""
        count = self.max_selected(spec.capacity)
        if count == 0:
            return None, state, carry
        shared = self.turn_selection == "shared"
        with jax.named_scope("select"):
            scores = self.scores(spec, state, step)
            ids = top_k(scores, count)  # [B, h_kv, Q, k], Q = 1 for a shared selection, else T
        asked = step.valid.any(axis=1, keepdims=True) if shared else step.valid
        best = jnp.take_along_axis(scores, ids, axis=3)
        enough = within_share(jnp.maximum(best, 0), self.top_p)
        valid = asked[:, None, :, None] & (best >= 0) & enough
        ids, valid, hit, held = in_turn(ids, valid, asked, state.live.resident)
        flat = (*ids.shape[:2], -1)
        kept = None
        if state.live.values is not None:
            # What is not valid is not attended either. Of several queries each brings all it selects.
            one, rows = ids.shape[2] == 1, state.live.values
            stay = hit | ~valid if one else ~valid
            kept = Kept(rows if one else jnp.zeros((*flat[:2], valid[0, 0].size, rows.shape[3]), rows.dtype),
                        stay.reshape(flat))  # fmt: skip
        selection = Selection(
            ids.reshape(flat), valid.reshape(flat), hit=hit.reshape(flat), rebuild=self.rebuild(spec, state, step),
            kept=kept,
        )  # fmt: skip
        return selection, state.replace(live=state.live.replace(resident=held)), carry

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        """Keep the values of the last query's chunks, where the next fetch can leave them out."""
        if state.live.values is None:
            return state
        batch, heads, count, width = state.live.values.shape
        rows = fetched.v.reshape(batch, heads, -1, count, width)
        values = rows[:, :, 0]
        if rows.shape[2] > 1:  # several queries: what the last of them left in each place
            valid = selection.valid.reshape(batch, heads, -1, count)
            last = valid.shape[2] - 1 - jnp.argmax(valid[:, :, ::-1], axis=2)
            values = jnp.take_along_axis(rows, last[:, :, None, :, None], axis=2)[:, :, 0]
            values = jnp.where(valid.any(axis=2)[..., None], values, state.live.values)
        return state.replace(live=state.live.replace(values=values))

    def scores(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """Float32 scores of all chunks [B, h_kv, Q, n], -1 where one may not be selected; Q = 1 if shared, else T."""
        shared, frozen = self.turn_selection == "shared", state.frozen
        if not shared and self.score_dtype == "float32" and type(self).logits is ShadowKV.logits:
            return pallas_kernels.chunk_scores(
                step.q_post, frozen.landmarks, frozen.candidates, scale=self.score_scale(spec)
            )
        return chunk_scores(self.logits(spec, state, step), step.valid, shared, self.score_dtype)

    def logits(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """Products with all landmarks, float32 [B, h_kv, group, T, n]."""
        candidates = state.frozen.candidates[:, :, None]
        return landmark_logits(step.q_post, state.frozen.landmarks, candidates, self.score_scale(spec))

    def rebuild(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Rebuild:
        """The factors of all chunks that may be selected."""
        return Rebuild(state.frozen.left, state.frozen.right, step.inverse)

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None, carry: Any
    ) -> tuple[Array, LayerState, Any]:
        """Outliers, selected chunks and window, one softmax."""
        pieces = self.exact_pieces(spec, state, step)
        if fetched is not None:
            assert fetched.k is not None
            k = fetched.k
            if state.frozen.preload is not None:
                k, fresh = exact_keys(state.frozen.preload, state.live.fresh, fetched, step.valid)
                state = state.replace(live=state.live.replace(fresh=fresh))
            pieces.append(own_piece(k, fetched, 1 if self.turn_selection == "shared" else step.valid.shape[1]))
        return attend(step.q_post, pieces, spec.scale), state, carry

    def exact_pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        """Window and outliers."""
        frozen, window = state.frozen, state.live.window
        first = frozen.chunks[:, None] * self.chunk_size
        seen = jnp.arange(spec.window) <= (step.positions - first)[:, None, :, None]
        pieces = [Piece(window.k, window.v, seen)]
        slots = frozen.outliers.k.shape[2]
        if slots:
            kept = jnp.arange(slots) < (self.row_outliers(frozen.chunks) * self.chunk_size)[:, None]
            pieces.append(Piece(frozen.outliers.k, frozen.outliers.v, kept[:, None, None]))
        return pieces

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Selected chunks, outliers and window."""
        assert self.budget is not None
        chunks = state.frozen.chunks
        outliers = self.row_outliers(chunks)
        selected = jnp.minimum(self.budget // self.chunk_size, chunks - outliers)
        if self.top_p < 1:
            selected = (state.live.resident >= 0).sum(axis=2).mean(axis=1, dtype=jnp.float32)
        parts = {"selected": selected * self.chunk_size, "outliers": outliers * self.chunk_size,
                 "window": lengths - chunks * self.chunk_size}  # fmt: skip
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Full rank and a budget of everything."""
        return cls(rank=config.key_columns, budget=max(num_tokens, cls.chunk_size))

    @classmethod
    def nominal(cls, fraction: float, num_tokens: int, config: ModelConfig) -> Self:
        """The highest rank that fits; outliers go before it falls below the paper's share of the columns.

        48 outlier chunks are few of 128K tokens and a fifth of 2K, where a low rank costs more than they save.
        """
        limit = own_share(cls.name, fraction, num_tokens, config) * 2 * num_tokens * config.key_columns
        usual = cls().resolve(config, num_tokens).rank
        assert usual is not None
        ranks = range(config.key_columns // 8 * 8 or config.key_columns, 0, -8)
        tries = [(count, rank) for count in (48, 24, 8, 4, 1, 0) for rank in ranks if rank >= usual]
        for outliers, rank in tries + [(0, rank) for rank in ranks if rank < usual]:
            policy = cls(rank=rank, outlier_chunks=outliers)
            if policy.resolve(config, num_tokens).device_numbers(num_tokens, config) <= limit:
                return policy
        smallest = cls(rank=min(8, config.key_columns), outlier_chunks=0).resolve(config, num_tokens)
        least = smallest.device_numbers(num_tokens, config) / (2 * num_tokens * config.key_columns)
        raise infeasible(cls.name, fraction, whole_share(least, num_tokens, config))

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Left rows in the order of the prompt, the Gram matrix and its eigenvectors, float32 copies of a block."""
        assert self.rank is not None
        columns, item = spec.kv_heads * spec.head_dim, jnp.dtype(spec.dtype).itemsize
        block = min(tokens, BLOCK)
        return spec.batch * (2 * tokens * self.rank * item + 4 * (6 * columns * columns + 4 * block * columns))

    def device_numbers(self, num_tokens: int, config: ModelConfig) -> float:
        """Numbers (not bytes) that one layer keeps on the device for a prompt that fills the capacity."""
        if self.rank is None or self.budget is None:
            raise ConfigError("shadowkv.rank and budget must be resolved before bytes are counted, got None")
        chunks, columns, size = self.max_chunks(num_tokens), config.key_columns, self.chunk_size
        exact = self.max_outliers(num_tokens) * size + self.window_slots(num_tokens, num_tokens)
        # A 16-bit number holds two masks; an id takes two numbers. Wider numbers make both cheaper.
        small = config.kv_heads * (chunks / 2 + 2 * self.max_selected(num_tokens)) + 2
        return chunks * (size * self.rank + columns) + self.rank * columns + 2 * exact * columns + small


def own_piece(k: Array, fetched: Fetched, queries: int) -> Piece:
    """Fetched rows [B, h_kv, Q * n, d] as a piece to attend: for all queries if Q = 1, else each query its own."""
    batch, heads, tokens, dim = k.shape
    if queries == 1:
        return Piece(k, fetched.v, fetched.valid[:, :, None])
    shape = (batch, heads, queries, tokens // queries)
    return Piece(k.reshape(*shape, dim), fetched.v.reshape(*shape, dim), fetched.valid.reshape(shape))


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a state record by name, not copied."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
