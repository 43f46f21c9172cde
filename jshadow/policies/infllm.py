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
and here each KV head has one. This attention is the share among the tokens of the window, without an attention sink of
the model. All heads select the same blocks. A pool on the device keeps some blocks, and the least recently used block
is replaced first.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import AttentionKind, ModelConfig
from jshadow.ops.attention import MASKED, Piece, attend, attention_probs, group_queries
from jshadow.ops.layout import fill_ring, ring_positions, to_chunks, top_k, write_rows
from jshadow.ops.rope import RopeConfig, cos_sin, query_factor, rotate
from jshadow.policies.base import Bytes, UniformPolicy, fetched_bytes
from jshadow.policies.capabilities import Budgeted, OwnPrefill, Sized
from jshadow.policies.checks import check_range
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece
from jshadow.policies.registry import register
from jshadow.policies.sizing import Falling


class InfLLMFrozen(struct.PyTreeNode):
    """The blocks of the prompt.

    Attributes:
        units: number of the prompt's blocks that are on the host, int32 [B].
        representatives: mean keys of the blocks' representative tokens [B, h_kv, U, d].
    """

    units: Array
    representatives: Array


class InfLLMLive(struct.PyTreeNode):
    """The part that decoding changes.

    Attributes:
        sinks: keys and values of the first tokens [B, h_kv, sinks, d].
        ring: a ring buffer of the newest tokens' keys and values [B, h_kv, R, d]. The token at position p is in slot
            p % R.
        mass: sum of the attention probabilities that each token in the ring got while it was in the window, float32
            [B, h_kv, R].
        representatives: mean keys of the blocks after the prompt [B, h_kv, T, d]. In row b, entry j is block
            units[b] + j.
        pool: keys and values of the C blocks on the device [B, h_kv, C * unit, d].
        held: id of the block in each slot of the pool, int32 [B, C]; -1 in an empty slot. Ids are those of
            `Selection.ids`: blocks of the tail follow those of the prompt.
        used: position of the last query that attended to the block in each slot, int32 [B, C]; -1 if none did.
    """

    sinks: KeyValues
    ring: KeyValues
    mass: Array
    representatives: Array
    pool: KeyValues
    held: Array
    used: Array


_SUB_BLOCK = 64  # number of queries whose scores are in memory at once


class Memory(struct.PyTreeNode):
    """The arrays that each piece of a prompt passes on to the next.

    Attributes:
        mass: sum of the attention probabilities that each token got while it was in a query's window, float32
            [B, h_kv, S].
        representatives: mean keys of the blocks before the window [B, h_kv, U, d].
    """

    mass: Array
    representatives: Array


def _far_queries(q_pre: Array, distance: int, inverse: Array, rope: RopeConfig) -> Array:
    """Rotate all queries [B, T, h_q, d] to the position `distance`, so that keys before RoPE are at that distance."""
    return rotate(q_pre, *cos_sin(jnp.full((1, 1, 1), distance), inverse), query_factor(rope))


def mean_key(keys: Array, mass: Array, count: int) -> Array:
    """Return the mean of the `count` keys with the most mass in each block [B, h, n, d], in the dtype of the keys.

    Keys are [B, h, n, unit, d]. `mass`, float32 [B, h, n, unit], is the sum of the attention that each key got.
    """
    ids = top_k(mass, min(count, mass.shape[3]))
    chosen = jnp.take_along_axis(keys, ids[..., None], axis=3).astype(jnp.float32)
    return chosen.mean(axis=3).astype(keys.dtype)


