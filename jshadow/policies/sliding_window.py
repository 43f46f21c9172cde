"""The cache of a model's sliding-window layers, such as those of Mistral and Gemma 3.

It is not a policy that a user chooses. `jshadow.planner.bytes.cache_specs` gives it to the sliding layers of a model
under every policy. It is therefore not registered.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import fill_ring, ring_positions
from jshadow.policies.base import HookInputs, LayerCache
from jshadow.policies.full import OneCache

_SLIDING_PIECE = 16  # new tokens of a turn that a sliding layer takes at once


def sliding_slots(window: int, capacity: int) -> int:
    """Return the slots of a sliding layer. The tokens of a piece overwrite no token that its first query attends to."""
    return min(window + _SLIDING_PIECE - 1, capacity)


@dataclasses.dataclass(frozen=True)
class SlidingWindow(LayerCache):
    """Keep the newest tokens exactly, in a ring buffer, and attend to them. Position p is in slot p % slots.

    Attributes:
        window: tokens that a query attends to, its own included.
    """

    window: int = 4096

    name = "sliding_window"
    takes_sinks = True

    @property
    def reads(self) -> HookInputs:
        return HookInputs(piece=_SLIDING_PIECE)

    def slots(self, capacity: int) -> int:
        """Return the number of slots of the ring buffer."""
        return sliding_slots(self.window, capacity)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        zeros = jnp.zeros((spec.batch, spec.kv_heads, self.slots(spec.capacity), spec.head_dim), spec.dtype)
        return LayerState(live=OneCache(KeyValues(zeros, zeros)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        k, v = (fill_ring(x, prompt.lengths, self.slots(spec.capacity)) for x in (prompt.k_post, prompt.v))
        return state.replace(live=OneCache(KeyValues(k, v))), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        slots = step.positions % self.slots(spec.capacity)
        cache, q_post = state.live.cache.append(step, slots, spec.rope)
        return state.replace(live=OneCache(cache), q_post=q_post), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Compute exact attention over the window that ends at each query."""
        lengths = step.lengths + step.valid.sum(axis=1, dtype=jnp.int32)
        held, query = ring_positions(lengths, self.slots(spec.capacity))[:, None], step.positions[:, :, None]
        seen = (held >= 0) & (held <= query) & (held > query - self.window)
        cache, rows = state.live.cache, step.positions.shape[1]
        pieces = [Piece(cache.k, cache.v, seen[:, None])]
        if rows > 1:  # a guess is not stored in the cache, but its query attends to its own key
            k, v = (x.transpose(0, 2, 1, 3) for x in (step.k_post, step.v))
            pieces.append(Piece(k, v, (jnp.eye(rows, dtype=bool) & ~step.valid[:, None])[:, None]))
        return attend(step.q_post, pieces, spec.scale, step.sinks), state

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        slots = self.slots(spec.capacity)
        return jnp.where(reached <= slots, 1, jnp.maximum(reached - slots + self.window - 1, 1))

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        return {"window": jnp.minimum(lengths, self.window).astype(jnp.float32)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        return 3 * 4 * spec.batch * spec.q_heads * self.slots(spec.capacity)
