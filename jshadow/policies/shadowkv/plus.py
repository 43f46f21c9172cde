"""ShadowKV+: generated tokens join what may be selected (Sun et al. 2024, arXiv 2410.21465, section 7.1; no code).

The paper projects new keys onto the prompt's right factor. What it leaves open is decided so: a bounded ring keeps the
newest tokens exact. When a chunk has left every query's window, its landmark joins the landmarks, its values follow
the prompt's to the host, and its keys are rebuilt from left rows that were projected when the tokens came. A chunk
that its landmark represents worse than any outlier kept at prefill stays exact, in a bounded number of slots; with
outlier_rule="both" also one of which the prompt's code loses more than of any chunk of the prompt that is rebuilt;
where none is, any. What the prompt has no direction for is lost: the code of a prompt of few tokens knows little of
later ones. `plus_mode="project_only"` is the paper's table instead: every new key is attended through its projection.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import HostWrite, KeyValues, LayerState, PromptKV, Rebuild, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece
from jshadow.ops.layout import take_span, write_rows
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.registry import register
from jshadow.policies.shadowkv.costs import sizes_of
from jshadow.policies.shadowkv.key_codecs import KeyCode, Sizes, by_token, squared_error
from jshadow.policies.shadowkv.landmarks import chunk_landmarks, chunk_spread
from jshadow.policies.shadowkv.policy import ShadowKV
from jshadow.policies.shadowkv.projected import ShadowKVProjected
from jshadow.policies.shadowkv.state import PlusFrozen, PlusLive, ShadowFrozen, fields_of

MOST_TOKENS = 64  # of a piece of a turn: the ring holds them beside the window, and each chunk is a write of its own


@register(
    small={
        "rank": 12,
        "budget": 16,
        "chunk_size": 4,
        "outlier_chunks": 2,
        "local_chunks": 1,
        "extra_outlier_chunks": 2,
    },
    lossless=lambda tokens, config: {"rank": config.key_columns, "budget": max(tokens, 8)},
)
@dataclasses.dataclass(frozen=True)
class ShadowKVPlus(ShadowKV):
    """ShadowKV in which the tokens of long outputs and further turns are selected and offloaded too.

    Attributes:
        plus_mode: "join": chunks that leave the window join what is selected; "project_only": every new key is
            projected and attended, values stay on the device.
        extra_outlier_chunks: later chunks a KV head that may be kept exactly.
    """

    plus_mode: str = "join"
    extra_outlier_chunks: int = 16

    name = "shadowkv_plus"
    source = "arXiv 2410.21465, section 7.1"

    @classmethod
    def reference(cls) -> "ShadowKVPlus":
        """The published choices but for the shared selection: it has no ShadowKV+, whose queries have own windows."""
        return dataclasses.replace(super().reference(), turn_selection="each", extend_piece=cls.extend_piece)

    def resolve(self, config: ModelConfig, capacity: int) -> "ShadowKVPlus":
        """Also check the two settings."""
        check_range(self.name, "extend_piece", self.extend_piece, 1, MOST_TOKENS)
        check_choice(self.name, "plus_mode", self.plus_mode, ("join", "project_only"))
        check_range(self.name, "extra_outlier_chunks", self.extra_outlier_chunks, 0)
        if self.turn_selection == "shared":
            raise ConfigError("shadowkv_plus.turn_selection must be 'each', for each query has its own window")
        return super().resolve(config, capacity)

    def for_layer(self, layer: int, config: ModelConfig) -> ShadowKV:
        """The layers' own form of the mode."""
        if self.plus_mode == "join":
            return self
        return ShadowKVProjected(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ShadowKV)})

    # Counts

    @property
    def window_chunks(self) -> int:
        """Chunks that a query's window holds at most, its own included."""
        return max(2, self.local_chunks + self.chunk_multiple)

    @property
    def ring_slots(self) -> int:
        """Slots of the ring: a window, and a piece of a turn more, for its first query still needs its own window."""
        return (self.window_chunks - -self.extend_piece // self.chunk_size) * self.chunk_size

    def max_selected(self, capacity: int) -> int:
        """Later chunks are candidates too, also of a row whose prompt had none."""
        assert self.budget is not None
        return min(self.budget // self.chunk_size, self.max_chunks(capacity))

    def later_chunks(self, spec: CacheSpec) -> int:
        """Chunks after the prompt's that the live segment holds."""
        return -(-spec.window // self.chunk_size)

    def left_behind(self, frozen: ShadowFrozen, positions: Array) -> Array:
        """Later chunks that have left the window of queries at positions [B, T], int32 [B, T]."""
        chunks = positions // self.chunk_size + 1 - self.window_chunks
        return jnp.maximum(chunks - frozen.chunks[:, None], 0)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """The prompt's chunks, and room for the later ones."""
        layout = super().host_layout(spec)
        assert layout is not None
        return dataclasses.replace(layout, tail_units=self.later_chunks(spec))

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Zeros: no chunk, an empty ring."""
        state = super().init(spec, fitted)
        heads, later, extra = spec.kv_heads, self.later_chunks(spec), self.extra_outlier_chunks

        def zeros(*shape: int, dtype: Any = spec.dtype) -> Array:
            return jnp.zeros((spec.batch, *shape), dtype)

        ring, slots = zeros(heads, self.ring_slots, spec.head_dim), zeros(heads, extra * self.chunk_size, spec.head_dim)
        live = PlusLive(
            KeyValues(ring, ring), state.live.resident, state.live.fresh, state.live.values,
            left=self.codec.empty(spec.batch, later, self.chunk_size, sizes_of(spec)).left,
            landmarks=self.no_landmarks(spec, later),
            kept=zeros(heads, later, dtype=bool), extra=KeyValues(slots, slots),
            extra_ids=zeros(heads, extra, dtype=jnp.int32) - 1, spread=self.no_spread(spec, later),
        )  # fmt: skip
        cut = zeros(heads, dtype=jnp.float32)
        most = cut if self.outlier_rule != "landmark" else None
        frozen = PlusFrozen(**fields_of(state.frozen), cut=cut, most=most, key_weights=self.no_weights(spec))
        return LayerState(frozen, live)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """As ShadowKV; the end of the prompt goes to the ring, and its left rows to the live segment."""
        compressed, write = super().compress(spec, state, prompt, fitted)
        frozen: ShadowFrozen = compressed.frozen
        weights = self.weights_of(spec, prompt)
        exact = frozen.outliers.k.reshape(spec.batch, spec.kv_heads, -1, self.chunk_size, spec.head_dim)
        _, worst = chunk_landmarks(exact[:, :, : self.landmark_outliers(spec.capacity)], self.landmark_parts)
        slot = jnp.arange(worst.shape[2])
        used = slot < self.row_outliers(frozen.chunks)[:, None, None]
        cut = jnp.where(used, worst, -jnp.inf).max(axis=2, initial=-jnp.inf)
        held = self.held_positions(prompt.lengths)
        index = jnp.maximum(held, 0)[:, :, None, None]
        ring = (jnp.take_along_axis(x, index, axis=1, mode="clip").transpose(0, 2, 1, 3)
                for x in (prompt.k_post, prompt.v))  # fmt: skip
        span = min(self.window_chunks * self.chunk_size, self.later_chunks(spec) * self.chunk_size)
        rest = take_span(prompt.k_pre, frozen.chunks * self.chunk_size, span).transpose(0, 2, 1, 3)
        real = frozen.chunks[:, None] * self.chunk_size + jnp.arange(span) < prompt.lengths[:, None]
        rows = self.codec.project(rest, frozen.right, weights)
        rows = jnp.where(real[..., None, None], rows, 0).swapaxes(1, 2)
        left = by_token(state.live.left, self.chunk_size).at[:, :, :span].set(rows)
        live = state.live.replace(
            window=KeyValues(*ring), fresh=compressed.live.fresh, left=left.reshape(state.live.left.shape)
        )  # fmt: skip
        most = self.most_lost(spec, frozen, prompt, weights)
        frozen = PlusFrozen(**fields_of(frozen), cut=cut, most=most, key_weights=weights)
        return compressed.replace(frozen=frozen, live=live), write

    def most_lost(
        self, spec: CacheSpec, frozen: ShadowFrozen, prompt: PromptKV, weights: Array | None
    ) -> Array | None:  # fmt: skip
        """What the code loses of the worst chunk it is trusted with [B, h_kv]: below 0 where it is trusted with none,
        infinite where it may choose no outlier."""
        assert self.outlier_chunks is not None
        if self.outlier_rule == "landmark":
            return None
        if self.outlier_chunks < 2:  # of one, the landmarks' rule is the first
            return jnp.full((spec.batch, spec.kv_heads), jnp.inf)
        code = KeyCode(frozen.left, frozen.right)
        lost = self.codec.losses(code, prompt.k_pre, self.chunk_size, weights)
        return jnp.where(frozen.candidates, lost, -1.0).max(axis=2, initial=-1.0)

    def held_positions(self, lengths: Array) -> Array:
        """Token in each slot of the ring of rows that hold so many tokens, int32 [B, R]; negative where none is."""
        last = lengths[:, None] - 1
        return last - (last - jnp.arange(self.ring_slots)) % self.ring_slots

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Up to the end of the live segment."""
        segment = self.later_chunks(spec) * self.chunk_size
        return jnp.minimum(segment - (lengths - state.frozen.chunks * self.chunk_size), spec.capacity - lengths)

    # One step

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """New tokens to the ring and their left rows to the segment; chunks that left the window join."""
        live: PlusLive = state.live
        slots = step.positions % self.ring_slots
        k = write_rows(live.window.k, step.k_post, slots, step.valid)
        v = write_rows(live.window.v, step.v, slots, step.valid)
        live = live.replace(window=KeyValues(k, v), left=self.write_left(state, step))
        return self.join(spec, state.replace(live=live), step)

    def write_left(self, state: LayerState, step: StepKV) -> Array:
        """The live left rows with those of the new tokens."""
        left = state.live.left
        places = step.positions - state.frozen.chunks[:, None] * self.chunk_size
        rows = self.codec.project(step.k_pre, state.frozen.right, state.frozen.key_weights)
        return write_rows(by_token(left, self.chunk_size), rows, places, step.valid).reshape(left.shape)

    def join(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Take in the chunks that left the window with this step: landmark, values to the host, or an exact slot."""
        live: PlusLive = state.live
        batch, count = step.valid.shape
        most, size = -(-count // self.chunk_size), self.chunk_size
        new = step.valid.sum(axis=1, dtype=jnp.int32)
        before, after = (
            self.left_behind(state.frozen, (step.lengths + extra - 1)[:, None]) for extra in (jnp.zeros_like(new), new)
        )  # fmt: skip
        number = before + jnp.arange(most)  # later chunks [B, most]
        leaves = number < after
        tokens = ((state.frozen.chunks[:, None] + number)[..., None] * size + jnp.arange(size)).reshape(batch, -1)
        k, v = (
            jnp.take_along_axis(x, (tokens % self.ring_slots)[:, None, :, None], axis=2)
            .reshape(batch, spec.kv_heads, most, size, spec.head_dim) for x in (live.window.k, live.window.v)
        )  # fmt: skip
        mean, worst = chunk_landmarks(k, self.landmark_parts)
        spread = self.spread_of(spec, lambda parts: chunk_spread(k, parts))
        landmarks = self.write_marks(live.landmarks, self.keep_marks(spec, mean), number, leaves)
        spread = self.write_marks(live.spread, spread, number, leaves)
        bad = worst < state.frozen.cut[..., None]
        if state.frozen.most is not None:
            ids = jnp.broadcast_to(self.max_chunks(spec.capacity) + number[:, None], bad.shape)
            keys = self.rebuild(spec, state, step).keys(ids).reshape(k.shape)
            bad |= loses_more(keys, k, state.frozen.key_weights, state.frozen.most)
        live = self.keep_exact(live.replace(landmarks=landmarks, spread=spread), number, bad & leaves[:, None], k, v)
        return state.replace(live=live), HostWrite(self.host_rows(spec, v), number, leaves)

    def write_marks(self, marks: Any, new: Any, number: Array, leaves: Array) -> Any:
        """Landmarks or spreads of joining chunks at their places, where the chunk `leaves` [B, most]."""
        parts = self.read_parts  # rows of a chunk that are rows of the arrays
        places = (number[..., None] * parts + jnp.arange(parts)).reshape(number.shape[0], -1)
        valid = jnp.repeat(leaves, parts, axis=1)

        def write(old: Array, new: Array) -> Array:
            return write_rows(old, new.transpose(0, 2, 1, 3), places, valid)

        return jax.tree.map(write, marks, new)

    def keep_exact(self, live: PlusLive, number: Array, bad: Array, k: Array, v: Array) -> PlusLive:
        """Give a slot to each of the joining chunks [B, h_kv, most] that are badly represented, while there is one."""
        batch, heads = bad.shape[:2]
        slots = live.extra_ids.shape[2]
        used = (live.extra_ids >= 0).sum(axis=2, keepdims=True)
        slot = jnp.where(bad, used + jnp.cumsum(bad, axis=2) - 1, slots)  # past the last slot: dropped
        bad = bad & (slot < slots)
        row, head = jnp.ogrid[:batch, :heads]
        place = (row[..., None], head[..., None], slot)
        numbers = jnp.broadcast_to(number[:, None], bad.shape)

        def into_slots(buffer: Array, rows: Array) -> Array:
            chunked = buffer.reshape(batch, heads, slots, *rows.shape[3:])
            return chunked.at[place].set(rows.astype(buffer.dtype), mode="drop").reshape(buffer.shape)

        return live.replace(
            extra=KeyValues(into_slots(live.extra.k, k), into_slots(live.extra.v, v)),
            extra_ids=live.extra_ids.at[place].set(numbers, mode="drop"),
            kept=live.kept.at[row[..., None], head[..., None], jnp.where(bad, numbers, live.kept.shape[2])].set(
                True, mode="drop"
            ),
        )

    def logits(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """The prompt's chunks, then the later ones that each query has left behind."""
        live: PlusLive = state.live
        behind = self.left_behind(state.frozen, step.positions)[:, None, :, None]
        open_to = (jnp.arange(live.kept.shape[2]) < behind) & ~live.kept[:, :, None]
        later = self.products(spec, step.q_post, (live.landmarks, live.spread), open_to)
        return jnp.concatenate([super().logits(spec, state, step), later], axis=-1)

    def later_marks(self, state: LayerState) -> Any:
        """Those of the live segment."""
        return state.live.landmarks, state.live.spread

    def rebuild(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Rebuild:
        """The prompt's left rows, and those of the later chunks."""
        frozen = state.frozen
        return Rebuild(
            frozen.left, frozen.right, step.inverse, tail=state.live.left, tail_unit=frozen.chunks, codec=self.codec,
            unit=self.chunk_size,
        )  # fmt: skip

    def exact_pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        """Each query's window in the ring, outliers, and exact later chunks that it has left behind."""
        live: PlusLive = state.live
        behind = self.left_behind(state.frozen, step.positions)[..., None]
        first = (state.frozen.chunks[:, None, None] + behind) * self.chunk_size
        held = self.held_positions(step.lengths + step.valid.sum(axis=1, dtype=jnp.int32))[:, None]
        seen = (held >= first) & (held <= step.positions[..., None])
        pieces = [Piece(live.window.k, live.window.v, seen[:, None]), *super().exact_pieces(spec, state, step)[1:]]
        if self.extra_outlier_chunks:
            ids = live.extra_ids[:, :, None]
            used = jnp.repeat((ids >= 0) & (ids < behind[:, None]), self.chunk_size, axis=3)
            pieces.append(Piece(live.extra.k, live.extra.v, used))
        return pieces

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Selected chunks, outliers, exact later chunks and window; heads may differ, so means over them."""
        assert self.budget is not None
        frozen, ids = state.frozen, state.live.extra_ids
        behind = self.left_behind(frozen, lengths[:, None] - 1)
        outliers = self.row_outliers(frozen.chunks)
        extra = ((ids >= 0) & (ids < behind[..., None])).sum(axis=2)
        chunks = frozen.chunks + behind[:, 0]
        selected = jnp.minimum(self.budget // self.chunk_size, (chunks - outliers)[:, None] - extra)
        size = float(self.chunk_size)
        if self.top_p < 1:
            selected = (state.live.resident >= 0).sum(axis=2)
        return {
            "selected": selected.mean(axis=1, dtype=jnp.float32) * size,
            "outliers": outliers * size,
            "extra_outliers": extra.mean(axis=1, dtype=jnp.float32) * size,
            "window": (lengths - chunks * self.chunk_size).astype(jnp.float32),
        }

    def device_numbers(self, num_tokens: int, config: ModelConfig) -> float:
        """The ring takes the window's place; slots for later outliers and the live segment's end come on top."""
        columns, window = config.key_columns, self.window_slots(num_tokens, num_tokens)
        later, sizes = -(-window // self.chunk_size), Sizes(config.kv_heads, config.head_dim, "bfloat16")
        exact = self.ring_slots - window + self.extra_outlier_chunks * self.chunk_size
        left = self.codec.nbytes(later, self.chunk_size, sizes) - self.codec.nbytes(0, self.chunk_size, sizes)
        segment = (
            left + self.landmark_bytes(later, sizes) + self.spread_bytes(later, sizes)
        ) / 2 + later * config.kv_heads
        weights = 2 * columns * (self.key_weights != "none")
        return (
            super().device_numbers(num_tokens, config) + 2 * exact * columns + segment + weights + 64 * config.kv_heads
        )


def loses_more(keys: Array, real: Array, weights: Array | None, most: Array) -> Array:
    """Whether a code loses more of a chunk than `most` [B, h_kv] of its squared error in float32: bool [B, h_kv, n].

    Rebuilt keys and real ones [B, h_kv, n, c, d], after RoPE, were both rounded to the model's dtype, and the prompt's
    were not when they were measured: how far that alone can move them apart counts for nothing.
    """
    rounding = float(jnp.finfo(real.dtype).eps)
    off, size = (jnp.sqrt(squared_error(x, real, weights)) for x in (keys, jnp.zeros_like(real)))
    limit = jnp.where(most < 0, -jnp.inf, jnp.sqrt(jnp.maximum(most, 0)))
    return (off - rounding * size).max(axis=3) > limit[..., None]
