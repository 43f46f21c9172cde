"""ShadowKV: low-rank keys, landmarks and outliers on the device, values in host memory (Sun et al. 2024,
arXiv 2410.21465, section 4, algorithms 1 and 2).

Where the paper and its code leave a choice, this one is made: float32 selection scores at 1 / sqrt(head_dim), ties to
the lower chunk, per-row lengths, selected keys always rebuilt, the outlier count a number of chunks, a selection for
each query, and an exact window that holds what follows the last whole chunks of the prompt and all new tokens.
`ShadowKV.reference()` makes the published code's choices instead. Beyond the paper, keys can be kept in other codes
than low rank (`key_codecs`), landmarks and host values in 8 or 4 bits; landmarks can tell the variance of their keys,
and be of few tokens without all being read (`landmark_levels`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import pallas_kernels
from jshadow.cache.records import Fetched, HostWrite, Kept, KeyValues, LayerState, PromptKV, Rebuild, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import take_chunks, take_span, to_chunks, top_k, write_rows
from jshadow.ops.packing import ROW_BITS, Scaled, join_rows, quantise_rows, scale_dtype
from jshadow.policies.registry import register
from jshadow.policies.shadowkv.costs import sizes_of
from jshadow.policies.shadowkv.key_codecs import KeyCode
from jshadow.policies.shadowkv.key_codecs.query_weights import query_weights
from jshadow.policies.shadowkv.landmark_levels import (
    Landmarks,
    Marks,
    chosen_marks,
    first_level,
    first_spread,
    keep_levels,
    near_chunks,
    scores_by_details,
)
from jshadow.policies.shadowkv.landmarks import (
    chunk_scores,
    keep_landmarks,
    landmark_logits,
    prompt_landmarks,
    prompt_spread,
)
from jshadow.policies.shadowkv.places import in_turn
from jshadow.policies.shadowkv.preload import Preload, exact_keys
from jshadow.policies.shadowkv.second_round import WIDER, scores_by_keys
from jshadow.policies.shadowkv.settings import ShadowSettings
from jshadow.policies.shadowkv.state import ShadowFrozen, ShadowLive
from jshadow.policies.units import within_share


@register(
    small={"rank": 12, "budget": 16, "chunk_size": 4, "outlier_chunks": 2, "local_chunks": 2},
    lossless=lambda tokens, config: {"rank": config.key_columns, "budget": max(tokens, 8)},
)
@dataclasses.dataclass(frozen=True)
class ShadowKV(ShadowSettings):
    """Rebuild a few percent of the keys from a code of them while their values are fetched.

    The settings are those of `ShadowSettings`.
    """

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Zeros: no chunk, an empty window."""
        chunks, heads, dim = self.max_chunks(spec.capacity), spec.kv_heads, spec.head_dim
        code = self.codec.empty(spec.batch, chunks, self.chunk_size, sizes_of(spec))

        def zeros(*shape: int) -> Array:
            return jnp.zeros((spec.batch, *shape), spec.dtype)

        exact = zeros(heads, self.max_outliers(spec.capacity) * self.chunk_size, dim)
        frozen = ShadowFrozen(
            left=code.left,
            right=code.right,
            landmarks=self.no_landmarks(spec, chunks),
            candidates=jnp.zeros((spec.batch, heads, chunks), bool),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            outliers=KeyValues(exact, exact),
            spread=self.no_spread(spec, chunks),
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

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Values of every whole chunk, outliers too (as in the published code)."""
        told = "" if self.codec.compiled else f"key_codec={self.key_codec!r}"
        if float8 := self.value_dtype == "fp8":
            told = f"value_dtype={self.value_dtype!r}"
        return HostLayout(
            heads=spec.kv_heads, units=self.max_chunks(spec.capacity), unit=self.chunk_size,
            bits=ROW_BITS.get(self.value_dtype), float8=float8, no_kernel=told,
        )  # fmt: skip

    def keep_marks(self, spec: CacheSpec, landmarks: Array) -> Landmarks:
        """Landmarks [B, h_kv, n * s, d] as they are kept."""
        if self.landmark_levels == 1:
            return keep_landmarks(landmarks, self.landmark_dtype, spec.dtype)
        return keep_levels(landmarks, self.landmark_parts, self.landmark_dtype, spec.dtype)

    def no_landmarks(self, spec: CacheSpec, chunks: int) -> Landmarks:
        """Zeros for so many chunks, as they are kept."""
        shape = (spec.batch, spec.kv_heads, chunks * self.landmark_parts, spec.head_dim)
        return self.keep_marks(spec, jnp.zeros(shape, spec.dtype))

    def spread_of(self, spec: CacheSpec, find: Callable[[int], Array]) -> Any:
        """Spreads as they are kept, of what `find` finds for so many landmarks a chunk, float32 [B, h_kv, n * s]."""
        if self.landmark_order == 1:
            return None
        kind = scale_dtype(spec.dtype)

        def kept(parts: int, width: int) -> Array:
            found = jnp.minimum(find(parts), float(jnp.finfo(kind).max)).astype(kind)
            return found.reshape(*found.shape[:2], found.shape[2] // width, width)

        parts = self.landmark_parts
        return kept(parts, 1) if self.landmark_levels == 1 else (kept(1, 1), kept(parts, parts))

    def no_spread(self, spec: CacheSpec, chunks: int) -> Any:
        """Zeros for so many chunks."""
        return self.spread_of(spec, lambda parts: jnp.zeros((spec.batch, spec.kv_heads, chunks * parts)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Key code, landmarks and outliers of the prompt; its values to the host (algorithm 1)."""
        size, count = self.chunk_size, self.max_chunks(spec.capacity)
        row_chunks, parts = self.prompt_chunks(prompt.lengths), self.landmark_parts
        weights = self.weights_of(spec, prompt)
        code = self.codec.encode(prompt.k_pre, prompt.lengths, count, size, weights)
        landmarks, worst = prompt_landmarks(prompt.k_post, count, size, parts=parts)
        whole = (jnp.arange(count) < row_chunks[:, None])[:, None, :]
        whole = jnp.broadcast_to(whole, worst.shape)
        outlier_ids = self.choose_outliers(spec, prompt, code, weights, whole, worst)
        kept = jnp.arange(outlier_ids.shape[2]) < self.row_outliers(row_chunks)[:, None, None]
        candidates = leave_out(whole, outlier_ids, kept)

        def spread(parts: int) -> Array:
            found = prompt_spread(prompt.k_post, count, size, parts=parts)
            return jnp.where(jnp.repeat(whole, parts, axis=2), found, 0)

        frozen = ShadowFrozen(
            left=code.left,
            right=code.right,
            landmarks=self.keep_marks(spec, jnp.where(jnp.repeat(whole, parts, axis=2)[..., None], landmarks, 0)),
            candidates=candidates,
            chunks=row_chunks,
            spread=self.spread_of(spec, spread),
            outliers=KeyValues(*(take_chunks(x, outlier_ids, kept, size) for x in (prompt.k_post, prompt.v))),
        )
        recent = (take_span(x, row_chunks * size, spec.window) for x in (prompt.k_post, prompt.v))
        live = state.live.replace(window=KeyValues(*recent))
        if self.exact_preload:
            ids = self.preloaded(spec, frozen, prompt)
            frozen = frozen.replace(preload=Preload(ids, take_chunks(prompt.k_post, ids, ids >= 0, size)))
            live = live.replace(fresh=ids >= 0)
        rows = self.host_rows(spec, to_chunks(prompt.v, count, size))
        return LayerState(frozen, live), HostWrite(rows) if count else None

    def weights_of(self, spec: CacheSpec, prompt: PromptKV) -> Array | None:
        """What an error in each number of a key counts [B, h_kv, d]; None: all alike."""
        if self.key_weights == "none":
            return None
        assert prompt.q_tail is not None
        return query_weights(prompt.q_tail, prompt.lengths, spec.kv_heads, spec.rope.rotary_dim(spec.head_dim))

    def no_weights(self, spec: CacheSpec) -> Array | None:
        """Weights before any prompt."""
        shape = (spec.batch, spec.kv_heads, spec.head_dim)
        return None if self.key_weights == "none" else jnp.zeros(shape, jnp.float32)

    def choose_outliers(
        self, spec: CacheSpec, prompt: PromptKV, code: KeyCode, weights: Array | None, whole: Array, worst: Array
    ) -> Array:  # fmt: skip
        """The chunks that stay exact, int32 [B, h_kv, o], a row's own first: those least like their landmark, then,
        with outlier_rule="both", as many others whose keys the code loses most of.

        The two find different things. What is far from its landmark is not selected when it should be: the first
        tokens of a text. What the code cannot hold is rebuilt as something else: a number in a text that repeats
        itself.
        """
        count, first = self.max_outliers(spec.capacity), self.landmark_outliers(spec.capacity)
        ids = top_k(jnp.where(whole, -worst, -jnp.inf), first)
        if first == count:
            return ids
        others = leave_out(whole, ids, jnp.ones(ids.shape, bool))
        lost = self.codec.losses(code, prompt.k_pre, self.chunk_size, weights)
        return jnp.concatenate([ids, top_k(jnp.where(others, lost, -jnp.inf), count - first)], axis=2)

    def host_rows(self, spec: CacheSpec, values: Array) -> Array:
        """Values of chunks [B, h_kv, n, c, d] as they lie in host memory, one row a chunk."""
        if self.value_dtype == "model":
            return values.reshape(*values.shape[:3], self.chunk_size * spec.head_dim)
        if self.value_dtype == "fp8":
            most = float(jnp.finfo(jnp.float8_e4m3fn).max)  # past which there is no infinity, but no number
            rows = jnp.clip(values.astype(jnp.float32), -most, most).astype(jnp.float8_e4m3fn)
            return lax.bitcast_convert_type(rows, jnp.uint8).reshape(*values.shape[:3], self.chunk_size * spec.head_dim)
        return join_rows(quantise_rows(values, ROW_BITS[self.value_dtype], spec.dtype))

    def preloaded(self, spec: CacheSpec, frozen: ShadowFrozen, prompt: PromptKV) -> Array:
        """Chunks that the prompt's last query selects, int32 [B, h_kv, k]; -1 past a row's own."""
        assert prompt.q_tail is not None
        q, count = prompt.q_tail[:, -1:], self.max_selected(spec.capacity)
        logits = self.products(spec, q, (frozen.landmarks, frozen.spread), frozen.candidates[:, :, None])
        valid = jnp.ones((spec.batch, 1), bool)
        scores = chunk_scores(logits, valid, False, self.score_dtype, self.read_parts)
        ids, scores = self.by_landmarks(spec, scores, count, q, valid, (frozen.landmarks, frozen.spread))
        return jnp.where(scores >= 0, ids, -1)[:, :, 0]

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

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        """Chunks with the most softmax mass on their landmark, per KV head and query (algorithm 2)."""
        count = self.max_selected(spec.capacity)
        if count == 0:
            return None, state
        shared = self.turn_selection == "shared"
        with jax.named_scope("select"):
            ids, best = self.choose(spec, state, step, count)
        asked = step.valid.any(axis=1, keepdims=True) if shared else step.valid
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
        return selection, state.replace(live=state.live.replace(resident=held))

    def choose(self, spec: CacheSpec, state: LayerState, step: StepKV, count: int) -> tuple[Array, Array]:
        """The best chunks, int32 [B, h_kv, Q, k], and their scores; Q = 1 for a shared selection, else T."""
        scores = self.scores(spec, state, step)
        wanted = count if self.selection_rounds == 1 else min(WIDER * count, scores.shape[3])
        wide, scores = self.by_landmarks(
            spec, scores, wanted, step.q_post, step.valid, (state.frozen.landmarks, state.frozen.spread),
            self.later_marks(state),
        )  # fmt: skip
        if self.selection_rounds == 1:
            return wide, scores
        there = scores >= 0
        keys = self.rebuild(spec, state, step).keys(wide.reshape(*wide.shape[:2], -1)).astype(spec.dtype)
        scores = scores_by_keys(
            step.q_post, keys, there, step.valid, self.score_scale(spec), self.turn_selection == "shared",
            self.score_dtype,
        )  # fmt: skip
        order = top_k(scores, count)
        return jnp.take_along_axis(wide, order, axis=3), jnp.take_along_axis(scores, order, axis=3)

    def by_landmarks(
        self, spec: CacheSpec, scores: Array, count: int, q: Array, valid: Array, marks: Marks, later: Any = None
    ) -> tuple[Array, Array]:  # fmt: skip
        """The best chunks by scores [B, h_kv, Q, n] of what of their landmarks all queries read, and by the rest of
        those that come near: int32 [B, h_kv, Q, count], and their scores."""
        if self.landmark_levels == 1:
            ids = top_k(scores, count)
            return ids, jnp.take_along_axis(scores, ids, axis=3)
        near, there = near_chunks(scores, count, self.max_chunks(spec.capacity))
        levels, spread = chosen_marks(marks, later, near.reshape(*near.shape[:2], -1))
        scores = scores_by_details(
            q, levels, there, valid, self.score_scale(spec), self.turn_selection == "shared", self.score_dtype,
            None if spread is None else spread[1],
        )  # fmt: skip
        order = top_k(scores, count)
        return jnp.take_along_axis(near, order, axis=3), jnp.take_along_axis(scores, order, axis=3)

    def later_marks(self, state: LayerState) -> Any:
        """Landmarks and spreads of chunks after the prompt's, where there may be any."""
        return None

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
        shared, kept = self.turn_selection == "shared", first_level(state.frozen.landmarks)
        if self.scored_by_kernel:
            rows, scales = (kept.codes, kept.scale) if isinstance(kept, Scaled) else (kept, None)
            return pallas_kernels.chunk_scores(
                step.q_post, rows, state.frozen.candidates, scale=self.score_scale(spec), landmark_scale=scales,
                spread=first_spread(state.frozen.spread),
            )  # fmt: skip
        logits = self.logits(spec, state, step)
        return chunk_scores(logits, step.valid, shared, self.score_dtype, self.read_parts)

    @property
    def scored_by_kernel(self) -> bool:
        """Where each query selects by itself, exactly, and from the prompt's chunks alone."""
        own = type(self).logits is ShadowKV.logits
        return own and self.turn_selection != "shared" and self.score_dtype == "float32"

    def logits(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """Products with all landmarks, s of them for each chunk, or their means: float32 [B, h_kv, group, T, n * s]."""
        marks = state.frozen.landmarks, state.frozen.spread
        return self.products(spec, step.q_post, marks, state.frozen.candidates[:, :, None])

    def products(self, spec: CacheSpec, q: Array, marks: Marks, candidates: Array) -> Array:
        """`landmark_logits` of queries [B, T, h_q, d] where chunks bool [B, h_kv, 1 or T, n] are candidates."""
        landmarks, spread = marks
        candidates = jnp.repeat(candidates, self.read_parts, axis=3)
        return landmark_logits(
            q, first_level(landmarks), candidates, self.score_scale(spec), first_spread(spread)
        )  # fmt: skip

    def rebuild(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Rebuild:
        """The code of all chunks that may be selected."""
        frozen = state.frozen
        return Rebuild(frozen.left, frozen.right, step.inverse, codec=self.codec, unit=self.chunk_size)

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Outliers, selected chunks and window, one softmax."""
        pieces = self.exact_pieces(spec, state, step)
        if fetched is not None:
            assert fetched.k is not None
            k = fetched.k
            if state.frozen.preload is not None:
                k, fresh = exact_keys(state.frozen.preload, state.live.fresh, fetched, step.valid)
                state = state.replace(live=state.live.replace(fresh=fresh))
            pieces.append(own_piece(k, fetched, 1 if self.turn_selection == "shared" else step.valid.shape[1]))
        return attend(step.q_post, pieces, spec.scale), state

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


def leave_out(chunks: Array, ids: Array, chosen: Array) -> Array:
    """Bool [B, h_kv, n] without the ids [B, h_kv, o] that are chosen, bool like them."""
    row, head = jnp.ogrid[: chunks.shape[0], : chunks.shape[1]]
    ids = jnp.where(chosen, ids, chunks.shape[2])
    return chunks.at[row[..., None], head[..., None], ids].set(False, mode="drop")


def own_piece(k: Array, fetched: Fetched, queries: int) -> Piece:
    """Fetched rows [B, h_kv, Q * n, d] as a piece to attend: for all queries if Q = 1, else each query its own."""
    batch, heads, tokens, dim = k.shape
    if queries == 1:
        return Piece(k, fetched.v, fetched.valid[:, :, None])
    shape = (batch, heads, queries, tokens // queries)
    return Piece(k.reshape(*shape, dim), fetched.v.reshape(*shape, dim), fetched.valid.reshape(shape))
