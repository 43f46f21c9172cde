"""What all layers of the probe policy (probe.py) have in common: the ring, the units in the host tier, the pieces."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, group_queries
from jshadow.ops.layout import to_chunks, top_k, write_rows
from jshadow.policies.base import UniformPolicy
from jshadow.policies.capabilities import Foresees, Speculates
from jshadow.policies.checks import check_range


@struct.dataclass
class Shared:
    """Attributes: guess: the token expected after the next one, int32 [B]."""

    guess: Array


@struct.dataclass
class Frozen:
    """Attributes: units: whole units of the prompt [B]; mass: what the prompt's queries gave each unit [B, h|1, J].

    `mass` has the same name as a field of the live half, on purpose: byte accounting must not lose one.
    """

    units: Array
    mass: Array


@struct.dataclass
class FollowerLive:
    """Attributes: recent: the ring."""

    recent: KeyValues


@dataclasses.dataclass(frozen=True)
class RingLayer(UniformPolicy, Speculates, Foresees):
    """Settings: units attended beyond the ring, tokens a unit, tokens in the ring, trailing queries read."""

    keep: int = 3
    unit: int = 4
    recent: int = 8
    tail: int = 6

    name = "probe"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "keep", self.keep, 1)
        check_range(self.name, "recent", self.recent, self.unit)  # the ring must hold the open unit
        return self

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Tokens that may have to be written to the tail of the host tier."""
        return capacity - shortest // self.unit * self.unit

    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Shared:
        return Shared(jnp.zeros(specs[0].batch, jnp.int32))

    def after_step(self, shared: Shared, logits: Array, lengths: Array) -> Shared:
        return Shared(logits[:, 1].argmax(-1).astype(jnp.int32))

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        tail = -(-spec.window // self.unit)
        return HostLayout(spec.kv_heads, spec.capacity // self.unit, self.unit, planes=2, tail_units=tail)

    # Sizes and places

    def ring(self, spec: CacheSpec) -> int:
        return min(self.recent, spec.capacity)

    def all_units(self, spec: CacheSpec) -> int:
        return -(-spec.capacity // self.unit)

    def selected(self, spec: CacheSpec) -> int:
        return min(self.keep, self.all_units(spec))

    def first_recent(self, spec: CacheSpec, held: Array) -> Array:
        """First position in the ring of rows that hold that many tokens."""
        return jnp.maximum(held - self.ring(spec), 0)

    def stored(self, spec: CacheSpec, frozen: Frozen, units: Array) -> Array:
        """Ids in the host tier [B, h, n] of units of the sequence: whole prompt units, then the tail."""
        start = frozen.units[:, None, None]
        return jnp.where(units < start, units, units - start + spec.capacity // self.unit)

    def positions_of(self, spec: CacheSpec, frozen: Frozen, ids: Array) -> Array:
        """Token positions [B, h, n * unit] behind ids of the host tier."""
        first_tail = spec.capacity // self.unit
        units = jnp.where(ids < first_tail, ids, ids - first_tail + frozen.units[:, None, None])
        tokens = units[..., None] * self.unit + jnp.arange(self.unit)
        return tokens.reshape(*ids.shape[:2], -1)

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        return LayerState(self.frozen(spec, jnp.zeros(spec.batch, jnp.int32)), FollowerLive(self.zeros(spec)))

    def frozen(self, spec: CacheSpec, lengths: Array) -> Frozen:
        return Frozen(lengths // self.unit, jnp.zeros((spec.batch, 1, self.all_units(spec)), jnp.float32))

    def zeros(self, spec: CacheSpec, slots: int | None = None) -> KeyValues:
        slots = self.ring(spec) if slots is None else slots
        zeros = jnp.zeros((spec.batch, spec.kv_heads, slots, spec.head_dim), spec.dtype)
        return KeyValues(zeros, zeros)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        ring = self.ring(spec)
        last = prompt.lengths[:, None] - 1
        held = last - (last - jnp.arange(ring)) % ring
        index = jnp.maximum(held, 0)[:, :, None, None]
        k, v = (jnp.take_along_axis(x, index, axis=1).transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v))
        state = state.replace(frozen=self.frozen(spec, prompt.lengths), live=state.live.replace(recent=KeyValues(k, v)))
        layout = self.host_layout(spec)
        if layout is None:
            return state, None
        planes = [to_chunks(x, layout.units, self.unit) for x in (prompt.k_post, prompt.v)]
        data = jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, layout.units, -1)
        return state, HostWrite(data)

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        tail = -(-spec.window // self.unit) * self.unit
        return jnp.minimum(spec.capacity - lengths, tail - (lengths - state.frozen.units * self.unit))

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        ring, slots = state.live.recent, step.positions % self.ring(spec)
        k = write_rows(ring.k, step.k_post, slots, step.valid)
        v = write_rows(ring.v, step.v, slots, step.valid)
        state = state.replace(live=state.live.replace(recent=KeyValues(k, v)))
        if self.host_layout(spec) is None:
            return state, None
        planes = jnp.stack([self.open_unit(spec, x, step) for x in (k, v)], axis=2)
        start = (step.positions[:, 0] // self.unit - state.frozen.units)[:, None]
        data = planes.reshape(spec.batch, spec.kv_heads, 1, -1)
        return state, HostWrite(data, start, step.valid[:, :1])

    def open_unit(self, spec: CacheSpec, ring: Array, step: StepKV) -> Array:
        """The unit that the new token is in, [B, h, unit, d]; what is not there yet is stale."""
        tokens = step.positions[:, :1] // self.unit * self.unit + jnp.arange(self.unit)
        return jnp.take_along_axis(ring, (tokens % self.ring(spec))[:, None, :, None], axis=2)

    # Choosing and attending

    def choose(self, spec: CacheSpec, state: LayerState, scores: Array, held: Array, valid: Array, **how: Any):
        """A selection of the best candidates by scores [B, h, J], for rows of which `held` tokens count."""
        first = self.first_recent(spec, held)
        candidate = jnp.arange(self.all_units(spec)) * self.unit < first[:, None]
        units = top_k(jnp.where(candidate[:, None], scores, -jnp.inf), self.selected(spec))
        good = (units * self.unit < first[:, None, None]) & valid[:, None, None]
        return Selection(self.stored(spec, state.frozen, units), good, **how)

    def pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        """The ring, and the guessed rows of this very step."""
        slots, last = jnp.arange(self.ring(spec)), step.positions[:, :1]
        there = last - (last - slots) % self.ring(spec) >= 0
        rows = step.positions.shape[1]
        k, v = (x[:, 1:].transpose(0, 2, 1, 3) for x in (step.k_post, step.v))
        guesses = jnp.arange(1, rows) <= jnp.arange(rows)[:, None]
        return [Piece(state.live.recent.k, state.live.recent.v, there[:, None, None]), Piece(k, v, guesses[None, None])]

    def older(self, spec: CacheSpec, state: LayerState, step: StepKV, ids: Array, valid: Array) -> Array:
        """Which fetched tokens [B, h, n * unit] are attended: the valid ones that left the ring."""
        first = self.first_recent(spec, step.lengths + 1)[:, None, None]
        return valid & (self.positions_of(spec, state.frozen, ids) < first)

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        pieces = self.pieces(spec, state, step)
        if fetched is not None:
            seen = self.older(spec, state, step, fetched.ids, jnp.repeat(fetched.valid, self.unit, axis=2))
            pieces.append(Piece(fetched.k, fetched.v, seen[:, :, None]))
        return attend(step.q_post, pieces, spec.scale), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        first = self.first_recent(spec, lengths)
        parts = {"window": lengths - first, "selected": jnp.minimum(first, self.selected(spec) * self.unit)}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}


def unit_scores(q: Array, landmarks: Array, open_to: Array, scale: float) -> Array:
    """Mass [B, h, J] that queries [B, T, h_q, d] put on each unit: summed over queries, maximum over the group."""
    scores = jnp.einsum("bhgtd,bhjd->bhgtj", group_queries(q, landmarks.shape[1]).astype(jnp.float32), landmarks)
    scores = jnp.where(open_to[:, None, None, None], scores * scale, -1e30)
    return jax.nn.softmax(scores, axis=-1).sum(axis=3).max(axis=2)
