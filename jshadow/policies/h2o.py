"""H2O: heavy hitters and recent tokens, chosen again at every step (Zhang et al. 2023, arXiv 2306.14048, section 4).

The published code sums scores over the batch, and keeps one sum for each query head. That fits neither batches of
different lengths nor grouped queries. Here each KV head sums over its query heads, row by row. Tokens keep their
positions in the text, as in the code of the paper's accuracy experiments. In a model with attention sinks, the sink
takes its share of each query's attention, so a query adds less than 1 to the sums.
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
from jshadow.policies.eviction import best_positions, take_positions
from jshadow.policies.registry import register
from jshadow.policies.sizing import Falling

_SHARE = 0.1  # share of the capacity for heavy hitters, and again for recent tokens: together the paper's 20 %


class H2OLive(struct.PyTreeNode):
    """The tokens that each head keeps, in no particular order.

    C is the budget. A head has one extra slot: the next token is written to a free slot, and then one token is evicted.

    Example: B = 1, 2 heads, a budget of C = 3. positions [[[0, 5, 6, -1], [2, -1, 5, 6]]] means that head 0 keeps the
    tokens at positions 0, 5 and 6, and its last slot is free. Head 1 keeps those at 2, 5 and 6.

    Attributes:
        cache: keys after RoPE and values [B, h_kv, C + 1, d].
        positions: position of the token in each slot, int32 [B, h_kv, C + 1]; -1 for a free slot.
        mass: sum of the attention probabilities that the token has received from all queries of the head's group,
            float32 [B, h_kv, C + 1].
    """

    cache: KeyValues
    positions: Array
    mass: Array


@register(small={"heavy": 6, "recent": 8}, lossless=lambda tokens, config: {"heavy": 0, "recent": tokens})
@dataclasses.dataclass(frozen=True)
class H2O(UniformPolicy, Budgeted, Sized):
    """At every step, evict the token outside the recent window that has received the least attention.

    Attributes:
        heavy: number of tokens kept for their accumulated attention. None: a tenth of the capacity.
        recent: number of newest tokens, which are never evicted. None: a tenth of the capacity.
        normalize: divide a token's accumulated attention by the number of queries that could attend to it. The paper
            does not divide, so its sums are larger for early tokens.
    """

    heavy: int | None = None
    recent: int | None = None
    normalize: bool = False

    name = "h2o"
    takes_sinks = True
    source = "arXiv 2306.14048, section 4"
    budget_fields = ("heavy", "recent")

    @property
    def reads(self) -> HookInputs:
        return HookInputs(all_queries=True)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        tenth = max(1, round(_SHARE * capacity))
        resolved = dataclasses.replace(
            self,
            heavy=tenth if self.heavy is None else self.heavy,
            recent=tenth if self.recent is None else self.recent,
        )
        check_range(self.name, "heavy", resolved.heavy, 0)
        check_range(self.name, "recent", resolved.recent, 1)
        check_choice(self.name, "normalize", self.normalize, (False, True))
        return resolved

    def budget(self, capacity: int) -> int:
        """Return the number of tokens that a head keeps between steps, at most the capacity."""
        assert self.heavy is not None
        assert self.recent is not None
        return min(self.heavy + self.recent, capacity)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        shape = (spec.batch, spec.kv_heads, self.budget(spec.capacity) + 1)
        zeros = jnp.zeros((*shape, spec.head_dim), spec.dtype)
        return LayerState(live=H2OLive(KeyValues(zeros, zeros), jnp.full(shape, -1, jnp.int32), jnp.zeros(shape)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Sum the attention that each token receives, and keep the heaviest and the newest tokens."""
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
        """Return the score by which tokens are kept, from the sum `mass` of the attention that each has received,
        float32.

        `held` is the number of tokens that the row holds so far.
        """
        return mass / jnp.maximum(held - positions, 1) if self.normalize else mass

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the new token into the first free slot of each head."""
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
        live: H2OLive = state.live
        piece = Piece(live.cache.k, live.cache.v, (live.positions >= 0)[:, :, None])
        out = attend(step.q_post, [piece], spec.scale, step.sinks)
        given = attention_probs(step.q_post, piece, spec.scale, step.sinks).sum(axis=(2, 3))
        mass = jnp.where(step.valid[:, :1, None], live.mass + given, live.mass)
        return out, state.replace(live=self.evict(spec, live.replace(mass=mass), step))

    def evict(self, spec: CacheSpec, live: H2OLive, step: StepKV) -> H2OLive:
        """Free one slot in each head that holds more tokens than the budget.

        The token with the least `worth` is evicted. Recent tokens are never evicted. If several tokens have the same
        worth, the earliest one is evicted.
        """
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
        return {"kept": jnp.minimum(lengths, self.budget(spec.capacity) + 1).astype(jnp.float32)}

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count the bytes of `LayerCache.compress_bytes`, two copies of all queries with log-sum-exps, and one tile."""
        item = jnp.dtype(spec.dtype).itemsize
        queries = spec.batch * tokens * spec.q_heads * (spec.head_dim * item + 4)
        return super().compress_bytes(spec, tokens) + 2 * queries + 3 * 4 * spec.batch * spec.q_heads * 512 * 512

    def step_temporaries(self, spec: CacheSpec) -> int:
        slots = self.budget(spec.capacity) + 1
        return 6 * 4 * spec.batch * spec.q_heads * slots + 4 * spec.batch * spec.kv_heads * slots * spec.head_dim

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return one policy for each number of tokens from num_tokens down to 1.

        Half of the tokens are heavy hitters, and half are recent tokens.
        """
        cls = type(self)
        return [Falling(lambda slots: cls(heavy=slots // 2, recent=slots - slots // 2), 1, num_tokens)]
