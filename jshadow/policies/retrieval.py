"""What retrieval policies share: nothing is lost, some of it is attended.

Tokens lie in units of `unit`. A unit that the recent window has left lives in the host tier, keys and values, and is
a candidate: `summarise` says what of it stays on the device, `score` how much a query wants it by that. The best ones
within the budget are fetched at each step and attended exactly, together with the recent tokens, which lie in a ring.
"""

import abc
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, group_queries
from jshadow.ops.layout import fill_ring, ring_positions, to_chunks, top_k, write_rows
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Budgeted
from jshadow.policies.checks import check_range, check_share
from jshadow.policies.costs import Costs
from jshadow.policies.units import UnitFrozen, UnitLive, put_units, within_share


class RetrievalPolicy(UniformPolicy, Budgeted, Costs):
    """Settings that every one has.

    `budget` tokens to fetch, `recent` newest tokens that are always attended; with `top_p` below 1 only as many units
    of the budget as it takes to make up that share of the softmax over them.
    """

    budget: int
    recent: int
    unit: int
    top_p: float
    budget_fields = ("budget",)

    # What a policy says

    @abc.abstractmethod
    def summarise(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> Any:
        """A tree of [B, h_kv, n, ...] from the stored keys [B, h_kv, n, unit, d] of units, `there` [B, n, unit]."""

    @abc.abstractmethod
    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        """How much each query wants each unit: q [B, h_kv, group, T, d] -> float32 [B, h_kv, T, n]."""

    def stored(self, keys: Array, basis: Any) -> Array:
        """Keys after RoPE [B, S, h, d] as they are kept, and queries as they meet them: products must not change."""
        return keys

    def kept_summaries(self, spec: CacheSpec) -> bool:
        """Whether summaries are kept beside the units; else `resident_summaries` reads them off the units."""
        return True

    def resident_summaries(self, spec: CacheSpec, rows: Array) -> Any:
        """Summaries of units that lie on the device [B, h_kv, n, 2 * unit * d], where none are kept."""
        raise NotImplementedError

    def query(self, step: StepKV) -> Array:
        """The queries after RoPE [B, T, h_q, d] that choose."""
        return step.q_post

    def enough(self, spec: CacheSpec, scores: Array, good: Array) -> Array:
        """Which of the best units are fetched: float32 scores [B, h_kv, T, k], falling; `good` ones exist."""
        if self.top_p == 1:
            return good
        logits = jnp.where(good, scores * self.score_scale(spec), -jnp.inf)
        weights = jnp.where(good, jnp.exp(logits - logits[..., :1]), 0)
        return good & within_share(weights, self.top_p)

    def score_scale(self, spec: CacheSpec) -> float:
        """What makes logits of scores."""
        return spec.scale

    @property
    def reads(self) -> HookInputs:
        """Pieces of 8 tokens; with `top_p`, single steps, for each query's count is read off its own step."""
        return HookInputs(piece=8 if self.top_p == 1 else 1)

    @property
    def budget_unit(self) -> int:
        """Budgets are whole units."""
        return self.unit

    def learn(self, spec: CacheSpec, prompt: PromptKV, fitted: Any) -> Any:
        """The basis; None for most policies."""
        return None

    def no_basis(self, spec: CacheSpec) -> Any:
        """The basis before any prompt."""
        return None

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the shared settings."""
        check_range(self.name, "unit", self.unit, 1)
        check_range(self.name, "budget", self.budget, self.unit)
        check_range(self.name, "recent", self.recent, 1)
        check_share(self.name, "top_p", self.top_p)
        return self

    # Sizes and places

    def ring_slots(self, spec: CacheSpec) -> int:
        """A piece's first query still needs its own recent tokens, and its unit as a whole."""
        return min(self.recent + self.unit + self.reads.piece - 2, spec.capacity)

    def count(self, spec: CacheSpec) -> int:
        """Units that a query selects at most."""
        return min(self.budget // self.unit, -(-spec.capacity // self.unit))

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Tokens that may have to be written behind the prompt's units."""
        return capacity - shortest // self.unit * self.unit

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Keys and values of the prompt's units and of later ones."""
        tail = max(1, -(-spec.window // self.unit))
        return HostLayout(spec.kv_heads, spec.capacity // self.unit, self.unit, planes=2, tail_units=tail)

    def first_recent(self, positions: Array) -> Array:
        """First position that a query attends in the ring: whole units before the recent tokens are candidates."""
        return jnp.maximum(positions + 1 - self.recent, 0) // self.unit * self.unit

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Capacity and tail both end."""
        layout = self.host_layout(spec)
        assert layout is not None
        tail = layout.tail_units * self.unit
        return jnp.minimum(spec.capacity - lengths, tail - (lengths - state.frozen.units * self.unit))

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """No unit, an empty ring."""
        layout = self.host_layout(spec)
        assert layout is not None

        def zeros(*shape: int) -> Array:
            return jnp.zeros((spec.batch, spec.kv_heads, *shape), spec.dtype)

        basis = self.no_basis(spec)

        def summaries(count: int) -> Any:
            if not self.kept_summaries(spec):
                return None
            there = jnp.zeros((spec.batch, count, self.unit), bool)
            return self.summarise(spec, zeros(count, self.unit, spec.head_dim), there, basis)

        ring = zeros(self.ring_slots(spec), spec.head_dim)
        chosen = jnp.full((spec.batch, spec.kv_heads, self.count(spec)), -1, jnp.int32)
        frozen = UnitFrozen(jnp.zeros(spec.batch, jnp.int32), summaries(layout.units), basis)
        return LayerState(frozen, UnitLive(KeyValues(ring, ring), summaries(layout.tail_units), chosen))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Whole units to the host tier, their summaries and the newest tokens to the device."""
        layout, slots = self.host_layout(spec), self.ring_slots(spec)
        assert layout is not None
        units, basis = prompt.lengths // self.unit, self.learn(spec, prompt, fitted)
        rows = (self.stored(prompt.k_post, basis), prompt.v)
        k, v = (fill_ring(x, prompt.lengths, slots) for x in rows)
        planes = [to_chunks(x, layout.units, self.unit) for x in rows]
        there = (jnp.arange(layout.units) < units[:, None])[..., None] & jnp.ones(self.unit, bool)
        summaries = self.summarise(spec, planes[0], there, basis) if self.kept_summaries(spec) else None
        width = 2 * self.unit * spec.head_dim
        data = jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, layout.units, width)
        live = state.live.replace(recent=KeyValues(k, v))
        # the unit that the prompt has begun lies in the ring; its place in the tail is written with the next token
        return state.replace(frozen=UnitFrozen(units, summaries, basis), live=live), HostWrite(
            data
        ) if layout.units else None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the new tokens to the ring, and each unit they are in, done or not, to the tail and its summary."""
        slots, ring, basis = self.ring_slots(spec), state.live.recent, state.frozen.basis
        k = write_rows(ring.k, self.stored(step.k_post, basis), step.positions % slots, step.valid)
        v = write_rows(ring.v, step.v, step.positions % slots, step.valid)
        touched = (step.positions.shape[1] - 1) // self.unit + 2 - (self.unit == 1)
        units = step.positions[:, :1] // self.unit + jnp.arange(touched)
        tokens = units[..., None] * self.unit + jnp.arange(self.unit)
        end = step.lengths + step.valid.sum(axis=1, dtype=jnp.int32)
        there = tokens < end[:, None, None]
        index = (tokens % slots).reshape(spec.batch, 1, -1, 1)
        shape = (spec.batch, spec.kv_heads, touched, self.unit, spec.head_dim)
        rows = (jnp.take_along_axis(x, index, axis=2).reshape(shape) for x in (k, v))
        keys, values = (jnp.where(there[:, None, ..., None], x, 0) for x in rows)
        data = jnp.stack([keys, values], axis=3).reshape(spec.batch, spec.kv_heads, touched, -1)
        place = units - state.frozen.units[:, None]
        valid = there.any(-1) & step.valid[:, :1]
        summaries = state.live.summaries
        if self.kept_summaries(spec):
            fresh = self.summarise(spec, keys, there, basis)
            summaries = jax.tree.map(functools.partial(put_units, place=place, valid=valid), summaries, fresh)
        live = state.live.replace(recent=KeyValues(k, v), summaries=summaries)
        return state.replace(live=live), HostWrite(data, place, valid)

    # One step

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        """The best units of each query, one query after the other."""
        layout, frozen = self.host_layout(spec), state.frozen
        assert layout is not None
        q = group_queries(self.stored(self.query(step), frozen.basis), spec.kv_heads)
        parts = [self.score(spec, summaries, q, frozen.basis) for summaries in self.both_summaries(spec, state)]
        scores = jnp.concatenate(parts, axis=3)
        unit = self.unit_of_place(spec, frozen.units)
        old = (unit + 1)[:, None] * self.unit <= self.first_recent(step.positions)[..., None]
        candidate = ((unit >= 0)[:, None] & old)[:, None]  # [B, 1, T, n]
        ids = top_k(jnp.where(candidate, scores, -jnp.inf), self.count(spec))
        good = jnp.take_along_axis(jnp.broadcast_to(candidate, scores.shape), ids, axis=3)
        good = self.enough(spec, jnp.take_along_axis(scores, ids, axis=3), good) & step.valid[:, None, :, None]
        taken = jnp.where(good, ids, -1)
        before = jnp.concatenate([state.live.selected[:, :, None], taken[:, :, :-1]], axis=2)
        hit = (ids[..., None] == before[..., None, :]).any(-1) & good
        newest = jnp.maximum(step.valid.sum(axis=1) - 1, 0)[:, None, None, None]
        last = jnp.take_along_axis(taken, newest, axis=2)[:, :, 0]
        chosen = jnp.where(step.valid[:, :1, None], last, state.live.selected)
        flat = (spec.batch, spec.kv_heads, -1)
        selection = Selection(ids.reshape(flat), good.reshape(flat), hit=hit.reshape(flat))
        return selection, state.replace(live=state.live.replace(selected=chosen))

    def unit_of_place(self, spec: CacheSpec, units: Array) -> Array:
        """Unit of the sequence behind each place, int32 [B, U + T]: the prompt's, then the tail's; -1 for none."""
        layout, start = self.host_layout(spec), units[:, None]
        assert layout is not None
        places = jnp.arange(layout.units + layout.tail_units)
        unit = jnp.where(places < layout.units, places, places - layout.units + start)
        return jnp.where((places < start) | (places >= layout.units), unit, -1)

    def both_summaries(self, spec: CacheSpec, state: LayerState) -> list[Any]:
        """Of the prompt's units and of later ones."""
        if self.kept_summaries(spec):
            return [state.frozen.summaries, state.live.summaries]
        layout, tier = self.host_layout(spec), state.host
        assert layout is not None
        assert tier.tail is not None
        rows = [tier.prompt.array] if tier.prompt is not None else []
        return [self.resident_summaries(spec, x) for x in (*rows, tier.tail.array[:, :, : layout.tail_units])]

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Exact attention over each query's recent tokens and its units."""
        assert fetched is not None
        assert fetched.k is not None
        slots, queries = self.ring_slots(spec), step.positions.shape[1]
        held = ring_positions(step.lengths + step.valid.sum(axis=1, dtype=jnp.int32), slots)[:, None]
        seen = (held >= self.first_recent(step.positions)[..., None]) & (held <= step.positions[..., None])
        recent = state.live.recent
        shape = (spec.batch, spec.kv_heads, queries, -1)
        k, v = (x.reshape(*shape, spec.head_dim) for x in (fetched.k, fetched.v))
        pieces = [Piece(recent.k, recent.v, seen[:, None]), Piece(k, v, fetched.valid.reshape(shape))]
        query = self.stored(step.q_post, state.frozen.basis)
        return attend(query, pieces, spec.scale), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Recent tokens, and whole units."""
        first = self.first_recent(lengths - 1)
        selected = jnp.minimum(first, self.count(spec) * self.unit)
        if self.top_p < 1:
            selected = (state.live.selected >= 0).sum(axis=2).mean(axis=1, dtype=jnp.float32) * self.unit
        parts = {"window": lengths - first, "selected": selected}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    # Accounting

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """All summaries and the ring are read, the selected units move."""
        parts = {name: (device, 0) for name, (device, _) in layer_nbytes(state).items() if not name.startswith("host")}
        moved = 2 * spec.batch * spec.kv_heads * self.count(spec) * self.unit * spec.head_dim
        size = moved * jnp.dtype(spec.dtype).itemsize
        return parts | {"selected": (size, 0 if spec.fetch == "resident" else size)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores of all units, the selected rows twice, in float32 for their products too, and their scores."""
        layout = self.host_layout(spec)
        assert layout is not None
        units, rows = layout.units + layout.tail_units, self.count(spec) * self.unit + self.ring_slots(spec)
        wide = spec.batch * spec.kv_heads * rows * spec.head_dim * (2 * 2 * jnp.dtype(spec.dtype).itemsize + 2 * 4)
        return 4 * 4 * spec.batch * spec.q_heads * (units + rows) + wide