@dataclasses.dataclass(frozen=True)
class InfLLMPrefill(PrefillAttention):
    """Prefill attention in which each `multiple` consecutive queries share their blocks.

    Attributes:
        window: as in InfLLM.
        sinks: as in InfLLM.
        count: number of blocks that a query attends to.
        unit: tokens in a block.
        representatives: as in InfLLM.
        multiple: number of consecutive queries that share their blocks.
    """

    window: int
    sinks: int
    count: int
    unit: int
    representatives: int
    multiple: int

    takes_sinks = True

    def label(self, tokens: int | None = None) -> str:
        return "infllm"

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks in a prompt of `tokens` tokens."""
        return max(tokens - self.sinks, 0) // self.unit

    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> Memory:
        batch, tokens, heads, dim = prompt.k_pre.shape
        mean_keys = jnp.zeros((batch, heads, self.blocks(tokens), dim), prompt.k_pre.dtype)
        return Memory(jnp.zeros((batch, heads, tokens), jnp.float32), mean_keys)

    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: Memory
    ) -> tuple[Array, Memory]:
        """Process the queries in groups of `multiple`, one group after the other."""
        batch, size, heads, dim = piece.q_post.shape
        assert piece.q_pre is not None, "this attention is not `ahead`"
        far = _far_queries(piece.q_pre, self.window, piece.inverse, kind.rope)

        def units(x: Array) -> Array:
            return x.reshape(batch, size // self.multiple, self.multiple, heads, dim).swapaxes(0, 1)

        run = functools.partial(self.one_unit, prompt, config.attention_scale, piece.sinks)
        starts = piece.first + jnp.arange(size // self.multiple) * self.multiple
        memory, out = lax.scan(run, aux, (starts, units(piece.q_post), units(far)))
        return out.swapaxes(0, 1).reshape(batch, size, heads, dim), memory

    def one_unit(
        self, prompt: PromptKV, scale: float, sinks: Array | None, memory: Memory, unit: tuple[Array, Array, Array]
    ) -> tuple[Memory, Array]:
        """Compute the attention of one group of queries that share their blocks [B, multiple, h_q, d], and the new
        memory.

        `unit` is the position of the first query, the queries after RoPE, and the queries rotated by `_far_queries`.
        """
        first, q, far = unit
        memory = self.remember(prompt, memory, first)
        real = first + jnp.arange(self.multiple) < prompt.lengths[:, None]
        keys, values, place = self.far_rows(prompt, memory, first, far, real)
        # the union of the windows of all queries in the group
        tokens = prompt.k_post.shape[1]
        width = min(self.window + self.multiple, tokens)
        start = jnp.clip(first - self.window, 0, tokens - width)
        near_k, near_v = (lax.dynamic_slice_in_dim(x, start, width, axis=1) for x in (prompt.k_post, prompt.v))
        token = start + jnp.arange(width)
        sub = _SUB_BLOCK if self.multiple % _SUB_BLOCK == 0 else self.multiple

        def some(index: Array) -> tuple[Array, Array]:
            position = first + index * sub + jnp.arange(sub)[:, None]
            queries = [lax.dynamic_slice_in_dim(x, index * sub, sub, axis=1) for x in (q, far)]
            q_near, q_far = (group_queries(x, prompt.k_post.shape[2]) for x in queries)
            near = jnp.einsum("bhgtd,bnhd->bhgtn", q_near, near_k, preferred_element_type=jnp.float32) * scale
            near = jnp.where((token <= position) & (token > position - self.window), near, MASKED)
            away = jnp.einsum("bhgtd,bnhd->bhgtn", q_far, keys, preferred_element_type=jnp.float32) * scale
            seen = (place >= 0)[:, None] & (place[:, None] <= position - self.window)
            away = jnp.where(seen[:, None, None], away, MASKED)
            # every query attends to its own token, so the largest score is not a masked one
            top = jnp.maximum(near.max(-1), away.max(-1))[..., None]
            near_weight, away_weight = jnp.exp(near - top), jnp.exp(away - top)
            total = near_weight.sum(-1) + away_weight.sum(-1)
            if sinks is not None:
                # A sink far above all scores gives an infinite total, and an output of 0.
                logits = sinks.astype(jnp.float32).reshape(*top.shape[1:3], 1)
                total = total + jnp.exp(logits - top[..., 0])
            parts = [(near_weight, near_v), (away_weight, values)]
            out = sum(
                jnp.einsum("bhgtn,bnhd->bhgtd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
                for weight, v in parts
            )
            counts = lax.dynamic_slice_in_dim(real, index * sub, sub, axis=1)[:, None, None, :, None]
            share = jnp.where(counts, near_weight / near_weight.sum(-1, keepdims=True), 0).sum(axis=(2, 3))
            out = (out / total[..., None]).transpose(0, 3, 1, 2, 4)
            return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(q.dtype), share

        out, share = lax.map(some, jnp.arange(self.multiple // sub))
        old = lax.dynamic_slice_in_dim(memory.mass, start, width, axis=2)
        mass = lax.dynamic_update_slice_in_dim(memory.mass, old + share.sum(axis=0), start, axis=2)
        out = out.swapaxes(0, 1).reshape(q.shape)
        return memory.replace(mass=mass), out

    def left(self, position: Array) -> Array:
        """Return the number of blocks that lie completely before the window of a query at `position`."""
        return jnp.maximum(position - self.window + 1 - self.sinks, 0) // self.unit

    def remember(self, prompt: PromptKV, memory: Memory, first: Array) -> Memory:
        """Add the representatives of the blocks that have left the window since the previous group of queries."""
        batch, heads, total, dim = memory.representatives.shape
        fresh = min(-(-self.multiple // self.unit) + 1, total)
        if not fresh:
            return memory
        begin = jnp.clip(self.left(first) - fresh, 0, total - fresh)
        start = self.sinks + begin * self.unit

        def rows(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, start, fresh * self.unit, axis=1).swapaxes(1, 2)

        keys = rows(prompt.k_pre).reshape(batch, heads, fresh, self.unit, dim)
        mass = lax.dynamic_slice_in_dim(memory.mass, start, fresh * self.unit, axis=2)
        mean_keys = mean_key(keys, mass.reshape(batch, heads, fresh, self.unit), self.representatives)
        return memory.replace(
            representatives=lax.dynamic_update_slice_in_dim(memory.representatives, mean_keys, begin, axis=2)
        )

    def far_rows(
        self, prompt: PromptKV, memory: Memory, first: Array, far: Array, real: Array
    ) -> tuple[Array, Array, Array]:
        """Gather the tokens outside the window that a group of queries attends to.

        `far` are the queries rotated by `_far_queries` [B, multiple, h_q, d], and `real`, bool [B, multiple], tells
        which are
        real tokens. Return keys before RoPE and values [B, n, h_kv, d], and their positions int32 [B, n], -1 in unused
        entries.
        """
        batch, tokens, heads, dim = prompt.k_pre.shape
        blocks = self.left(first)
        # the sinks; then the tokens of the block that is leaving the window, and those that leave it within the group
        rest = self.sinks + blocks * self.unit + jnp.arange(self.unit + self.multiple)
        place = jnp.concatenate([jnp.arange(min(self.sinks, tokens)), jnp.where(rest < tokens, rest, -1)])
        place = jnp.broadcast_to(place, (batch, place.shape[0]))
        count = min(self.count, memory.representatives.shape[2])
        if count:
            queries = jnp.where(real[..., None, None], far.astype(jnp.float32), 0).sum(axis=1)
            mean = queries / jnp.maximum(real.sum(axis=1), 1)[:, None, None]
            mean = mean.reshape(batch, heads, -1, dim).sum(axis=2)
            kept = memory.representatives.astype(jnp.float32)
            scores = jnp.einsum("bhd,bhnd->bn", mean, kept, precision="highest")
            candidate = jnp.arange(scores.shape[1]) < blocks
            ids = top_k(jnp.where(candidate, scores, -jnp.inf), count)
            found = self.sinks + ids[..., None] * self.unit + jnp.arange(self.unit)
            found = jnp.where((ids < blocks)[..., None], found, -1).reshape(batch, -1)
            place = jnp.concatenate([place, found], axis=1)
        index = jnp.maximum(place, 0)[:, :, None, None]
        keys, values = (jnp.take_along_axis(x, index, axis=1, mode="clip") for x in (prompt.k_pre, prompt.v))
        return keys, values, place

    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Count a group's scores and their softmax, its rows outside the window, and the other temporaries.

        The other temporaries are the far queries, the mass and the representatives.
        """
        near, sub = self.window + self.multiple, _SUB_BLOCK if self.multiple % _SUB_BLOCK == 0 else self.multiple
        far = self.sinks + self.unit + self.multiple + self.count * self.unit
        scores = 5 * 4 * config.q_heads * sub * (near + far)
        rows = 2 * 4 * config.key_columns * (far + near)
        queries = 3 * 4 * size * config.q_heads * config.head_dim
        kept = 4 * config.key_columns * self.blocks(tokens) + 2 * 4 * config.kv_heads * tokens
        return batch * (scores + rows + queries + kept)


