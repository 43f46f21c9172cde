"""ShadowKV: low-rank keys, landmarks and outliers on the device, values in host memory.

The method is that of Sun et al. 2024 (arXiv 2410.21465), section 4, algorithms 1 and 2. Where the paper and its code
leave a choice, this implementation chooses as follows. Scores are float32 and scaled by 1 / sqrt(head_dim). Of equal
scores, the lower chunk is selected. Each row of a batch has its own length. Selected keys are always rebuilt. The
number of outliers is a number of chunks. Each query selects its own chunks. The window holds, exactly, the end of the
prompt and all new tokens. `ShadowKV.reference()` has the published code's choices instead.

Some settings go beyond the paper. Keys can be stored in other codes than low rank (`key_codecs`). Landmarks and host
values can have 8 or 4 bits. Landmarks can include the variance of their keys, and can have two levels (`landmarks`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Rebuild, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import take_chunks, take_span, to_chunks
from jshadow.ops.packing import ROW_BITS, quantize_chunks
from jshadow.policies.capabilities import SplitsTurns
from jshadow.policies.registry import register
from jshadow.policies.shadowkv.costs import ShadowCosts
from jshadow.policies.shadowkv.key_codecs import KeyCode, Sizes
from jshadow.policies.shadowkv.key_codecs.base import Parts, encode_parts
from jshadow.policies.shadowkv.key_codecs.lowrank import query_weights
from jshadow.policies.shadowkv.landmarks import (
    Marks,
    StoredLandmarks,
    prompt_landmarks,
    prompt_spread,
    stored_landmarks,
    stored_spread,
)
from jshadow.policies.shadowkv.selection import (
    Finalists,
    Query,
    choose,
    empty_cache,
    exact_keys,
    finalists,
    kept_rows,
    landmark_scores,
    leave_out,
    outlier_chunks,
    own_piece,
    preloaded_chunks,
    received,
)
from jshadow.policies.shadowkv.settings import ShadowSettings
from jshadow.policies.shadowkv.state import Preload, ShadowFrozen, ShadowLive


@register(
    small={"rank": 12, "budget": 16, "chunk_size": 4, "outlier_chunks": 2, "local_chunks": 2},
    lossless=lambda tokens, config: {"rank": config.key_columns, "budget": max(tokens, ShadowSettings.chunk_size)},
)
@dataclasses.dataclass(frozen=True)
class ShadowKV(ShadowCosts, SplitsTurns):
    """Select a few percent of the chunks, rebuild their keys from a code, and fetch their values meanwhile.

    The settings are those of `ShadowSettings`.
    """

    takes_sinks = True

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        chunks, heads, dim = self.max_chunks(spec.capacity), spec.kv_heads, spec.head_dim
        code = self.codec.empty(spec.batch, self.left_chunks(spec), self.chunk_size, Sizes.of(spec))

        def zeros(*shape: int) -> Array:
            return jnp.zeros((spec.batch, *shape), spec.dtype)

        exact = zeros(heads, self.max_outliers(spec.capacity) * self.chunk_size, dim)
        landmarks, spread = self.empty_marks(spec, chunks)
        frozen = ShadowFrozen(
            left=code.left,
            right=code.right,
            landmarks=landmarks,
            candidates=jnp.zeros((spec.batch, heads, chunks), bool),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            outliers=KeyValues(exact, exact),
            spread=spread,
        )
        window = zeros(heads, spec.window, dim)
        count, places = self.selected(spec), self.places(spec)
        live = ShadowLive(KeyValues(window, window), *empty_cache((spec.batch, heads), places, aged=places > count))
        if self.quirks.exact_preload:
            none = jnp.full((spec.batch, heads, count), -1, jnp.int32)
            frozen = frozen.replace(preload=Preload(none, zeros(heads, count * self.chunk_size, dim)))
            live = live.replace(fresh=none >= 0)
        if spec.keep and count:
            rows = zeros(heads, places, self.chunk_size * dim)
            live = live.replace(values=rows, keys=rows)
        return LayerState(frozen, live)

    def empty_marks(self, spec: CacheSpec, chunks: int) -> tuple[StoredLandmarks, Any]:
        """Return landmarks and spreads of `chunks` chunks, all zero, as they are stored."""
        shape, kind, parts = (spec.batch, spec.kv_heads), self.landmarks, self.landmark_parts
        landmarks = jnp.zeros((*shape, chunks * parts, spec.head_dim), spec.dtype)
        spread = stored_spread(lambda parts: jnp.zeros((*shape, chunks * parts)), kind, parts, spec.dtype)
        return stored_landmarks(landmarks, kind, parts, spec.dtype), spread

    def host_layout(self, spec: CacheSpec) -> HostLayout:
        """Return the layout of the values of every chunk, outliers included, as in the published code."""
        no_kernel = "" if self.codec.compiled else f"keys={self.keys.name!r}"
        return HostLayout(
            heads=spec.kv_heads,
            units=self.max_chunks(spec.capacity),
            unit=self.chunk_size,
            bits=ROW_BITS.get(self.values.dtype),
            no_kernel=no_kernel or ("left='split'" if self.splits_left(spec) else ""),
        )

    def host_rows(self, spec: CacheSpec, values: Array) -> Array:
        """Convert the values of chunks [B, h_kv, n, c, d] to rows of host memory, one for each chunk."""
        if self.values.dtype == "model":
            return values.reshape(*values.shape[:3], self.chunk_size * spec.head_dim)
        return quantize_chunks(values, ROW_BITS[self.values.dtype], spec.dtype)

    # The prompt

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        return self.compressed(spec, state, prompt)[:2]

    def compressed(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV
    ) -> tuple[LayerState, HostWrite | None, Array | None]:
        """Do what `compress` does. Return also the coding error of each chunk of the prompt, or None."""
        size, count, parts = self.chunk_size, self.max_chunks(spec.capacity), self.landmark_parts
        row_chunks, weights = self.prompt_chunks(prompt.lengths), self.key_weights(spec, prompt)
        landmarks, worst = prompt_landmarks(prompt.k_post, count, size, parts=parts)
        whole = jnp.broadcast_to((jnp.arange(count) < row_chunks[:, None])[:, None, :], worst.shape)
        first, outliers = self.landmark_outliers(spec.capacity), self.max_outliers(spec.capacity)
        code, lost = self._encode(spec, prompt, weights, losses=first < outliers or self.reads_losses)
        ids = outlier_chunks(whole, worst, lost if first < outliers else None, first, outliers)
        used = jnp.arange(outliers) < self.row_outliers(row_chunks)[:, None, None]

        def spread(parts: int) -> Array:
            wide = prompt_spread(prompt.k_post, count, size, parts=parts)
            return jnp.where(jnp.repeat(whole, parts, axis=2), wide, 0)

        landmarks = jnp.where(jnp.repeat(whole, parts, axis=2)[..., None], landmarks, 0)
        frozen = ShadowFrozen(
            left=code.left,
            right=code.right,
            landmarks=stored_landmarks(landmarks, self.landmarks, parts, spec.dtype),
            candidates=leave_out(whole, ids, used),
            chunks=row_chunks,
            spread=stored_spread(spread, self.landmarks, parts, spec.dtype),
            outliers=KeyValues(*(take_chunks(x, ids, used, size) for x in (prompt.k_post, prompt.v))),
        )
        window = (take_span(x, row_chunks * size, spec.window) for x in (prompt.k_post, prompt.v))
        live = state.live.replace(window=KeyValues(*window))
        if self.quirks.exact_preload:
            assert prompt.q_tail is not None
            query = Query(prompt.q_tail[:, -1:], jnp.ones((spec.batch, 1), bool), self.scoring(spec))
            ids = preloaded_chunks(query, prompt_marks(frozen), self.max_selected(spec.capacity))
            frozen = frozen.replace(preload=Preload(ids, take_chunks(prompt.k_post, ids, ids >= 0, size)))
            live = live.replace(fresh=ids >= 0)
        rows = self.host_rows(spec, to_chunks(prompt.v, count, size))
        return LayerState(frozen, live), HostWrite(rows) if count else None, lost

    @property
    def reads_losses(self) -> bool:
        """Whether the coding errors of the prompt's chunks are needed beyond the choice of its outliers."""
        return False

    def key_weights(self, spec: CacheSpec, prompt: PromptKV) -> Array | None:
        """Return the weights on errors of a key's numbers, float32 [B, h_kv, d], or None if all count equally."""
        if self.keys.weights == "none":
            return None
        assert prompt.q_tail is not None
        rotary = spec.rope.rotary_dim(spec.head_dim)
        return query_weights(prompt.q_tail, prompt.lengths, spec.kv_heads, rotary, spec.heads_axis)

    def _encode(
        self, spec: CacheSpec, prompt: PromptKV, weights: Array | None, *, losses: bool
    ) -> tuple[KeyCode, Array | None]:
        """Code the keys of a prompt. Return also the coding error of each chunk, or None without `losses`."""
        count, size = self.max_chunks(spec.capacity), self.chunk_size
        if spec.shards is not None and self.codec.joint:
            split = dataclasses.replace(spec, shards=dataclasses.replace(spec.shards, left="split"))
            parts = Parts(spec.shards, count, self.left_chunks(split), size)
            code, lost = encode_parts(self.codec, prompt.k_pre, prompt.lengths, weights, parts, losses)
            left = code.left[:, : self.left_chunks(spec)]
            return code.replace(left=left), None if lost is None else lost[:, :, :count]
        given: dict[str, Any] = {"values": prompt.v} if self.codec.from_values else {}
        code = self.codec.encode(prompt.k_pre, prompt.lengths, count, size, weights, **given)
        return code, self.codec.losses(code, prompt.k_pre, size, weights) if losses else None

    # One step

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        used = lengths - state.frozen.chunks * self.chunk_size
        return jnp.minimum(spec.capacity - lengths, spec.window - used)

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return the first token of the window, in which every token has a slot of its own.

        None with `Quirks.exact_preload`, because it remembers which chunks all queries have selected.
        """
        return None if self.quirks.exact_preload else jnp.maximum(state.frozen.chunks * self.chunk_size, 1)

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        window, q_post = state.live.window.append(step, step.positions, spec.rope, state.frozen.chunks, self.chunk_size)
        return state.replace(live=state.live.replace(window=window), q_post=q_post), None

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        """Select the chunks with the most softmax mass on their landmarks, per KV head and query (algorithm 2)."""
        count = self.selected(spec)
        if count == 0:
            return None, state
        asked = step.valid.any(axis=1, keepdims=True) if self.scoring(spec).shared else step.valid
        live: ShadowLive = state.live
        with jax.named_scope("select"):
            found = self.finalists(spec, state, step, self.max_selected(spec.capacity))
            chosen = choose(found, asked, count, live.resident, live.ages)
        ids, valid = (part.reshape(*part.shape[:2], -1) for part in (chosen.ids, chosen.valid))
        selection = Selection(
            ids,
            valid,
            rebuild=self.rebuild(spec, state, step),
            kept=kept_rows(live, chosen),
            counts=(chosen.total, chosen.hits),
        )
        return selection, state.replace(live=live.replace(resident=chosen.resident, ages=chosen.ages))

    def finalists(self, spec: CacheSpec, state: LayerState, step: StepKV, count: int) -> Finalists:
        """Return the chunks of which the `count` best are selected. Q is 1 if the queries select together, else T."""
        query, keys_of = Query(step.q_post, step.valid, self.scoring(spec)), None
        if self.choice.rounds == 2:
            keys_of = lambda ids: self.rebuild(spec, state, step).keys(ids).astype(spec.dtype)  # noqa: E731
        return finalists(query, self.marks(spec, state, step), self.scores(spec, state, step), count, keys_of)

    def scores(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """Score all chunks, float32 [B, h_kv, Q, n]; -1 where a chunk may not be selected. Q is as in `finalists`."""
        return landmark_scores(Query(step.q_post, step.valid, self.scoring(spec)), self.marks(spec, state, step))

    def marks(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Marks, ...]:
        """Return the chunks from which queries select, as `selection` reads them."""
        return (prompt_marks(state.frozen),)

    def rebuild(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Rebuild:
        """Return the key code of all chunks that may be selected."""
        code, split = (state.frozen.left, state.frozen.right), self.key_parts(spec)
        return Rebuild(*code, step.inverse, codec=self.codec, unit=self.chunk_size, split=split)

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        queries = selection.ids.shape[2] // self.selected(spec)
        return state.replace(live=received(state.live, selection, fetched, queries))

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        pieces = self.exact_pieces(spec, state, step)
        if fetched is not None:
            piece, state = self.selected_piece(spec, state, step, fetched)
            pieces.append(piece)
        return attend(step.q_post, pieces, spec.scale, step.sinks), state

    @property
    def splits_turns(self) -> bool:
        """Whether each query selects its own chunks."""
        return self.quirks.turn_selection == "each"

    def selected_piece(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched
    ) -> tuple[Piece, LayerState]:
        if state.frozen.preload is not None:
            fetched = fetched.listed(spec.head_dim)
            k, fresh = exact_keys(state.frozen.preload, state.live.fresh, fetched, step.valid)
            state, fetched = state.replace(live=state.live.replace(fresh=fresh)), fetched.replace(k=k)
        queries = 1 if self.scoring(spec).shared else step.valid.shape[1]
        return own_piece(fetched, queries, spec.head_dim), state

    def exact_pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        frozen, window = state.frozen, state.live.window
        first = frozen.chunks[:, None] * self.chunk_size
        seen = step.positions - first + 1
        pieces = [Piece(window.k, window.v, seen[:, None, :, None])]
        slots = frozen.outliers.k.shape[2]
        if slots:
            used = self.row_outliers(frozen.chunks) * self.chunk_size
            pieces.append(Piece(frozen.outliers.k, frozen.outliers.v, used[:, None, None, None]))
        return pieces

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        assert self.budget is not None
        chunks = state.frozen.chunks
        outliers = self.row_outliers(chunks)
        parts = {
            "selected": jnp.minimum(self.budget // self.chunk_size, chunks - outliers) * self.chunk_size,
            "outliers": outliers * self.chunk_size,
            "window": lengths - chunks * self.chunk_size,
        }
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}


def prompt_marks(frozen: ShadowFrozen) -> Marks:
    """Return the prompt's chunks, as `selection` reads them."""
    return Marks(frozen.landmarks, frozen.spread, frozen.candidates[:, :, None])
