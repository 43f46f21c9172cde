"""The base of retrieval policies: all tokens are kept, and each query attends to some of them.

Tokens are grouped in units of `unit` tokens, whose keys and values are in the host tier. In a model whose values are
the keys before their norm, these are the values alone. The device keeps a summary of each unit (`summarize`) and a ring
buffer of the recent tokens. Each query scores the units before its recent tokens by their summaries (`score`). The
units with the highest scores, within the budget, are fetched at each step. The query attends exactly to them and to its
recent tokens.
"""

import abc
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Rebuild, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, group_queries
from jshadow.ops.layout import fill_ring, ring_positions, to_chunks, top_k, write_rows
from jshadow.policies.base import Bytes, HookInputs, UniformPolicy, fetched_bytes
from jshadow.policies.capabilities import Budgeted
from jshadow.policies.checks import check_range, check_share
from jshadow.policies.shadowkv.key_codecs import KeyCode, Sizes, ValueCodec


def within_share(weights: Array, share: float) -> Array:
    """Mark the fewest leading weights whose sum reaches a share of the total (Twilight, arXiv 2502.02770, section 4).

    Weights are float32 [..., k], falling along the last axis. The share is in (0, 1]. 1 marks all weights.
    """
    if share >= 1:
        return jnp.ones(weights.shape, bool)
    before = jnp.cumsum(weights, axis=-1) - weights
    return before < share * weights.sum(axis=-1, keepdims=True)


class UnitFrozen(struct.PyTreeNode):
    """The prompt's part of a retrieval policy's state.

    Example: B = 1, 2 KV heads, units of 4 tokens, a capacity of 12 tokens and a prompt of 10. The prompt part of the
    host tier has room for 3 units. units is [2], since the prompt has 2 whole units; its last 2 tokens are only in the
    ring of `UnitLive`. With Quest, summaries are two arrays [1, 2, 3, d], whose last entry is unused.

    Attributes:
        units: whole units of each row's prompt, int32 [B].
        summaries: a pytree of arrays [B, h_kv, U, ...] with one summary for each unit, or None if the policy reads
            summaries from the units themselves.
        basis: arrays that the summaries are computed with, if the policy learns them from the prompt; else None.
        code: what turns values into keys (`ValueCodec`), or None if the keys are stored beside the values.
    """

    units: Array
    summaries: Any
    basis: Any
    code: KeyCode | None


class UnitLive(struct.PyTreeNode):
    """The part of a retrieval policy's state that decoding changes.

    Attributes:
        recent: a ring buffer of the newest tokens' keys after RoPE and values [B, h_kv, R, d]. The token at position p
            is in slot p % R.
        summaries: a pytree of arrays [B, h_kv, T, ...] with the summaries of units after the prompt, or None. In row b,
            entry j is unit units[b] + j of the sequence. A unit that is not complete yet is summarized from its first
            tokens.
        selected: the units that the last query selected, int32 [B, h_kv, k], with -1 in unused entries. Units of the
            tail follow those of the prompt, as in `Selection.ids`.
    """

    recent: KeyValues
    summaries: Any
    selected: Array


def put_units(old: Array, new: Array, *, place: Array, valid: Array) -> Array:
    """Write entries [B, h, n, ...] along axis 2 of `old` [B, h, T, ...] at `place`, int32 [B, n], where `valid`, bool
    [B, n].
    """
    batch, heads, count = old.shape[:3]
    rows = new.reshape(batch, heads, new.shape[2], -1).swapaxes(1, 2)
    return write_rows(old.reshape(batch, heads, count, -1), rows, place, valid).reshape(old.shape)


def _unit_of_place(layout: HostLayout, units: Array) -> Array:
    """Return the number in the sequence of each stored unit, int32 [B, U + T]: the prompt's, then the tail's.

    -1 marks a place in the prompt's part that holds no unit. Example: the prompt's part has 3 places, the tail has
    2, and row 0 has units[0] = 2. Then the result for row 0 is [0, 1, -1, 2, 3].
    """
    start = units[:, None]
    places, count = jnp.arange(layout.units + layout.tail_units), layout.units
    unit = jnp.where(places < count, places, places - count + start)
    return jnp.where((places < start) | (places >= count), unit, -1)


