"""A policy for tests only, which uses every hook of the contract at once. It is no method of the literature.

Three kinds of layers. Each keeps the last `recent` tokens in a ring on the device; "unit j" is tokens [j * unit,
(j + 1) * unit), and a unit is a candidate once it has tokens that left the ring.

Layers are counted among those that see all tokens.

- Scout (the first one): its ring is the whole capacity, so it attends exactly. It adds up the attention that each unit
  gets (from all the prompt's queries at prefill, then in `attend`), and plans, for now, the fetch of the heaviest units
  on behalf of every follower.
- Speculator (odd layers): selects by the query that the layer before made with `q_next`, plus what the prompt's last
  queries looked at, and plans, for the next step, a fetch by its guessed row. Units that arrived so are attended from
  that buffer and not from the step's own fetch.
- Follower (even layers): attends to what the scout had fetched for it.

Speculators and followers keep keys and values of all units in the host tier and write the open unit at each step. Two
query rows a step: the second is a guessed token, never remembered.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import HostWrite, KeyValues, LayerState, Selection
from jshadow.cache.spec import HostLayout
from jshadow.ops.attention import Piece, attend, attention_probs, group_queries
from jshadow.ops.layout import fit_tokens, to_chunks, top_k, write_rows
from jshadow.policies.base import HookInputs, UniformPolicy, full_layers
from jshadow.policies.capabilities import Foresees, PlansAhead, Speculates

PRIOR_WEIGHT = 0.25


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

    def window_slots(self, capacity, shortest):
        """Tokens that may have to be written to the tail of the host tier."""
        return capacity - shortest // self.unit * self.unit

    def init_shared(self, specs, fitted=None):
        return Shared(jnp.zeros(specs[0].batch, jnp.int32))

    def after_step(self, shared, logits, lengths):
        return Shared(logits[:, 1].argmax(-1).astype(jnp.int32))

    def host_layout(self, spec):
        tail = -(-spec.window // self.unit)
        return HostLayout(spec.kv_heads, spec.capacity // self.unit, self.unit, planes=2, tail_units=tail)

    def ring(self, spec):
        return min(self.recent, spec.capacity)

    def all_units(self, spec):
        return -(-spec.capacity // self.unit)

    def selected(self, spec):
        return min(self.keep, self.all_units(spec))

    def first_recent(self, spec, held):
        """First position in the ring of rows that hold that many tokens."""
        return jnp.maximum(held - self.ring(spec), 0)

    def stored(self, spec, frozen, units):
        """Ids in the host tier [B, h, n] of units of the sequence: whole prompt units, then the tail."""
        start = frozen.units[:, None, None]
        return jnp.where(units < start, units, units - start + spec.capacity // self.unit)

    def positions_of(self, spec, frozen, ids):
        """Token positions [B, h, n * unit] behind ids of the host tier."""
        first_tail = spec.capacity // self.unit
        units = jnp.where(ids < first_tail, ids, ids - first_tail + frozen.units[:, None, None])
        tokens = units[..., None] * self.unit + jnp.arange(self.unit)
        return tokens.reshape(*ids.shape[:2], -1)

    def init(self, spec, fitted=None):
        return LayerState(self.frozen(spec, jnp.zeros(spec.batch, jnp.int32)), FollowerLive(self.zeros(spec)))

    def frozen(self, spec, lengths):
        return Frozen(lengths // self.unit, jnp.zeros((spec.batch, 1, self.all_units(spec)), jnp.float32))

    def zeros(self, spec, slots=None):
        slots = self.ring(spec) if slots is None else slots
        zeros = jnp.zeros((spec.batch, spec.kv_heads, slots, spec.head_dim), spec.dtype)
        return KeyValues(zeros, zeros)

    def compress(self, spec, state, prompt, fitted=None):
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

    def room(self, spec, state, lengths):
        tail = -(-spec.window // self.unit) * self.unit
        return jnp.minimum(spec.capacity - lengths, tail - (lengths - state.frozen.units * self.unit))

    def append(self, spec, state, step):
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

    def open_unit(self, spec, ring, step):
        """The unit that the new token is in, [B, h, unit, d]; what is not there yet is stale."""
        tokens = step.positions[:, :1] // self.unit * self.unit + jnp.arange(self.unit)
        return jnp.take_along_axis(ring, (tokens % self.ring(spec))[:, None, :, None], axis=2)

    def choose(self, spec, state, scores, held, valid, **how):
        """A selection of the best candidates by scores [B, h, J], for rows of which `held` tokens count."""
        first = self.first_recent(spec, held)
        candidate = jnp.arange(self.all_units(spec)) * self.unit < first[:, None]
        units = top_k(jnp.where(candidate[:, None], scores, -jnp.inf), self.selected(spec))
        good = (units * self.unit < first[:, None, None]) & valid[:, None, None]
        return Selection(self.stored(spec, state.frozen, units), good, **how)

    def pieces(self, spec, state, step):
        """The ring, and the guessed rows of this very step."""
        slots, last = jnp.arange(self.ring(spec)), step.positions[:, :1]
        there = last - (last - slots) % self.ring(spec) >= 0
        rows = step.positions.shape[1]
        k, v = (x[:, 1:].transpose(0, 2, 1, 3) for x in (step.k_post, step.v))
        guesses = jnp.arange(1, rows) <= jnp.arange(rows)[:, None]
        return [Piece(state.live.recent.k, state.live.recent.v, there[:, None, None]), Piece(k, v, guesses[None, None])]

    def older(self, spec, state, step, ids, valid):
        """Which fetched tokens [B, h, n * unit] are attended: the valid ones that left the ring."""
        first = self.first_recent(spec, step.lengths + 1)[:, None, None]
        return valid & (self.positions_of(spec, state.frozen, ids) < first)

    def attend(self, spec, state, step, fetched):
        pieces = self.pieces(spec, state, step)
        if fetched is not None:
            seen = self.older(spec, state, step, fetched.ids, jnp.repeat(fetched.valid, self.unit, axis=2))
            pieces.append(Piece(fetched.k, fetched.v, seen[:, :, None]))
        return attend(step.q_post, pieces, spec.scale), state

    def attended_parts(self, spec, state, lengths):
        first = self.first_recent(spec, lengths)
        parts = {"window": lengths - first, "selected": jnp.minimum(first, self.selected(spec) * self.unit)}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}


def unit_scores(q, landmarks, open_to, scale):
    """Mass [B, h, J] that queries [B, T, h_q, d] put on each unit: summed over queries, maximum over the group."""
    scores = jnp.einsum("bhgtd,bhjd->bhgtj", group_queries(q, landmarks.shape[1]).astype(jnp.float32), landmarks)
    scores = jnp.where(open_to[:, None, None, None], scores * scale, -1e30)
    return jax.nn.softmax(scores, axis=-1).sum(axis=3).max(axis=2)


@struct.dataclass
class ScoutLive:
    """Attributes: recent: the ring; mass: attention that steps gave each unit, float32 [B, 1, J]."""

    recent: KeyValues
    mass: Array


@struct.dataclass
class SpeculatorLive:
    """Attributes: ring, mean key of each unit [B, h, J, d], last selection and prefetched units [B, h, n, ...]."""

    recent: KeyValues
    landmarks: Array
    resident: Array
    buffer_ids: Array
    buffer: KeyValues


@dataclasses.dataclass(frozen=True)
class Scout(RingLayer, PlansAhead):
    """Attends everything, remembers how much each unit got, fetches for the followers."""

    followers: tuple[int, ...] = ()

    @property
    def reads(self):
        return HookInputs(all_queries=True)

    def host_layout(self, spec):
        return None

    def ring(self, spec):
        return spec.capacity

    def init(self, spec, fitted=None):
        frozen = self.frozen(spec, jnp.zeros(spec.batch, jnp.int32))
        return LayerState(frozen, ScoutLive(self.zeros(spec), jnp.zeros_like(frozen.mass)))

    def compress(self, spec, state, prompt, fitted=None):
        """The column sums of all attention probabilities, from the queries and their log-sum-exps."""
        state, _ = super().compress(spec, state, prompt, fitted)
        q = group_queries(prompt.q_post, spec.kv_heads)  # [B, h, g, S, d]
        scores = jnp.einsum("bhgtd,bshd->bhgts", q, prompt.k_post, preferred_element_type=jnp.float32) * spec.scale
        lse = prompt.lse.reshape(*scores.shape[:-1], 1)
        tokens = jnp.arange(scores.shape[-1])
        real = tokens[:, None] < prompt.lengths[:, None, None]
        causal = (tokens <= tokens[:, None]) & real
        mass = jnp.where(causal[:, None, None], jnp.exp(scores - lse), 0.0).sum(axis=(1, 2, 3))
        per_unit = self.by_unit(spec, mass)
        return state.replace(frozen=state.frozen.replace(mass=per_unit)), None

    def by_unit(self, spec, tokens):
        """[B, S] summed over the tokens of each unit -> [B, 1, J]."""
        count = self.all_units(spec)
        return fit_tokens(tokens, count * self.unit).reshape(-1, 1, count, self.unit).sum(-1)

    def attend(self, spec, state, step, fetched):
        out, state = super().attend(spec, state, step, fetched)
        probs = attention_probs(step.q_post[:, :1], self.pieces(spec, state, step)[0], spec.scale)
        given = jnp.where(step.valid[:, :1], probs.sum(axis=(1, 2, 3)), 0.0)
        live = state.live.replace(mass=state.live.mass + self.by_unit(spec, given))
        return out, state.replace(live=live)

    def plan(self, spec, state, step):
        mass, follower = state.frozen.mass + state.live.mass, Follower(self.keep, self.unit, self.recent, self.tail)
        return tuple(
            follower.choose(spec, state, mass, step.lengths + 1, step.valid[:, 0], layer=layer, when="now")
            for layer in self.followers
        )


class Follower(RingLayer):
    """Attends what the scout fetched for it: all that the base class does."""


class Speculator(RingLayer, PlansAhead):
    """Selects by a speculated query, and has the next step's units fetched by a guessed one."""

    @property
    def reads(self):
        return HookInputs(last_queries=self.tail)

    def init(self, spec, fitted=None):
        state = super().init(spec, fitted)
        shape, count = (spec.batch, spec.kv_heads), self.selected(spec)
        landmarks = jnp.zeros((*shape, self.all_units(spec), spec.head_dim), jnp.float32)
        none = jnp.full((*shape, count), -1, jnp.int32)
        live = SpeculatorLive(state.live.recent, landmarks, none, none, self.zeros(spec, count * self.unit))
        mass = jnp.zeros((*shape, self.all_units(spec)), jnp.float32)
        return state.replace(live=live, frozen=state.frozen.replace(mass=mass))

    def compress(self, spec, state, prompt, fitted=None):
        """What the prompt's last queries looked at; a short row has fewer of them, and the first is repeated."""
        state, write = super().compress(spec, state, prompt, fitted)
        whole = jnp.arange(self.all_units(spec)) < state.frozen.units[:, None]
        means = to_chunks(prompt.k_post.astype(jnp.float32), self.all_units(spec), self.unit).mean(axis=3)
        landmarks = jnp.where(whole[:, None, :, None], means, 0.0)
        real = prompt.lengths[:, None] - self.tail + jnp.arange(self.tail) >= 0
        scores = [
            jnp.where(real[:, i, None, None], unit_scores(prompt.q_tail[:, i : i + 1], landmarks, whole, spec.scale), 0)
            for i in range(self.tail)
        ]
        mass = jnp.where(whole[:, None], sum(scores), 0.0)
        live = state.live.replace(landmarks=landmarks)
        return state.replace(frozen=state.frozen.replace(mass=mass), live=live), write

    def append(self, spec, state, step):
        state, write = super().append(spec, state, step)
        unit = step.positions[:, 0] // self.unit
        there = unit[:, None] * self.unit + jnp.arange(self.unit) <= step.positions[:, :1]
        keys = self.open_unit(spec, state.live.recent.k, step).astype(jnp.float32)
        mean = jnp.where(there[:, None, :, None], keys, 0.0).sum(axis=2) / self.unit
        landmarks = write_rows(state.live.landmarks, mean[:, None], unit[:, None], step.valid[:, :1])
        return state.replace(live=state.live.replace(landmarks=landmarks)), write

    def rank_units(self, spec, state, q, held):
        candidate = jnp.arange(self.all_units(spec)) * self.unit < self.first_recent(spec, held)[:, None]
        return unit_scores(q, state.live.landmarks, candidate, spec.scale) + PRIOR_WEIGHT * state.frozen.mass

    def select(self, spec, state, step):
        held = step.lengths + 1
        scores = self.rank_units(spec, state, step.q_foreseen[:, :1], held)
        selection = self.choose(spec, state, scores, held, step.valid[:, 0])
        hit = (selection.ids[..., None] == state.live.buffer_ids[..., None, :]).any(-1)
        return selection.replace(hit=hit), state

    def receive(self, spec, state, selection, fetched):
        """What is attended now is noted, what the next step may need is kept. A row without valid ids stays."""
        ids = jnp.where(selection.valid, selection.ids, -1)
        there = selection.valid.any(axis=(1, 2), keepdims=True)
        live: SpeculatorLive = state.live
        if selection.when == "now":
            return state.replace(live=live.replace(resident=jnp.where(there, ids, live.resident)))
        pairs = (fetched.k, live.buffer.k), (fetched.v, live.buffer.v)
        buffer = KeyValues(*(jnp.where(there[..., None], new, old) for new, old in pairs))
        return state.replace(live=live.replace(buffer_ids=jnp.where(there, ids, live.buffer_ids), buffer=buffer))

    def attend(self, spec, state, step, fetched):
        """Units that are in the buffer come from there."""
        live: SpeculatorLive = state.live
        chosen = jnp.where(fetched.valid, fetched.ids, -1)
        same = (chosen[..., :, None] == live.buffer_ids[..., None, :]) & (chosen >= 0)[..., None]
        flags = (same.any(axis=2), fetched.valid & ~same.any(axis=3))
        buffered, missed = (jnp.repeat(x, self.unit, axis=2) for x in flags)
        pieces = self.pieces(spec, state, step)
        parts = ((fetched, fetched.ids, missed), (live.buffer, live.buffer_ids, buffered))
        for part, ids, valid in parts:
            pieces.append(Piece(part.k, part.v, self.older(spec, state, step, ids, valid)[:, :, None]))
        return attend(step.q_post, pieces, spec.scale), state

    def plan(self, spec, state, step):
        """The next step's token is most likely the guess: its query says what will be wanted."""
        held = step.lengths + 2
        scores = self.rank_units(spec, state, step.q_post[:, 1:2], held)
        return (self.choose(spec, state, scores, held, step.valid[:, 0], when="next_step"),)


@dataclasses.dataclass(frozen=True)
class Probe(RingLayer):
    """The policy of the model: which kind each layer is. Its own layer methods are never asked."""

    def for_layer(self, layer, config):
        full, settings = full_layers(config), (self.keep, self.unit, self.recent, self.tail)
        rank = full.index(layer)
        return Scout(*settings, full[2::2]) if rank == 0 else (Follower, Speculator)[rank % 2](*settings)
