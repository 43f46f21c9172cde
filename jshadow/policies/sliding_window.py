"""The plain window of a layer that the model itself lets see no further (Mistral, Gemma 3).

No choice of the user's: `planning.cache_specs` gives it to the sliding layers of a model whatever the policy of the
others is, so it stands in no list of policies.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import fill_ring, ring_positions, write_rows
from jshadow.policies.base import HookInputs, LayerCache
from jshadow.policies.costs import Costs

SLIDING_PIECE = 16  # tokens of a turn that a sliding layer takes at once


def sliding_slots(window: int, capacity: int) -> int:
    """Slots of a layer that sees a window only: the last token of a piece must not push out what its first one sees."""
    return min(window + SLIDING_PIECE - 1, capacity)


class SlidingLive(struct.PyTreeNode):
    """Attributes: cache: keys after RoPE and values [B, h_kv, slots, d]; token p lies in slot p % slots."""

    cache: KeyValues


@dataclasses.dataclass(frozen=True)
class SlidingWindow(LayerCache, Costs):
    """Keep and attend the most recent tokens, exactly.

    Attributes:
        window: tokens that a query sees, itself included.
    """

    window: int = 4096

    @property
    def reads(self) -> HookInputs:
        """Pieces of turns that fit the slots."""
        return HookInputs(piece=SLIDING_PIECE)

    def slots(self, capacity: int) -> int:
        """Slots of the cache."""
        return sliding_slots(self.window, capacity)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Zeros."""
        zeros = jnp.zeros((spec.batch, spec.kv_heads, self.slots(spec.capacity), spec.head_dim), spec.dtype)
        return LayerState(live=SlidingLive(KeyValues(zeros, zeros)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Keep the end of the prompt."""
        k, v = (fill_ring(x, prompt.lengths, self.slots(spec.capacity)) for x in (prompt.k_post, prompt.v))
        return state.replace(live=SlidingLive(KeyValues(k, v))), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the new tokens over the oldest ones."""
        slots, cache = step.positions % self.slots(spec.capacity), state.live.cache
        k = write_rows(cache.k, step.k_post, slots, step.valid)
        v = write_rows(cache.v, step.v, slots, step.valid)
        return state.replace(live=SlidingLive(KeyValues(k, v))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Exact attention over the window that ends at each query."""
        lengths = step.lengths + step.valid.sum(axis=1, dtype=jnp.int32)
        held, own = ring_positions(lengths, self.slots(spec.capacity))[:, None], step.positions[:, :, None]
        seen = (held >= 0) & (held <= own) & (held > own - self.window)
        cache, rows = state.live.cache, step.positions.shape[1]
        pieces = [Piece(cache.k, cache.v, seen[:, None])]
        if rows > 1:  # a guess is not kept, yet it sees itself
            k, v = (x.transpose(0, 2, 1, 3) for x in (step.k_post, step.v))
            pieces.append(Piece(k, v, (jnp.eye(rows, dtype=bool) & ~step.valid[:, None])[:, None]))
        return attend(step.q_post, pieces, spec.scale), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """At most the window."""
        return {"window": jnp.minimum(lengths, self.window).astype(jnp.float32)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores of all slots."""
        return 3 * 4 * spec.batch * spec.q_heads * self.slots(spec.capacity)