class RetrievalPolicy(UniformPolicy, Budgeted):
    """A policy that fetches the units with the highest scores for each query.

    Attributes:
        budget: maximum number of tokens that are fetched for a query.
        recent: number of newest tokens that are always attended to.
        unit: tokens in a unit.
        top_p: fetch only the best units that together have this share of the softmax over their scores. 1: all units.
    """

    budget: int
    recent: int
    unit: int
    top_p: float
    budget_fields: ClassVar[tuple[str, ...]] = ("budget",)
    takes_sinks: ClassVar[bool] = True

    # Hooks of a retrieval policy

    @abc.abstractmethod
    def summarize(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> Any:
        """Return summaries of n units, a pytree of arrays [B, h_kv, n, ...].

        `keys` [B, h_kv, n, unit, d] is in the form of `stored`, `there` bool [B, n, unit] marks real tokens, and
        `basis` is the result of `learn`.
        """

    @abc.abstractmethod
    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        """Return the score of each unit for each query, float32 [B, h_kv, T, n]; `q` is [B, h_kv, group, T, d]."""

    def stored(self, keys: Array, basis: Any) -> Array:
        """Convert keys or queries after RoPE [B, S, h, d] to the form of stored keys. Products must not change."""
        return keys

    def resident_summaries(self, rows: Array) -> Any:
        """Return the summaries of units that are on the device, `rows` [B, h_kv, n, 2 * unit * d].

        A policy that defines this stores no summaries with the fetch mode "resident".
        """
        raise NotImplementedError

    def kept_summaries(self, spec: CacheSpec) -> bool:
        """Return whether summaries are stored."""
        reads = type(self).resident_summaries is not RetrievalPolicy.resident_summaries
        return not reads or spec.fetch != "resident"

    def from_values(self, spec: CacheSpec) -> bool:
        """Return whether the host tier has values alone, from which the keys are made (`CacheSpec.values_from_keys`).

        Keys in another form are stored, and so are keys of which some tokens were dropped.
        """
        own = (type(self).stored, type(self).host_layout) == (RetrievalPolicy.stored, RetrievalPolicy.host_layout)
        return spec.values_from_keys and own

    def query(self, step: StepKV) -> Array:
        """Return the queries after RoPE by which units are chosen [B, T, h_q, d]."""
        return step.q_post

    def enough(self, spec: CacheSpec, scores: Array, good: Array) -> Array:
        """Return which of the best k units of a query are fetched, bool [B, h_kv, T, k].

        `scores`, float32 [B, h_kv, T, k], are in falling order. `good`, of the same shape, marks real units.
        """
        if self.top_p == 1:
            return good
        logits = jnp.where(good, scores * self.score_scale(spec), -jnp.inf)
        weights = jnp.where(good, jnp.exp(logits - logits[..., :1]), 0)
        return good & within_share(weights, self.top_p)

    def score_scale(self, spec: CacheSpec) -> float:
        """Return the factor that turns scores into attention logits, for `top_p`."""
        return spec.scale

    @property
    def reads(self) -> HookInputs:
        """A step takes 8 new tokens of a turn. If top_p < 1, it takes 1, because it records the units of one query."""
        return HookInputs(piece=8 if self.top_p == 1 else 1)

    @property
    def budget_unit(self) -> int:
        return self.unit

    def learn(self, spec: CacheSpec, prompt: PromptKV, fitted: Any) -> Any:
        """Return the basis that `summarize` and `score` get for this prompt. By default it is None."""
        return None

    def no_basis(self, spec: CacheSpec) -> Any:
        """Return the basis of an empty state."""
        return None

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "unit", self.unit, 1)
        check_range(self.name, "budget", self.budget, self.unit)
        check_range(self.name, "recent", self.recent, 1)
        check_share(self.name, "top_p", self.top_p)
        return self

    # Sizes

    def ring_slots(self, spec: CacheSpec) -> int:
        """Return the number of slots R of the ring. It holds the recent tokens of all queries of a piece, in units."""
        return min(self.recent + self.unit + self.reads.piece - 2, spec.capacity)

    def count(self, spec: CacheSpec) -> int:
        """Return the maximum number of units that a query selects."""
        layout = self.host_layout(spec)
        return min(self.wanted(spec), layout.units + layout.tail_units)

    def wanted(self, spec: CacheSpec) -> int:
        """Return the maximum number of units that a query may select."""
        return min(self.budget // self.unit, -(-spec.capacity // self.unit))

    def window_slots(self, capacity: int, shortest: int) -> int:
        return capacity - shortest // self.unit * self.unit

    def host_layout(self, spec: CacheSpec) -> HostLayout:
        tail = max(1, -(-spec.window // self.unit))
        made, units = self.from_values(spec), spec.capacity // self.unit
        no_kernel = "keys made from values" if made else ""
        return HostLayout(
            spec.kv_heads, units, self.unit, planes=1 if made else 2, tail_units=tail, no_kernel=no_kernel
        )

    def first_recent(self, positions: Array) -> Array:
        """Return the first position that a query at `positions` reads from the ring. Units before it are candidates."""
        return jnp.maximum(positions + 1 - self.recent, 0) // self.unit * self.unit

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        layout = self.host_layout(spec)
        tail = layout.tail_units * self.unit
        return jnp.minimum(spec.capacity - lengths, tail - (lengths - state.frozen.units * self.unit))

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return the length after the prompt's units at which the ring still has the next query's recent tokens."""
        slots = self.ring_slots(spec)
        kept = jnp.where(reached <= slots, 0, reached - self.reads.piece)
        return jnp.maximum(jnp.maximum(kept, state.frozen.units * self.unit), 1)

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        layout = self.host_layout(spec)

        def zeros(*shape: int) -> Array:
            return jnp.zeros((spec.batch, spec.kv_heads, *shape), spec.dtype)

        basis = self.no_basis(spec)

        def summaries(count: int) -> Any:
            if not self.kept_summaries(spec):
                return None
            there = jnp.zeros((spec.batch, count, self.unit), bool)
            return self.summarize(spec, zeros(count, self.unit, spec.head_dim), there, basis)

        ring = zeros(self.ring_slots(spec), spec.head_dim)
        chosen = jnp.full((spec.batch, spec.kv_heads, self.count(spec)), -1, jnp.int32)
        code = None
        if self.from_values(spec):
            code = ValueCodec().empty(spec.batch, layout.units, self.unit, Sizes.of(spec))
        frozen = UnitFrozen(jnp.zeros(spec.batch, jnp.int32), summaries(layout.units), basis, code)
        return LayerState(frozen, UnitLive(KeyValues(ring, ring), summaries(layout.tail_units), chosen))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Write the whole units to the host tier. Keep their summaries and the newest tokens on the device."""
        layout, slots = self.host_layout(spec), self.ring_slots(spec)
        units, basis = prompt.lengths // self.unit, self.learn(spec, prompt, fitted)
        rows = (self.stored(prompt.k_post, basis), prompt.v)
        k, v = (fill_ring(x, prompt.lengths, slots) for x in rows)
        planes = [to_chunks(x, layout.units, self.unit) for x in rows]
        there = (jnp.arange(layout.units) < units[:, None])[..., None] & jnp.ones(self.unit, bool)
        summaries = self.summarize(spec, planes[0], there, basis) if self.kept_summaries(spec) else None
        code, width = None, layout.planes * self.unit * spec.head_dim
        if self.from_values(spec):
            code = ValueCodec().encode(prompt.k_pre, prompt.lengths, layout.units, self.unit, values=prompt.v)
        data = jnp.stack(planes[-layout.planes :], axis=3).reshape(spec.batch, spec.kv_heads, layout.units, width)
        live = state.live.replace(recent=KeyValues(k, v))
        # The prompt's last, incomplete unit is in the ring. `append` writes it to the tail with the next token.
        write = HostWrite(data) if layout.units else None
        return state.replace(frozen=UnitFrozen(units, summaries, basis, code), live=live), write

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the new tokens to the ring, and the units they are in, even incomplete ones, to the tail."""
        slots, ring, basis = self.ring_slots(spec), state.live.recent, state.frozen.basis
        recent = ring.written(self.stored(step.k_post, basis), step.v, step.positions % slots, step.valid)
        touched = (step.positions.shape[1] - 1) // self.unit + 2 - (self.unit == 1)
        units = step.positions[:, :1] // self.unit + jnp.arange(touched)
        tokens = units[..., None] * self.unit + jnp.arange(self.unit)
        end = step.lengths + step.valid.sum(axis=1, dtype=jnp.int32)
        there = tokens < end[:, None, None]
        index = (tokens % slots).reshape(spec.batch, 1, -1, 1)
        shape = (spec.batch, spec.kv_heads, touched, self.unit, spec.head_dim)
        rows = (jnp.take_along_axis(x, index, axis=2).reshape(shape) for x in (recent.k, recent.v))
        keys, values = (jnp.where(there[:, None, ..., None], x, 0) for x in rows)
        planes = [values] if self.from_values(spec) else [keys, values]
        data = jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, touched, -1)
        place = units - state.frozen.units[:, None]
        valid = there.any(-1) & step.valid[:, :1]
        summaries = state.live.summaries
        if self.kept_summaries(spec):
            fresh = self.summarize(spec, keys, there, basis)
            summaries = jax.tree.map(functools.partial(put_units, place=place, valid=valid), summaries, fresh)
        live = state.live.replace(recent=recent, summaries=summaries)
        return state.replace(live=live), HostWrite(data, place, valid)

    # One step

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        """Select the best units for each query. The units of query t are entries t * k to t * k + k - 1."""
        layout, frozen = self.host_layout(spec), state.frozen
        q = group_queries(self.stored(self.query(step), frozen.basis), spec.kv_heads)
        # With equal queries, XLA would make one product of two, and copy all summaries for it in every step.
        both = self.both_summaries(spec, state)
        asked = zip(both, (q, jax.lax.optimization_barrier(q))[: len(both)], strict=True)
        scores = jnp.concatenate([self.score(spec, own, query, frozen.basis) for own, query in asked], axis=3)
        unit = _unit_of_place(layout, frozen.units)
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
        rebuild = None
        if (code := frozen.code) is not None:
            rebuild = Rebuild(
                code.left, code.right, step.inverse, tail_unit=frozen.units, codec=ValueCodec(), unit=self.unit
            )
        selection = Selection(ids.reshape(flat), good.reshape(flat), hit=hit.reshape(flat), rebuild=rebuild)
        return selection, state.replace(live=state.live.replace(selected=chosen))

    def both_summaries(self, spec: CacheSpec, state: LayerState) -> list[Any]:
        """Return the summaries of the prompt's units and of the tail's units."""
        if self.kept_summaries(spec):
            return [state.frozen.summaries, state.live.summaries]
        layout, tier = self.host_layout(spec), state.host
        assert tier.tail is not None
        rows = [tier.prompt.array] if tier.prompt is not None else []
        return [self.resident_summaries(x) for x in (*rows, tier.tail.array[:, :, : layout.tail_units])]

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Compute exact attention over each query's recent tokens and its fetched units."""
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
        return attend(query, pieces, spec.scale, step.sinks), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        first = self.first_recent(lengths - 1)
        selected = jnp.minimum(first, self.wanted(spec) * self.unit)
        if self.top_p < 1:
            selected = (state.live.selected >= 0).sum(axis=2).mean(axis=1, dtype=jnp.float32) * self.unit
        counts = {"window": lengths - first, "selected": selected}
        return {name: tokens.astype(jnp.float32) for name, tokens in counts.items()}

    # Costs

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> Bytes:
        parts = fetched_bytes(spec, state, "selected", self.count(spec) * self.unit)
        device, host = parts["selected"]
        return parts | {"selected": (device, host // 2 if self.from_values(spec) else host)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the scores of all units, the attended rows twice and once in float32, and their scores."""
        layout = self.host_layout(spec)
        units, rows = layout.units + layout.tail_units, self.count(spec) * self.unit + self.ring_slots(spec)
        wide = spec.batch * spec.kv_heads * rows * spec.head_dim * (2 * 2 * jnp.dtype(spec.dtype).itemsize + 2 * 4)
        return 4 * 4 * spec.batch * spec.q_heads * (units + rows) + wide
