"""ShadowKV+: generated tokens can also be selected (Sun et al. 2024, arXiv 2410.21465, section 7.1; no published code).

The paper projects new keys onto the prompt's right factor, and leaves the rest open. This implementation does this:

- A ring buffer of fixed size holds the newest tokens exactly.
- When a chunk has left the window of every query, it joins the chunks that can be selected. Its landmark is added to
  the landmarks, and its values are written to the host. Its keys are rebuilt from left rows, which are computed when
  the tokens arrive.
- A chunk stays exact if its landmark represents it worse than the best represented outlier of the prompt, and if a slot
  is free.
- With outlier_rule="both", a chunk also stays exact if its coding error exceeds that of every rebuilt chunk of the
  prompt. If no chunk of the prompt is rebuilt, every chunk does.

A component of a new key that lies outside the prompt's basis is lost. So the code of a short prompt represents later
tokens badly.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import HostWrite, KeyValues, LayerState, PromptKV, Rebuild, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece
from jshadow.ops.layout import ring_positions, take_span, write_rows
from jshadow.policies.checks import check_range
from jshadow.policies.parts import each_of, heads_axis, on_first
from jshadow.policies.registry import register
from jshadow.policies.shadowkv.costs import sizes_of
from jshadow.policies.shadowkv.key_codecs import by_token
from jshadow.policies.shadowkv.landmark_levels import Marks, stored_landmarks, stored_spread, write_marks
from jshadow.policies.shadowkv.landmarks import chunk_landmarks, chunk_spread
from jshadow.policies.shadowkv.outliers import keep_exact, loses_more, most_lost, without_later
from jshadow.policies.shadowkv.policy import ShadowKV
from jshadow.policies.shadowkv.prompt_code import key_weights, landmark_cut
from jshadow.policies.shadowkv.records import weights_of
from jshadow.policies.shadowkv.state import PlusFrozen, PlusLive, ShadowFrozen, fields_of

MOST_TOKENS = 64  # limit on extend_piece: the ring holds a piece beside the window, and each chunk of it is one write


@register(
    small={
        "rank": 12,
        "budget": 16,
        "chunk_size": 4,
        "outlier_chunks": 2,
        "local_chunks": 1,
        "extra_outlier_chunks": 2,
        "extend_piece": 6,
    },
    lossless=lambda tokens, config: {"rank": config.key_columns, "budget": max(tokens, ShadowKV.chunk_size)},
)
@dataclasses.dataclass(frozen=True)
class ShadowKVPlus(ShadowKV):
    """ShadowKV in which the tokens of long outputs and of further turns are also selected and offloaded.

    Attributes:
        extra_outlier_chunks: slots of each KV head for later chunks (those after the prompt's) that stay exact.
    """

    extra_outlier_chunks: int = 16

    name = "shadowkv_plus"
    source = "arXiv 2410.21465, section 7.1"

    @classmethod
    def reference(cls) -> "ShadowKVPlus":
        """Return `ShadowKV.reference`, except that each query selects its own chunks, because it has its own window."""
        published = super().reference()
        quirks = dataclasses.replace(published.quirks, turn_selection="each")
        return dataclasses.replace(published, quirks=quirks, extend_piece=cls.extend_piece)

    def resolve(self, config: ModelConfig, capacity: int) -> "ShadowKVPlus":
        """Check the settings of ShadowKV and those that ShadowKV+ adds or limits."""
        check_range(self.name, "extend_piece", self.extend_piece, 1, MOST_TOKENS)
        check_range(self.name, "extra_outlier_chunks", self.extra_outlier_chunks, 0)
        resolved = super().resolve(config, capacity)
        if self.quirks.turn_selection == "shared":
            raise ConfigError(
                f"{self.name}.quirks.turn_selection must be 'each', since each query has its own window, got 'shared'"
            )
        return resolved

    # Counts

    @property
    def window_chunks(self) -> int:
        """Maximum number of chunks in a query's window, its own chunk included."""
        return max(2, self.local_chunks + self.quirks.chunk_multiple)

    @property
    def ring_slots(self) -> int:
        """Number of slots R of the ring: a window and a piece, so that a piece's first query has its whole window."""
        return (self.window_chunks - -self.extend_piece // self.chunk_size) * self.chunk_size

    def max_selected(self, capacity: int) -> int:
        """Return the number of chunks k that a query selects.

        The outliers are not subtracted, because later chunks can also be selected.
        """
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity))

    def selected(self, spec: CacheSpec) -> int:
        """Return the number of chunks that a query can select on a device, later chunks included."""
        most = self.stored_chunks(spec) + self.later_chunks(spec)
        return each_of(spec, min(self.max_selected(spec.capacity), most))

    def later_chunks(self, spec: CacheSpec) -> int:
        """Return the number of later chunks m for which there is space."""
        return -(-spec.window // self.chunk_size)

    def left_behind(self, frozen: ShadowFrozen, positions: Array) -> Array:
        """Return how many later chunks have left the window of the query at each position, int32 [B, T]."""
        chunks = positions // self.chunk_size + 1 - self.window_chunks
        return jnp.maximum(chunks - frozen.chunks[:, None], 0)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Return the layout of the values of the prompt's chunks, with a tail for later chunks."""
        layout = super().host_layout(spec)
        assert layout is not None
        return dataclasses.replace(layout, tail_units=self.later_chunks(spec))

    @property
    def splits_turns(self) -> bool:
        """False: the window of a later query does not have all tokens of an earlier query's window."""
        return False

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Return a state of zeros, without chunks and with an empty ring."""
        state = super().init(spec, fitted)
        heads, later, extra = spec.kv_heads, self.later_chunks(spec), self.extra_outlier_chunks

        def zeros(*shape: int, dtype: Any = spec.dtype) -> Array:
            return jnp.zeros((spec.batch, *shape), dtype)

        ring, slots = zeros(heads, self.ring_slots, spec.head_dim), zeros(heads, extra * self.chunk_size, spec.head_dim)
        landmarks, spread = self.empty_marks(spec, later)
        live = PlusLive(
            **fields_of(state.live.replace(window=KeyValues(ring, ring))),
            left=self.codec.empty(spec.batch, later, self.chunk_size, sizes_of(spec)).left,
            landmarks=landmarks,
            kept=zeros(heads, later, dtype=bool),
            extra=KeyValues(slots, slots),
            extra_ids=zeros(heads, extra, dtype=jnp.int32) - 1,
            spread=spread,
        )
        cut = zeros(heads, dtype=jnp.float32)
        most = cut if self.choice.outlier_rule != "landmark" else None
        weights = None if weights_of(self.keys) == "none" else zeros(heads, spec.head_dim, dtype=jnp.float32)
        frozen = PlusFrozen(**fields_of(state.frozen), cut=cut, most=most, key_weights=weights)
        return LayerState(frozen, live)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Compress as ShadowKV. Store the prompt's last tokens in the ring, and their left rows with later chunks."""
        compressed, write, lost = self.compressed(spec, state, prompt)
        frozen: ShadowFrozen = compressed.frozen
        weights = key_weights(self, spec, prompt)
        cut = landmark_cut(self, spec, frozen)
        held = ring_positions(prompt.lengths, self.ring_slots)
        index = jnp.maximum(held, 0)[:, :, None, None]
        ring = (
            jnp.take_along_axis(x, index, axis=1, mode="clip").transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v)
        )
        span = min(self.window_chunks * self.chunk_size, self.later_chunks(spec) * self.chunk_size)
        rest = take_span(prompt.k_pre, frozen.chunks * self.chunk_size, span).transpose(0, 2, 1, 3)
        real = frozen.chunks[:, None] * self.chunk_size + jnp.arange(span) < prompt.lengths[:, None]
        rows = self.codec.project(rest, frozen.right, weights, heads_axis(spec))
        rows = jnp.where(real[..., None, None], rows, 0).swapaxes(1, 2)
        left = by_token(state.live.left, self.chunk_size).at[:, :, :span].set(rows)
        live = state.live.replace(
            window=KeyValues(*ring), fresh=compressed.live.fresh, left=left.reshape(state.live.left.shape)
        )
        most = None
        if self.choice.outlier_rule != "landmark":
            most = most_lost(spec, frozen.candidates, lost if self.reads_losses else None)
        frozen = PlusFrozen(**fields_of(frozen), cut=cut, most=most, key_weights=weights)
        return compressed.replace(frozen=frozen, live=live), write

    @property
    def reads_losses(self) -> bool:
        """Whether the coding errors of the prompt's chunks decide which later chunks stay exact."""
        assert self.outlier_chunks is not None
        return self.choice.outlier_rule != "landmark" and self.outlier_chunks >= 2

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Return how many more tokens fit into both the capacity and the space for later chunks."""
        segment = self.later_chunks(spec) * self.chunk_size
        return jnp.minimum(segment - (lengths - state.frozen.chunks * self.chunk_size), spec.capacity - lengths)

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return the length at which the ring still has the next query's window, as in `ShadowKV.earliest`."""
        first = super().earliest(spec, state, reached)
        kept = reached - (self.ring_slots - self.window_chunks * self.chunk_size)
        return None if first is None else jnp.maximum(jnp.where(reached <= self.ring_slots, 0, kept), first)

    def rewound(self, spec: CacheSpec, state: LayerState, lengths: Array) -> LayerState:
        """Take the chunks that are in the window again out of the exact slots and the cache."""
        behind = self.left_behind(state.frozen, lengths[:, None] - 1)[..., None]
        return state.replace(live=without_later(state.live, behind, self.stored_chunks(spec)))

    # One step

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Store the new tokens in the ring, and their left rows. Then add the chunks that have left the window."""
        live: PlusLive = state.live
        slots = step.positions % self.ring_slots
        k = write_rows(live.window.k, step.k_post, slots, step.valid)
        v = write_rows(live.window.v, step.v, slots, step.valid)
        live = live.replace(window=KeyValues(k, v), left=self.write_left(spec, state, step))
        return self.join(spec, state.replace(live=live), step)

    def write_left(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """Return the left rows of later chunks, with those of the new tokens."""
        left = state.live.left
        places = step.positions - state.frozen.chunks[:, None] * self.chunk_size
        rows = self.codec.project(step.k_pre, state.frozen.right, state.frozen.key_weights, heads_axis(spec))
        return write_rows(by_token(left, self.chunk_size), rows, places, step.valid).reshape(left.shape)

    def join(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Add the chunks that left the window in this step: landmarks, values on the host, and exact copies."""
        live: PlusLive = state.live
        batch, count = step.valid.shape
        most, size = -(-count // self.chunk_size), self.chunk_size
        new = step.valid.sum(axis=1, dtype=jnp.int32)
        before = self.left_behind(state.frozen, (step.lengths - 1)[:, None])
        after = self.left_behind(state.frozen, (step.lengths + new - 1)[:, None])
        number = before + jnp.arange(most)  # indices of later chunks [B, most]
        leaves = number < after
        tokens = ((state.frozen.chunks[:, None] + number)[..., None] * size + jnp.arange(size)).reshape(batch, -1)
        places = (tokens % self.ring_slots)[:, None, :, None]
        shape = (batch, spec.kv_heads, most, size, spec.head_dim)
        k, v = (jnp.take_along_axis(x, places, axis=2).reshape(shape) for x in (live.window.k, live.window.v))
        parts = self.landmark_parts
        mean, worst = chunk_landmarks(k, parts)
        landmarks = stored_landmarks(mean, self.landmarks, parts, spec.dtype)
        spread = stored_spread(lambda parts: chunk_spread(k, parts), self.landmarks, parts, spec.dtype)
        landmarks = write_marks(live.landmarks, landmarks, self.read_parts, number, leaves)
        spread = write_marks(live.spread, spread, self.read_parts, number, leaves)
        bad = worst < state.frozen.cut[..., None]
        if state.frozen.most is not None:
            ids = jnp.broadcast_to(self.stored_chunks(spec) + number[:, None], bad.shape)
            keys = self.rebuild(spec, state, step).keys(ids).reshape(k.shape)
            bad |= loses_more(keys, k, state.frozen.key_weights, state.frozen.most)
        live = keep_exact(live.replace(landmarks=landmarks, spread=spread), number, bad & leaves[:, None], k, v)
        return state.replace(live=live), HostWrite(self.host_rows(spec, v), number, leaves)

    def marks(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Marks, ...]:
        """Return the prompt's chunks, and the later chunks that have left each query's window."""
        live: PlusLive = state.live
        behind = self.left_behind(state.frozen, step.positions)[:, None, :, None]
        is_open = (jnp.arange(live.kept.shape[2]) < behind) & ~live.kept[:, :, None]
        return *super().marks(spec, state, step), Marks(live.landmarks, live.spread, on_first(spec, is_open))

    def rebuild(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Rebuild:
        """Return the key code of the prompt's chunks and of later chunks."""
        prompt = super().rebuild(spec, state, step)
        return prompt.replace(tail=state.live.left, tail_unit=state.frozen.chunks)

    def exact_pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        """Return each query's window, the outliers, and the exact later chunks that have left its window."""
        live: PlusLive = state.live
        behind = self.left_behind(state.frozen, step.positions)[..., None]
        first = (state.frozen.chunks[:, None, None] + behind) * self.chunk_size
        held = ring_positions(step.lengths + step.valid.sum(axis=1, dtype=jnp.int32), self.ring_slots)[:, None]
        seen = (held >= first) & (held <= step.positions[..., None])
        seen = on_first(spec, seen)
        pieces = [Piece(live.window.k, live.window.v, seen[:, None]), *super().exact_pieces(spec, state, step)[1:]]
        if self.extra_outlier_chunks:
            ids = live.extra_ids[:, :, None]
            used = jnp.repeat((ids >= 0) & (ids < behind[:, None]), self.chunk_size, axis=3)
            pieces.append(Piece(live.extra.k, live.extra.v, on_first(spec, used)))
        return pieces

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Count the tokens of the selected chunks, of the outliers, of the exact later chunks and of the window."""
        assert self.budget is not None
        frozen, ids = state.frozen, state.live.extra_ids
        behind = self.left_behind(frozen, lengths[:, None] - 1)
        outliers = self.row_outliers(frozen.chunks)
        extra = ((ids >= 0) & (ids < behind[..., None])).sum(axis=2)
        chunks = frozen.chunks + behind[:, 0]
        selected = jnp.minimum(self.budget // self.chunk_size, (chunks - outliers)[:, None] - extra)
        size = float(self.chunk_size)
        return {
            "selected": selected.mean(axis=1, dtype=jnp.float32) * size,
            "outliers": outliers * size,
            "extra_outliers": extra.mean(axis=1, dtype=jnp.float32) * size,
            "window": (lengths - chunks * self.chunk_size).astype(jnp.float32),
        }
