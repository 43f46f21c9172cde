"""InfLLM: a sliding window and a memory of earlier blocks (Xiao et al. 2024, arXiv 2402.04617, section 3).

A query attends to three kinds of tokens. The first is the window of tokens that ends at the query, at their true
distances. The second is the first tokens of the text (sinks). The third is a few of the blocks between the two: those
whose representative tokens match the query best. All tokens outside the window are treated as if their distance was the
size of the window, so the model never sees a distance that it was not trained on. For this their keys are stored before
RoPE, and queries are rotated by that distance.

Prefill works in the same way: each `query_block` consecutive queries share their blocks. InfLLM is the only policy here
whose prefill attention is not exact.

A block's representatives are the tokens that got the most attention while they were in the window. Their keys are
averaged, as in the published code; the paper does not average them. The code keeps one mean key for each query head,
and here each KV head has one. All heads select the same blocks. A pool on the device keeps some blocks, and the least
recently used block is replaced first.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import Piece, attend, attention_probs
from jshadow.ops.layout import fill_ring, ring_positions, to_chunks, top_k, write_rows
from jshadow.ops.rope import cos_sin, rotate
from jshadow.policies.costs import Costs
from jshadow.policies.infllm.prefill import far_queries, mean_key
from jshadow.policies.infllm.settings import InfLLMSettings
from jshadow.policies.infllm.state import InfLLMFrozen, InfLLMLive
from jshadow.policies.registry import register


@register(
    small={"window": 10, "sinks": 3, "budget": 8, "unit": 4, "representatives": 2, "query_block": 8},
    lossless=lambda tokens, config: {"window": tokens},
)
@dataclasses.dataclass(frozen=True)
class InfLLM(InfLLMSettings, Costs):
    """Attend to the window, the first tokens and the best blocks. The settings are those of `InfLLMSettings`."""

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Return a state without tokens and with an empty pool."""

        def zeros(count: int) -> Array:
            return jnp.zeros((spec.batch, spec.kv_heads, count, spec.head_dim), spec.dtype)

        def pair(count: int) -> KeyValues:
            return KeyValues(zeros(count), zeros(count))

        layout, cached = self.host_layout(spec), self.pool_slots(spec)
        units, tail = (layout.units, layout.tail_units) if layout else (0, 0)
        nothing = jnp.full((spec.batch, cached), -1, jnp.int32)
        mass = jnp.zeros((spec.batch, spec.kv_heads, self.ring_slots(spec)), jnp.float32)
        sinks = min(self.sinks, spec.capacity)
        return LayerState(
            InfLLMFrozen(jnp.zeros(spec.batch, jnp.int32), zeros(units)),
            InfLLMLive(
                pair(sinks), pair(self.ring_slots(spec)), mass, zeros(tail), pair(cached * self.unit), nothing, nothing
            ),
        )

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Write the blocks before the window to the host tier. Keep their representatives, the window and the sinks."""
        mass = prompt.extra.mass
        slots, live = self.ring_slots(spec), state.live
        sinks = live.sinks.k.shape[2]
        first = KeyValues(*(to_chunks(x, 1, sinks)[:, :, 0] for x in (prompt.k_pre, prompt.v)))
        ring = KeyValues(*(fill_ring(x, prompt.lengths, slots) for x in (prompt.k_pre, prompt.v)))
        kept = fill_ring(mass.transpose(0, 2, 1)[..., None], prompt.lengths, slots)[..., 0]
        live = live.replace(sinks=first, ring=ring, mass=kept)
        layout = self.host_layout(spec)
        if layout is None:
            return state.replace(live=live), None
        units = jnp.maximum(prompt.lengths - self.window - self.sinks, 0) // self.unit
        planes = [to_chunks(x[:, self.sinks :], layout.units, self.unit) for x in (prompt.k_pre, prompt.v)]
        given = to_chunks(mass.transpose(0, 2, 1)[:, self.sinks :, :, None], layout.units, self.unit)[..., 0]
        mean_keys = mean_key(planes[0], given, self.representatives)
        there = (jnp.arange(layout.units) < units[:, None])[:, None, :, None]
        data = jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, layout.units, -1)
        frozen = InfLLMFrozen(units, jnp.where(there, mean_keys, 0))
        return state.replace(frozen=frozen, live=live), HostWrite(data)

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the token to the ring. If a whole block leaves the window in this step, write it to the tail."""
        slots, live, position = self.ring_slots(spec), state.live, step.positions
        ring = KeyValues(
            *(
                write_rows(old, new, position % slots, step.valid)
                for old, new in ((live.ring.k, step.k_pre), (live.ring.v, step.v))
            )
        )
        if live.sinks.k.shape[2]:
            early = step.valid & (position < live.sinks.k.shape[2])
            sinks = KeyValues(
                *(
                    write_rows(old, new, position, early)
                    for old, new in ((live.sinks.k, step.k_pre), (live.sinks.v, step.v))
                )
            )
            live = live.replace(sinks=sinks)
        fresh = (jnp.arange(slots) == position % slots) & step.valid
        live = live.replace(ring=ring, mass=jnp.where(fresh[:, None], 0, live.mass))
        if self.host_layout(spec) is None:
            return state.replace(live=live), None
        end = position[:, 0] - self.window + 1  # position of the first token in the window
        leaving = (end - self.sinks) // self.unit - 1
        complete = ((end - self.sinks) % self.unit == 0) & (leaving >= state.frozen.units) & step.valid[:, 0]
        tokens = (end[:, None] - self.unit + jnp.arange(self.unit)) % slots
        keys, values = (jnp.take_along_axis(x, tokens[:, None, :, None], axis=2) for x in (ring.k, ring.v))
        given = jnp.take_along_axis(live.mass, tokens[:, None], axis=2)
        mean_keys = mean_key(keys[:, :, None], given[:, :, None], self.representatives)
        place, valid = (leaving - state.frozen.units)[:, None], complete[:, None]
        representatives = write_rows(live.representatives, mean_keys.transpose(0, 2, 1, 3), place, valid)
        data = jnp.stack([keys, values], axis=2).reshape(spec.batch, spec.kv_heads, 1, -1)
        return state.replace(live=live.replace(representatives=representatives)), HostWrite(data, place, valid)

    # One step

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        """Select the best blocks, the same ones for all heads. Blocks that are not in the pool come first."""
        layout, frozen, live = self.host_layout(spec), state.frozen, state.live
        if layout is None:
            return None, state
        far = far_queries(step.q_pre, self.window, step.inverse, spec.rope)[:, 0].astype(jnp.float32)
        q = far.reshape(spec.batch, spec.kv_heads, spec.group, spec.head_dim).sum(axis=2)
        both = jnp.concatenate([frozen.representatives, live.representatives], axis=2)
        scores = jnp.einsum("bhd,bhnd->bn", q, both.astype(jnp.float32), precision="highest")
        places, start = jnp.arange(layout.units + layout.tail_units), frozen.units[:, None]
        block = jnp.where(places < layout.units, places, places - layout.units + start)
        real = (places < start) | (places >= layout.units)
        out = self.sinks + (block + 1) * self.unit <= step.positions - self.window + 1
        candidate = real & out & step.valid
        ids = top_k(jnp.where(candidate, scores, -jnp.inf), self.count(spec))
        good = jnp.take_along_axis(candidate, ids, axis=1)
        there = (ids[:, :, None] == live.held[:, None]) & good[:, :, None]  # [B, n, C]
        used = jnp.where(there.any(axis=1), step.positions, live.used)
        hit = there.any(axis=2)
        order = jnp.argsort(hit | ~good, axis=1, stable=True)[:, : self.moved(spec)]
        ids, good, hit = (jnp.take_along_axis(x, order, axis=1) for x in (ids, good, hit))
        missing = good & ~hit
        # the n-th missing block replaces the n-th least recently used block
        slots = jnp.argsort(used, axis=1, stable=True)[:, : self.moved(spec)]
        row, slots = jnp.arange(spec.batch)[:, None], jnp.where(missing, slots, self.pool_slots(spec))
        held = live.held.at[row, slots].set(ids, mode="drop")
        used = used.at[row, slots].set(step.positions, mode="drop")
        state = state.replace(live=live.replace(held=held, used=used))
        if self.moved(spec) < self.count(spec):
            return Selection(ids[:, None], missing[:, None]), state
        return Selection(ids[:, None], good[:, None], hit[:, None]), state

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        """Write the fetched blocks to the slots of the pool that `select` assigned to them."""
        assert fetched.k is not None
        live, ids = state.live, selection.ids[:, 0]
        slots = jnp.argmax(ids[:, :, None] == live.held[:, None], axis=2)

        def put(pool: Array, rows: Array) -> Array:
            units = (spec.batch, spec.kv_heads, -1, self.unit * spec.head_dim)
            rows = rows.reshape(units).swapaxes(1, 2)
            return write_rows(pool.reshape(units), rows, slots, selection.valid[:, 0]).reshape(pool.shape)

        pool = KeyValues(put(live.pool.k, fetched.k), put(live.pool.v, fetched.v))
        return state.replace(live=live.replace(pool=pool))

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Compute one softmax over the window at true distances and over all other tokens at the window's size."""
        live, slots, position = state.live, self.ring_slots(spec), step.positions
        lengths = step.lengths + step.valid.sum(axis=1, dtype=jnp.int32)
        token = ring_positions(lengths, slots)
        near = (token >= 0) & (token <= position) & (token > position - self.window)
        blocks = jnp.maximum(position - self.window + 1 - self.sinks, 0) // self.unit
        rest = (token >= self.sinks + blocks * self.unit) & (token <= position - self.window)
        first = jnp.arange(live.sinks.k.shape[2]) <= position - self.window
        chosen = jnp.repeat((live.held >= 0) & (live.used == position), self.unit, axis=1)
        # The query is rotated to position `window`. Tokens outside the window are at position 0, and a token in the
        # window is at the position that keeps its distance from the query.
        query = far_queries(step.q_pre, self.window, step.inverse, spec.rope)
        place = jnp.where(near, token - position + self.window, 0)
        window = Piece(rotate(live.ring.k, *cos_sin(place[:, None], step.inverse)), live.ring.v, near[:, None, None])
        away = [(live.ring, rest), (live.sinks, first), (live.pool, chosen)]
        pieces = [window, *(Piece(kv.k, kv.v, seen[:, None, None]) for kv, seen in away)]
        out = attend(query, pieces, spec.scale)
        given = jnp.where(near[:, None], attention_probs(query, window, spec.scale).sum(axis=(2, 3)), 0)
        mass = jnp.where(step.valid[:, :1, None], live.mass + given, live.mass)
        return out, state.replace(live=live.replace(mass=mass))

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Count the tokens of the window, of the sinks outside it, and of the selected blocks.

        The tokens of a block that is still leaving the window count as part of the window.
        """
        out = jnp.maximum(lengths - self.window, 0)
        rest = jnp.maximum(out - self.sinks, 0) % self.unit
        chosen = ((state.live.held >= 0) & (state.live.used == lengths[:, None] - 1)).sum(axis=1) * self.unit
        window = jnp.minimum(lengths, self.window) + rest
        parts = {"window": window, "sinks": jnp.minimum(out, self.sinks), "selected": chosen}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    # Accounting

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count the default, and the sorting of the tokens of each block by attention."""
        return super().compress_bytes(spec, tokens) + 4 * 4 * spec.batch * max(tokens, spec.capacity) * spec.kv_heads

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Count all arrays on the device as read. The fetched blocks are moved from the host and read."""
        parts = {name: (device, 0) for name, (device, _) in layer_nbytes(state).items() if not name.startswith("host")}
        moved = 2 * spec.batch * spec.kv_heads * self.moved(spec) * self.unit * spec.head_dim
        size = moved * jnp.dtype(spec.dtype).itemsize
        return parts | {"moved": (size, 0 if spec.fetch == "resident" else size)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the rotated window, the scores of all slots, and the fetched blocks."""
        ring, item = self.ring_slots(spec), jnp.dtype(spec.dtype).itemsize
        slots = 2 * ring + min(self.sinks, spec.capacity) + self.pool_slots(spec) * self.unit
        rows = 3 * ring + 4 * self.moved(spec) * self.unit + slots
        wide = spec.batch * spec.kv_heads * rows * spec.head_dim * (4 + item)
        return wide + 5 * 4 * spec.batch * spec.q_heads * slots
