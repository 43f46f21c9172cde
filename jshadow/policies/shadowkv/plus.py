"""ShadowKV+: generated tokens can also be selected (Sun et al. 2024, arXiv 2410.21465, section 7.1; no published code).

The paper projects new keys onto the prompt's right factor, and leaves the rest open. A component of a new key that lies
outside the prompt's basis is lost then, so the result drifts from full attention as the output grows. By default, new
keys have a code of their own instead (`later_keys`). This implementation does this:

- A ring buffer of fixed size holds the newest tokens exactly.
- When a chunk has left the window of every query, it joins the chunks that can be selected. Its landmark is added to
  the landmarks, and its values are written to the host. Its keys are rebuilt from left rows, which are computed when
  the tokens arrive (`later_keys.py`).
- A chunk stays exact if its landmark represents it worse than the best represented outlier of the prompt, and if a slot
  is free.
- With outlier_rule="both", a chunk also stays exact if its coding error exceeds that of every rebuilt chunk of the
  prompt. If no chunk of the prompt is rebuilt, every chunk does.
"""

import dataclasses
import math
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import HostWrite, KeyValues, LayerState, PromptKV, Rebuild, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece
from jshadow.ops.layout import ring_positions, take_span, write_rows
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.registry import register
from jshadow.policies.shadowkv.key_codecs import KeyCodec, Sizes, TokenCodec, by_token
from jshadow.policies.shadowkv.landmarks import (
    Marks,
    chunk_landmarks,
    chunk_spread,
    stored_landmarks,
    stored_spread,
    write_marks,
)
from jshadow.policies.shadowkv.policy import ShadowKV
from jshadow.policies.shadowkv.selection import keep_exact, least_cosine, loses_more, most_lost, without_later
from jshadow.policies.shadowkv.settings import FromValues
from jshadow.policies.shadowkv.state import PlusFrozen, PlusLive, ShadowFrozen, fields_of