@register(
    small={"window": 10, "sinks": 3, "budget": 8, "unit": 4, "representatives": 2, "query_block": 8},
    lossless=lambda tokens, config: {"window": tokens},
)
@dataclasses.dataclass(frozen=True)
class InfLLM(UniformPolicy, OwnPrefill, Budgeted, Sized):
    """Attend to the window, the first tokens and the best blocks.

    Attributes:
        window: number of newest tokens, which are attended to at their true distance.
        sinks: number of first tokens, which are always attended to.
        budget: number of tokens in the blocks that a query attends to.
        unit: tokens in a block.
        representatives: number of tokens of a block whose mean key is used to score the block.
        cached: number of tokens in the blocks that the device keeps. None: twice the budget.
        fetched: maximum number of tokens that a step fetches, in blocks. None: the budget, as published. A smaller
            number limits the transfer: a selected block that is neither in the pool nor fetched is not attended to in
            this step.
        query_block: number of consecutive prompt tokens that share their blocks.
    """

    splits_heads = False

    window: int = 4096
    sinks: int = 128
    budget: int = 2048
    unit: int = 128
    representatives: int = 4
    cached: int | None = None
    fetched: int | None = None
    query_block: int = 512

    name = "infllm"
    takes_sinks = True
    source = "arXiv 2402.04617, section 3"
    budget_fields = ("budget", "cached", "fetched")

    @property
    def budget_unit(self) -> int:
        return self.unit

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "window", self.window, 1)
        check_range(self.name, "sinks", self.sinks, 0)
        check_range(self.name, "unit", self.unit, 1)
        check_range(self.name, "budget", self.budget, self.unit)
        check_range(self.name, "representatives", self.representatives, 1, self.unit)
        check_range(self.name, "query_block", self.query_block, 1)
        resolved = dataclasses.replace(
            self,
            cached=2 * self.budget if self.cached is None else self.cached,
            fetched=self.budget if self.fetched is None else self.fetched,
        )
        check_range(self.name, "cached", resolved.cached, self.budget)
        check_range(self.name, "fetched", resolved.fetched, self.unit, self.budget)
        return resolved

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        if self.left(capacity - 1) >= 1:
            return None
        least = self.window + self.sinks + self.unit
        return f"capacity {capacity} is below infllm's window + sinks + unit = {least} tokens"

    def prefill_attention(self) -> PrefillAttention:
        return InfLLMPrefill(
            self.window, self.sinks, self.budget // self.unit, self.unit, self.representatives, self.query_block
        )

    # Sizes

    def left(self, position: int) -> int:
        """Return the number of blocks that lie completely before the window of a query at `position`."""
        return max(position - self.window + 1 - self.sinks, 0) // self.unit

    def ring_slots(self, spec: CacheSpec) -> int:
        """Return the number of slots R of the ring: the window, and the block that is leaving it."""
        return min(self.window + self.unit, spec.capacity)

    def count(self, spec: CacheSpec) -> int:
        """Return the maximum number of blocks that a query attends to."""
        return min(self.budget // self.unit, self.left(spec.capacity - 1))

    def pool_slots(self, spec: CacheSpec) -> int:
        """Return the number of blocks C in the pool."""
        assert self.cached is not None
        return min(self.cached // self.unit, self.left(spec.capacity - 1))

    def moved(self, spec: CacheSpec) -> int:
        """Return the maximum number of blocks that a step fetches."""
        assert self.fetched is not None
        return min(self.fetched // self.unit, self.count(spec))

    def window_slots(self, capacity: int, shortest: int) -> int:
        return self.left(capacity - 1) - self.left(shortest - 1)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Return the layout of the keys before RoPE and values of all blocks, or None if no block leaves the window."""
        units = self.left(spec.capacity - 1)
        return HostLayout(spec.kv_heads, units, self.unit, 2, max(spec.window, 1)) if units else None

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        if self.host_layout(spec) is None:
            return spec.capacity - lengths
        blocks = state.frozen.units + max(spec.window, 1) + 1  # the last of these does not fit, and may not be complete
        return jnp.minimum(spec.capacity, self.sinks + blocks * self.unit + self.window - 1) - lengths

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return policies that use half of the slots for the window, at most 1/16 for sinks, and the rest for the pool.

        There is one group for each size of blocks, from 128 tokens to 4. A group with larger blocks needs more slots.
        """
        cls = type(self)

        def make(slots: int, unit: int) -> Any:
            sinks, window = min(cls.sinks, slots // 16), max(slots // 2, 1)
            cached = max((slots - sinks - window) // unit, 2)
            return cls(
                window=window,
                sinks=sinks,
                budget=cached // 2 * unit,
                unit=unit,
                cached=cached * unit,
                representatives=min(cls.representatives, unit),
            )

        def group(unit: int) -> Sequence[Self]:
            least = 2 if unit == 4 else 20 * unit
            return Falling(lambda slots: make(slots, unit), least, max(num_tokens, least))

        return [group(unit) for unit in (128, 64, 32, 16, 8, 4)]

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
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
        ring = live.ring.written(step.k_pre, step.v, position % slots, step.valid)
        if live.sinks.k.shape[2]:
            early = step.valid & (position < live.sinks.k.shape[2])
            live = live.replace(sinks=live.sinks.written(step.k_pre, step.v, position, early))
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
        far = _far_queries(step.q_pre, self.window, step.inverse, spec.rope)[:, 0].astype(jnp.float32)
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
        query = _far_queries(step.q_pre, self.window, step.inverse, spec.rope)
        place = jnp.where(near, token - position + self.window, 0)
        window = Piece(rotate(live.ring.k, *cos_sin(place[:, None], step.inverse)), live.ring.v, near[:, None, None])
        away = [(live.ring, rest), (live.sinks, first), (live.pool, chosen)]
        pieces = [window, *(Piece(kv.k, kv.v, seen[:, None, None]) for kv, seen in away)]
        out = attend(query, pieces, spec.scale, step.sinks)
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
        return super().compress_bytes(spec, tokens) + 4 * 4 * spec.batch * max(tokens, spec.capacity) * spec.kv_heads

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> Bytes:
        return fetched_bytes(spec, state, "moved", self.moved(spec) * self.unit)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the rotated window, the scores of all slots, and the fetched blocks."""
        ring, item = self.ring_slots(spec), jnp.dtype(spec.dtype).itemsize
        slots = 2 * ring + min(self.sinks, spec.capacity) + self.pool_slots(spec) * self.unit
        rows = 3 * ring + 4 * self.moved(spec) * self.unit + slots
        wide = spec.batch * spec.kv_heads * rows * spec.head_dim * (4 + item)
        return wide + 5 * 4 * spec.batch * spec.q_heads * slots
