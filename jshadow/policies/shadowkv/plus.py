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
from typing import Any

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import HostWrite, KeyValues, LayerState, PromptKV, Rebuild, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import Piece
from jshadow.ops.layout import ring_positions, write_rows
from jshadow.policies.registry import register
from jshadow.policies.shadowkv import later_keys as later
from jshadow.policies.shadowkv.landmarks import (
    Marks,
    chunk_landmarks,
    chunk_spread,
    stored_landmarks,
    stored_spread,
    write_marks,
)
from jshadow.policies.shadowkv.plus_settings import PlusSettings
from jshadow.policies.shadowkv.policy import ShadowKV
from jshadow.policies.shadowkv.prompt_code import key_weights, landmark_cut
from jshadow.policies.shadowkv.selection import keep_exact, loses_more, most_lost, without_later
from jshadow.policies.shadowkv.state import PlusFrozen, PlusLive, fields_of


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
class ShadowKVPlus(PlusSettings):
    """ShadowKV in which the tokens of long outputs and of further turns are also selected and offloaded.

    The settings are those of `PlusSettings`.
    """

    @property
    def splits_turns(self) -> bool:
        """False: the window of a later query does not have all tokens of an earlier query's window."""
        return False

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Return a state of zeros, without chunks and with an empty ring."""
        state = super().init(spec, fitted)
        heads, chunks, extra = spec.kv_heads, self.later_chunks(spec), self.extra_outlier_chunks

        def zeros(*shape: int, dtype: Any = spec.dtype) -> Array:
            return jnp.zeros((spec.batch, *shape), dtype)

        ring, slots = zeros(heads, self.ring_slots, spec.head_dim), zeros(heads, extra * self.chunk_size, spec.head_dim)
        landmarks, spread = self.empty_marks(spec, chunks)
        left, shared = later.empty_rows(self, spec)
        live = PlusLive(
            **fields_of(state.live.replace(window=KeyValues(ring, ring))),
            left=left,
            landmarks=landmarks,
            kept=zeros(heads, chunks, dtype=bool),
            extra=KeyValues(slots, slots),
            extra_ids=zeros(heads, extra, dtype=jnp.int32) - 1,
            spread=spread,
        )
        cut = zeros(heads, dtype=jnp.float32)
        most = cut if self.choice.outlier_rule != "landmark" else None
        weights = None if self.keys.weights == "none" else zeros(heads, spec.head_dim, dtype=jnp.float32)
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
            cut=landmark_cut(self, spec, compressed.frozen),
            most=most,
            key_weights=key_weights(self, spec, prompt),
            later=later.shared_part(self, prompt),
        )
        held = ring_positions(prompt.lengths, self.ring_slots)
        index = jnp.maximum(held, 0)[:, :, None, None]
        ring = (
            jnp.take_along_axis(x, index, axis=1, mode="clip").transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v)
        )
        left = later.window_rows(self, spec, frozen, prompt, state.live.left)
        live = state.live.replace(window=KeyValues(*ring), fresh=compressed.live.fresh, left=left)
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
        return state.replace(live=without_later(state.live, behind, self.max_chunks(spec.capacity)))

    # One step

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Store the new tokens in the ring, and their left rows. Then add the chunks that have left the window."""
        live: PlusLive = state.live
        slots = step.positions % self.ring_slots
        k = write_rows(live.window.k, step.k_post, slots, step.valid)
        v = write_rows(live.window.v, step.v, slots, step.valid)
        left = later.with_new_rows(self, spec, state.frozen, step, live.left)
        live = live.replace(window=KeyValues(k, v), left=left)
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
        """Return the prompt's chunks, and the later chunks that have left each query's window."""
        live: PlusLive = state.live
        behind = self.left_behind(state.frozen, step.positions)[:, None, :, None]
        is_open = (jnp.arange(live.kept.shape[2]) < behind) & ~live.kept[:, :, None]
        return *super().marks(spec, state, step), Marks(live.landmarks, live.spread, is_open)

    def rebuild(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Rebuild:
        """Return the key code of the prompt's chunks and of later chunks."""
        return later.with_later(self, spec, super().rebuild(spec, state, step), state.frozen, state.live.left)

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
