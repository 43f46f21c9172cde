"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al. 2023, arXiv 2309.17453, section 3.2)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend
from jshadow.ops.rope import cos_sin, query_factor, rotate
from jshadow.policies.base import UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_range
from jshadow.policies.full import OneCache
from jshadow.policies.registry import register
from jshadow.policies.sizing import Falling


@register(small={"sinks": 2, "window": 12}, lossless=lambda tokens, config: {"window": tokens})
@dataclasses.dataclass(frozen=True)
class StreamingLLM(UniformPolicy, Budgeted, Sized):
    """Keep the first tokens (attention sinks) and the newest ones. Evict the tokens between them.

    Slots [0, sinks) of the cache hold the first tokens. The rest is a ring buffer: the token at position p >= sinks is
    in slot sinks + (p - sinks) % window. Keys are stored before RoPE, because their rotation changes when older tokens
    are evicted.

    Attributes:
        sinks: number of first tokens that are never evicted.
        window: number of newest tokens that are kept, the current one included.
        rebase_positions: True: keys and queries are rotated by their index inside the cache, as in the paper. False:
            they are rotated by their position in the text, as in many benchmarks.
    """

    sinks: int = 4
    window: int = 2000
    rebase_positions: bool = True

    name = "streaming_llm"
    takes_sinks = True
    source = "arXiv 2309.17453, section 3.2"
    budget_fields = ("window",)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "sinks", self.sinks, 0)
        check_range(self.name, "window", self.window, 1)
        return self

    def slots(self, capacity: int) -> int:
        """Return the number of slots of the cache, at most the capacity."""
        return min(self.sinks + self.window, capacity)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        zeros = jnp.zeros((spec.batch, spec.kv_heads, self.slots(spec.capacity), spec.head_dim), spec.dtype)
        return LayerState(live=OneCache(KeyValues(zeros, zeros)))

    def held_positions(self, spec: CacheSpec, lengths: Array) -> Array:
        """Return the position of the token in each slot, int32 [B, slots]; -1 in a slot that no token has reached yet.

        Args:
            spec: the layer.
            lengths: number of tokens that each row has taken so far, evicted ones included, int32 [B].
        """
        slots = self.slots(spec.capacity)
        ring = slots - min(self.sinks, slots)
        slot = jnp.arange(slots)
        last = lengths[:, None] - 1
        if ring == 0:
            return jnp.where(slot <= last, slot, -1)
        recent = last - (last - slot) % ring  # the newest position that maps to this slot
        held = jnp.where(slot < self.sinks, slot, recent)
        return jnp.where((held <= last) & (held >= jnp.minimum(slot, self.sinks)), held, -1)

    def slot_of(self, spec: CacheSpec, positions: Array) -> Array:
        """Return the slot for the token at each position, int32, in the shape of positions."""
        slots = self.slots(spec.capacity)
        ring = max(slots - self.sinks, 1)
        return jnp.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % ring)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        held = self.held_positions(spec, prompt.lengths)
        index = jnp.maximum(held, 0)[:, :, None, None]
        k, v = (
            jnp.take_along_axis(x, index, axis=1, mode="clip").transpose(0, 2, 1, 3) for x in (prompt.k_pre, prompt.v)
        )
        return state.replace(live=OneCache(KeyValues(k, v))), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        slots = self.slot_of(spec, step.positions)
        return state.replace(live=OneCache(state.live.cache.written(step.k_pre, step.v, slots, step.valid))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Rotate the stored keys and attend to them."""
        lengths = step.positions[:, -1] + 1
        held = self.held_positions(spec, lengths)
        evicted = jnp.maximum(lengths - self.slots(spec.capacity), 0)[:, None] if self.rebase_positions else 0
        index = jnp.where(held < self.sinks, held, held - evicted)

        def turn(x: Array, positions: Array, factor: float = 1.0) -> Array:
            return rotate(x, *cos_sin(positions, step.inverse), factor)

        k = turn(state.live.cache.k, jnp.maximum(index, 0)[:, None, :])
        q = turn(step.q_pre, (step.positions - evicted)[:, :, None], query_factor(spec.rope))
        seen = (held >= 0)[:, None, :] & (held[:, None, :] <= step.positions[:, :, None])
        return attend(q, [Piece(k, state.live.cache.v, seen[:, None])], spec.scale, step.sinks), state

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return 1 if no token has been evicted. Else the row cannot go back: the evicted tokens would be missing."""
        return jnp.where(reached <= self.slots(spec.capacity), 1, reached)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        return {"window": jnp.minimum(lengths, self.slots(spec.capacity)).astype(jnp.float32)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        slots, item = spec.batch * self.slots(spec.capacity), jnp.dtype(spec.dtype).itemsize
        return slots * (spec.kv_heads * spec.head_dim * (2 * 4 + item) + 3 * 4 * spec.q_heads)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        cls = type(self)

        def make(slots: int) -> Any:
            sinks = min(cls.sinks, slots - 1)
            return cls(sinks=sinks, window=max(slots - sinks, 1))

        return [Falling(make, 1, num_tokens)]
