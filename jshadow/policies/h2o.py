"""H2O: heavy hitters and recent tokens, chosen anew at every step (Zhang et al. 2023, arXiv 2306.14048, section 4).

The published code sums scores over the batch and per query head, which fits neither ragged batches nor grouped queries.
Here each KV head sums over its query heads. Positions stay the tokens' own, as in the paper's accuracy code.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, attention_probs, key_mass
from jshadow.ops.layout import write_rows
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.costs import Costs
from jshadow.policies.eviction import best_positions, take_positions
from jshadow.policies.registry import register
from jshadow.policies.sizing import Falling

SHARE = 0.1  # of the capacity, each for heavy hitters and for recent tokens: the paper's 20 % in all


class H2OLive(struct.PyTreeNode):
    """What is held; one slot more than the budget is where the next token goes.

    Attributes:
        cache: keys after RoPE and values [B, h_kv, C + 1, d].
        positions: of the token in each slot, int32 [B, h_kv, C + 1]; -1 for a free slot.
        mass: attention that each has been given, float32 [B, h_kv, C + 1].
    """

    cache: KeyValues
    positions: Array
    mass: Array


@register(small={"heavy": 6, "recent": 8}, lossless=lambda tokens, config: {"heavy": 0, "recent": tokens})
@dataclasses.dataclass(frozen=True)
class H2O(UniformPolicy, Budgeted, Sized, Costs):
    """Evict, at every step, the token outside the recent window that was attended to least.

    Attributes:
        heavy: tokens kept for their accumulated attention. None: a tenth of the capacity.
        recent: newest tokens, never evicted. None: a tenth of the capacity.
        normalise: divide what a token was given by the number of queries that could see it (raw sums favour early
            tokens, as the paper has it).
    """

    heavy: int | None = None
    recent: int | None = None
    normalise: bool = False

    name = "h2o"
    source = "arXiv 2306.14048, section 4"
    budget_fields = ("heavy", "recent")

    @property
    def reads(self) -> HookInputs:
        """All queries of the prompt."""
        return HookInputs(all_queries=True)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in a tenth of the capacity each, and check."""
        tenth = max(1, round(SHARE * capacity))
        resolved = dataclasses.replace(
            self,
            heavy=tenth if self.heavy is None else self.heavy,
            recent=tenth if self.recent is None else self.recent,
        )
        check_range(self.name, "heavy", resolved.heavy, 0)
        check_range(self.name, "recent", resolved.recent, 1)
        check_choice(self.name, "normalise", self.normalise, (False, True))
        return resolved

    def budget(self, capacity: int) -> int:
        """Tokens held between steps."""
        assert self.heavy is not None
        assert self.recent is not None
        return min(self.heavy + self.recent, capacity)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """All slots free."""
        shape = (spec.batch, spec.kv_heads, self.budget(spec.capacity) + 1)
        zeros = jnp.zeros((*shape, spec.head_dim), spec.dtype)
        return LayerState(live=H2OLive(KeyValues(zeros, zeros), jnp.full(shape, -1, jnp.int32), jnp.zeros(shape)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Sum the attention of all queries to each token; keep the best and the newest."""
        assert prompt.q_post is not None
        assert prompt.lse is not None
        assert self.recent is not None
        mass = key_mass(prompt.q_post, prompt.k_post, prompt.lse, prompt.lengths, spec.scale)
        worth = self.worth(mass, jnp.arange(mass.shape[2]), prompt.lengths[:, None, None])
        reserved = jnp.full_like(prompt.lengths, self.recent)
        at = best_positions(worth, prompt.lengths, reserved, self.budget(spec.capacity))
        at = jnp.pad(at, ((0, 0), (0, 0), (0, 1)), constant_values=prompt.k_post.shape[1])  # the free slot
        there = at < prompt.lengths[:, None, None]
        k, v = (take_positions(x, at).astype(spec.dtype) for x in (prompt.k_post, prompt.v))
        kept = jnp.take_along_axis(mass, jnp.minimum(at, mass.shape[2] - 1), axis=2)
        live: H2OLive = state.live
        held = live.replace(cache=KeyValues(k, v), positions=jnp.where(there, at, -1), mass=jnp.where(there, kept, 0))
        return state.replace(live=held), None

    def worth(self, mass: Array, positions: Array, held: Array) -> Array:
        """What a token's attention counts, once `held` tokens have come."""
        return mass / jnp.maximum(held - positions, 1) if self.normalise else mass

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Put the new token into each head's free slot."""
        live: H2OLive = state.live
        free = jnp.argmin(live.positions, axis=2)  # the first slot with -1
        batch, heads, slots = live.positions.shape
        valid = jnp.repeat(step.valid, heads, axis=0)

        def put(old: Array, new: Array) -> Array:
            rows, row = old.reshape(batch * heads, 1, slots, -1), new.reshape(batch * heads, 1, 1, -1)
            return write_rows(rows, row, free.reshape(batch * heads, 1), valid).reshape(old.shape)

        here = (jnp.arange(slots) == free[..., None]) & step.valid[:, :1, None]
        positions = jnp.where(here, step.positions[:, :1, None], live.positions)
        cache = KeyValues(put(live.cache.k, step.k_post[:, 0]), put(live.cache.v, step.v[:, 0]))
        held = live.replace(cache=cache, positions=positions, mass=jnp.where(here, 0, live.mass))
        return state.replace(live=held), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Attention over the budget and the new token; then the least worth is evicted."""
        live: H2OLive = state.live
        piece = Piece(live.cache.k, live.cache.v, (live.positions >= 0)[:, :, None])
        out = attend(step.q_post, [piece], spec.scale)
        given = attention_probs(step.q_post, piece, spec.scale).sum(axis=(2, 3))
        mass = jnp.where(step.valid[:, :1, None], live.mass + given, live.mass)
        return out, state.replace(live=self.evict(spec, live.replace(mass=mass), step))

    def evict(self, spec: CacheSpec, live: H2OLive, step: StepKV) -> H2OLive:
        """Free one slot of each head that holds more than the budget."""
        assert self.recent is not None
        held = step.positions[:, :1, None] + 1
        over = (live.positions >= 0).sum(axis=2, keepdims=True) > self.budget(spec.capacity)
        old = (live.positions >= 0) & (live.positions < held - self.recent)
        worth = jnp.where(old, self.worth(live.mass, live.positions, held), jnp.inf)
        tied = old & (worth == worth.min(axis=2, keepdims=True))
        first = jnp.where(tied, live.positions, jnp.iinfo(jnp.int32).max)
        gone = tied & (first == first.min(axis=2, keepdims=True)) & over & step.valid[:, :1, None]
        return live.replace(positions=jnp.where(gone, -1, live.positions), mass=jnp.where(gone, 0, live.mass))

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """The budget and the new token, at most."""
        return {"kept": jnp.minimum(lengths, self.budget(spec.capacity) + 1).astype(jnp.float32)}

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """All queries and their log-sum-exps, and a tile of attention."""
        item = jnp.dtype(spec.dtype).itemsize
        queries = spec.batch * tokens * spec.q_heads * (spec.head_dim * item + 4)
        return super().compress_bytes(spec, tokens) + 2 * queries + 3 * 4 * spec.batch * spec.q_heads * 512 * 512

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores twice, for the output and for what each token was given."""
        slots = self.budget(spec.capacity) + 1
        return 6 * 4 * spec.batch * spec.q_heads * slots + 4 * spec.batch * spec.kv_heads * slots * spec.head_dim

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """All numbers of tokens, half of them heavy hitters and half recent ones."""
        cls = type(self)
        return [Falling(lambda slots: cls(heavy=slots // 2, recent=slots - slots // 2), 1, num_tokens)]