_LATER_BITS = {"int6": 6, "int4": 4}
_LATER_KEYS = (*_LATER_BITS, "projected")
_MOST_TOKENS = 64  # limit on extend_piece: the ring holds a piece beside the window, and each chunk of it is one write


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
    lossless=lambda tokens, config: {
        "rank": config.key_columns,
        "budget": max(tokens, ShadowKV.chunk_size),
        "later_keys": "projected",
    },
)
@dataclasses.dataclass(frozen=True)
class ShadowKVPlus(ShadowKV):
    """ShadowKV in which the tokens of long outputs and of further turns are also selected and offloaded.

    The other settings are those of `ShadowSettings`. Later chunks are those that come after the prompt's.

    Attributes:
        extra_outlier_chunks: slots of each KV head for later chunks that stay exact.
        later_keys: how the keys of later chunks are stored. "int6" or "int4": 6 or 4 bits for each number, and a scale
            for each token and head, whatever `keys` is. "projected": in the code of the prompt (the paper).
    """

    extra_outlier_chunks: int = 16
    later_keys: str = "int6"

    name = "shadowkv_plus"
    source = "arXiv 2410.21465, section 7.1"
    size_free: ClassVar[tuple[str, ...]] = (*ShadowKV.size_free, "later_keys")

    @classmethod
    def paper(cls) -> Self:
        return dataclasses.replace(super().paper(), later_keys="projected")

    @classmethod
    def packed(cls, *, small: bool = False) -> Self:
        """Return `ShadowKV.packed`, but with a landmark for every four tokens instead of two (not with `small`).

        So a later token takes less than a quarter of its device bytes in full attention, landmark included.
        """
        settings = super().packed(small=small)
        if small:
            return settings
        return dataclasses.replace(settings, landmarks=dataclasses.replace(settings.landmarks, tokens=4))

    @classmethod
    def reference(cls) -> Self:
        """Return the settings of `ShadowKV.reference`, with the keys of later chunks in the prompt's basis.

        Each query selects its own chunks, because it has its own window.
        """
        published = super().reference()
        quirks = dataclasses.replace(published.quirks, turn_selection="each")
        return dataclasses.replace(published, quirks=quirks, extend_piece=cls.extend_piece, later_keys="projected")

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        return dataclasses.replace(super().lossless(num_tokens, config), later_keys="projected")

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "extend_piece", self.extend_piece, 1, _MOST_TOKENS)
        check_range(self.name, "extra_outlier_chunks", self.extra_outlier_chunks, 0)
        check_choice(self.name, "later_keys", self.later_keys, _LATER_KEYS)
        multiple = 8 // math.gcd(8, _LATER_BITS.get(self.later_keys, 8))  # so many numbers fill whole bytes
        if config.head_dim % multiple:
            needs = f"a head_dim that is a multiple of {multiple}"
            raise ConfigError(f"{self.name}.later_keys={self.later_keys!r} must have {needs}, got {config.head_dim}")
        if isinstance(self.keys, FromValues):
            raise ConfigError(f"{self.name}.keys must not be 'from_values': later chunks have keys of their own")
        resolved = super().resolve(config, capacity)
        if self.quirks.turn_selection == "shared":
            raise ConfigError(
                f"{self.name}.quirks.turn_selection must be 'each', since each query has its own window, got 'shared'"
            )
        return resolved

    @property
    def later_codec(self) -> KeyCodec:
        return self.codec if self.later_keys == "projected" else TokenCodec(_LATER_BITS[self.later_keys])

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
        most = self.max_chunks(spec.capacity) + self.later_chunks(spec)
        return min(self.max_selected(spec.capacity), most)

    def later_chunks(self, spec: CacheSpec) -> int:
        """Return the number of later chunks m for which there is space."""
        return -(-spec.window // self.chunk_size)

    def left_behind(self, frozen: ShadowFrozen, positions: Array) -> Array:
        """Return how many later chunks have left the window of the query at each position, int32 [B, T]."""
        chunks = positions // self.chunk_size + 1 - self.window_chunks
        return jnp.maximum(chunks - frozen.chunks[:, None], 0)

    def host_layout(self, spec: CacheSpec) -> HostLayout:
        layout = super().host_layout(spec)
        no_kernel = layout.no_kernel or ("" if self.later_codec.compiled else f"later_keys={self.later_keys!r}")
        return dataclasses.replace(layout, tail_units=self.later_chunks(spec), no_kernel=no_kernel)

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        state = super().init(spec, fitted)
        heads, chunks, extra = spec.kv_heads, self.later_chunks(spec), self.extra_outlier_chunks

        def zeros(*shape: int, dtype: Any = spec.dtype) -> Array:
            return jnp.zeros((spec.batch, *shape), dtype)

        ring, slots = zeros(heads, self.ring_slots, spec.head_dim), zeros(heads, extra * self.chunk_size, spec.head_dim)
        landmarks, spread = self.empty_marks(spec, chunks)
        code = self.later_codec.empty(spec.batch, chunks, self.chunk_size, Sizes.of(spec))
        live = PlusLive(
            **fields_of(state.live.replace(window=KeyValues(ring, ring))),
            left=code.left,
            landmarks=landmarks,
            kept=zeros(heads, chunks, dtype=bool),
            extra=KeyValues(slots, slots),
            extra_ids=zeros(heads, extra, dtype=jnp.int32) - 1,
            spread=spread,
        )
        cut = zeros(heads, dtype=jnp.float32)
        most = cut if self.choice.outlier_rule != "landmark" else None
        weights = None if self.keys.weights == "none" else zeros(heads, spec.head_dim, dtype=jnp.float32)
        shared = None if self.later_keys == "projected" else code.right
        frozen = PlusFrozen(**fields_of(state.frozen), cut=cut, most=most, key_weights=weights, later=shared)
        return LayerState(frozen, live)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Compress as ShadowKV. Store the prompt's last tokens in the ring, and their left rows with later chunks."""
        compressed, write, lost = self.compressed(spec, state, prompt)
        most = None
        if self.choice.outlier_rule != "landmark":
            most = most_lost(compressed.frozen.candidates, lost if self.reads_losses else None)
        frozen = PlusFrozen(
            **fields_of(compressed.frozen),
            cut=self._landmark_cut(spec, compressed.frozen),
            most=most,
            key_weights=self.key_weights(spec, prompt),
            later=self._shared_part(prompt),
        )
        held = ring_positions(prompt.lengths, self.ring_slots)
        index = jnp.maximum(held, 0)[:, :, None, None]
        ring = (
            jnp.take_along_axis(x, index, axis=1, mode="clip").transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v)
        )
        left = self._window_rows(spec, frozen, prompt, state.live.left)
        live = state.live.replace(window=KeyValues(*ring), fresh=compressed.live.fresh, left=left)
        return compressed.replace(frozen=frozen, live=live), write

    def _landmark_cut(self, spec: CacheSpec, frozen: ShadowFrozen) -> Array:
        """Return the limit `PlusFrozen.cut`, float32 [B, h_kv]; see `least_cosine`."""
        slots = frozen.outliers.k.shape[2] // self.chunk_size
        by_landmark = jnp.minimum(self.landmark_outliers(spec.capacity), self.row_outliers(frozen.chunks))
        used = jnp.arange(slots) < by_landmark[:, None, None]
        return least_cosine(frozen.outliers, used, self.chunk_size, self.landmark_parts)

    def _shared_part(self, prompt: PromptKV) -> Any:
        """Return what `PlusFrozen.later` holds for a prompt."""
        if self.later_keys == "projected":
            return None
        return self.later_codec.encode(prompt.k_pre, prompt.lengths, 0, self.chunk_size).right

    def _left_rows(self, spec: CacheSpec, frozen: PlusFrozen, k_pre: Array) -> Array:
        """Return the left rows [B, T, 1 or h_kv, w] of keys before RoPE [B, T, h_kv, d]."""
        right = frozen.right if frozen.later is None else frozen.later
        return self.later_codec.project(k_pre, right, frozen.key_weights, spec.heads_axis)

    def _window_rows(self, spec: CacheSpec, frozen: PlusFrozen, prompt: PromptKV, left: Array) -> Array:
        """Return `left` with the rows of the prompt's tokens that are in no chunk of the prompt."""
        size = self.chunk_size
        span = min(self.window_chunks, self.later_chunks(spec)) * size
        rest = take_span(prompt.k_pre, frozen.chunks * size, span).transpose(0, 2, 1, 3)
        real = frozen.chunks[:, None] * size + jnp.arange(span) < prompt.lengths[:, None]
        rows = jnp.where(real[..., None, None], self._left_rows(spec, frozen, rest), 0).swapaxes(1, 2)
        return by_token(left, size).at[:, :, :span].set(rows).reshape(left.shape)

    @property
    def reads_losses(self) -> bool:
        """Whether the coding errors of the prompt's chunks decide which later chunks stay exact."""
        assert self.outlier_chunks is not None
        return self.choice.outlier_rule != "landmark" and self.outlier_chunks >= 2

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
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
        return state.replace(live=without_later(state.live, behind, self.max_chunks(spec.capacity)))

    # One step

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Store the new tokens in the ring, and their left rows. Then add the chunks that have left the window."""
        live: PlusLive = state.live
        slots = step.positions % self.ring_slots
        window = live.window.written(step.k_post, step.v, slots, step.valid)
        places = step.positions - state.frozen.chunks[:, None] * self.chunk_size
        rows = self._left_rows(spec, state.frozen, step.k_pre)
        left = write_rows(by_token(live.left, self.chunk_size), rows, places, step.valid).reshape(live.left.shape)
        live = live.replace(window=window, left=left)
        return self.join(spec, state.replace(live=live), step)

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
            ids, rebuild = jnp.broadcast_to(number[:, None], bad.shape), self.rebuild(spec, state, step)
            own = rebuild.later
            keys = rebuild.keys(ids + self.max_chunks(spec.capacity)) if own is None else own.keys(ids)
            bad |= loses_more(keys.reshape(k.shape), k, state.frozen.key_weights, state.frozen.most)
        live = keep_exact(live.replace(landmarks=landmarks, spread=spread), number, bad & leaves[:, None], k, v)
        return state.replace(live=live), HostWrite(self.host_rows(spec, v), number, leaves)

    def marks(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Marks, ...]:
        live: PlusLive = state.live
        behind = self.left_behind(state.frozen, step.positions)[:, None, :, None]
        is_open = (jnp.arange(live.kept.shape[2]) < behind) & ~live.kept[:, :, None]
        return *super().marks(spec, state, step), Marks(live.landmarks, live.spread, is_open)

    def rebuild(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Rebuild:
        prompt, frozen, left = super().rebuild(spec, state, step), state.frozen, state.live.left
        if frozen.later is None:
            return prompt.replace(tail=left, tail_unit=frozen.chunks)
        codec, size = self.later_codec, self.chunk_size
        none = codec.empty(spec.batch, 0, size, Sizes.of(spec)).left
        later = Rebuild(none, frozen.later, prompt.inverse, left, frozen.chunks, codec=codec, unit=size)
        return prompt.replace(later=later)

    def exact_pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        """Return each query's window, the outliers, and the exact later chunks that have left its window."""
        live: PlusLive = state.live
        behind = self.left_behind(state.frozen, step.positions)[..., None]
        first = (state.frozen.chunks[:, None, None] + behind) * self.chunk_size
        held = ring_positions(step.lengths + step.valid.sum(axis=1, dtype=jnp.int32), self.ring_slots)[:, None]
        seen = (held >= first) & (held <= step.positions[..., None])
        pieces = [Piece(live.window.k, live.window.v, seen[:, None]), *super().exact_pieces(spec, state, step)[1:]]
        if self.extra_outlier_chunks:
            ids = live.extra_ids[:, :, None]
            used = jnp.repeat((ids >= 0) & (ids < behind[:, None]), self.chunk_size, axis=3)
            pieces.append(Piece(live.extra.k, live.extra.v, used))
        return pieces

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
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
