"""The recurrent state of a hybrid model's layers (see `jshadow/cache/recurrence.py`).

It is not a policy that a user chooses. `jshadow.planner.bytes.cache_specs` gives it to the recurrent layers of a model
under every policy. It is therefore not registered.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, StepKV
from jshadow.cache.recurrence import RECENT, Held, RecurrentTokens, empty, read_tokens, step_tokens
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import AttentionKind, ModelConfig, Recurrent, recurrent_of
from jshadow.ops.buckets import round_up
from jshadow.ops.delta_rule import CHUNK
from jshadow.policies.base import HookInputs, LayerCache, StepCosts
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece


class OneRecurrence(struct.PyTreeNode):
    """The live record of a recurrent layer. Reports name its bytes "recurrent"."""

    recurrent: Held


@dataclasses.dataclass(frozen=True)
class RecurrentPrefill(PrefillAttention):
    """A recurrent layer over a prompt: each piece continues the state that the piece before it left."""

    takes_sinks = True

    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> Held:
        return empty(len(prompt.lengths), recurrent_of(config), prompt.v.dtype)

    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: Held
    ) -> tuple[Array, Held]:
        heads = piece.heads
        assert heads is not None
        valid = piece.first + jnp.arange(heads.v.shape[1], dtype=jnp.int32) < prompt.lengths[:, None]
        before = jnp.minimum(piece.first, prompt.lengths)
        out, after = read_tokens(aux, RecurrentTokens.of(heads, recurrent_of(config), before, valid))
        return out.astype(heads.v.dtype), after

    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Return an upper bound: two copies of the inputs and outputs of a piece's tokens, and eight states."""
        r = recurrent_of(config)
        if not r.has_state:
            return 4 * batch * 2 * size * r.value_heads * r.value_dim
        token = 2 * r.key_heads * r.key_dim + 2 * r.value_heads * (r.key_dim + r.value_dim)
        state = r.value_heads * (r.key_dim * r.value_dim + CHUNK * CHUNK)
        return 4 * batch * (2 * round_up(size, CHUNK) * token + 8 * state)


@dataclasses.dataclass(frozen=True)
class RecurrentState(LayerCache):
    """Keep the state of each value head, and the newest tokens apart from it, so that a row can give them back.

    A short convolution has no state, and keeps its newest inputs alone. So it gives back tokens of a prompt too.

    Attributes:
        sizes: heads and widths of the layer. A device of a mesh has some of the heads, as its CacheSpec tells.
    """

    sizes: Recurrent

    name = "recurrent"
    takes_sinks = is_recurrent = True

    @property
    def reads(self) -> HookInputs:
        return HookInputs(piece=RECENT, whole_turns=True)

    def window_slots(self, capacity: int, shortest: int) -> int:
        return 0

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        sizes = dataclasses.replace(self.sizes, key_heads=spec.kv_heads, value_heads=spec.q_heads)
        return LayerState(live=OneRecurrence(empty(spec.batch, sizes, spec.dtype)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        return state.replace(live=OneRecurrence(prompt.extra)), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        return state, None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Read the new tokens into the state. More than RECENT of them cannot be given back."""
        new = RecurrentTokens.of(step, self.sizes, step.lengths, step.valid)
        read = step_tokens if step.valid.shape[1] <= RECENT else read_tokens
        out, after = read(state.live.recurrent, new)
        return out.astype(spec.dtype), state.replace(live=OneRecurrence(after))

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        kept = reached - RECENT
        if self.sizes.has_state:
            kept = jnp.maximum(kept, state.live.recurrent.folded)
        return jnp.maximum(kept, 1)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        return {"recurrent": jnp.zeros(lengths.shape, jnp.float32)}

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        return 0

    def step_costs(self, spec: CacheSpec, state: LayerState) -> StepCosts:
        """A step also writes the state, once in RECENT steps (`pallas_kernels.recurrent_step`)."""
        return StepCosts(0, {"recurrent": (self._state_bytes(spec) // RECENT, 0)}, {}, {})

    def step_temporaries(self, spec: CacheSpec) -> int:
        return 2 * self._state_bytes(spec)

    def _state_bytes(self, spec: CacheSpec) -> int:
        return 4 * spec.batch * spec.q_heads * spec.head_dim * self.sizes.value_dim * self.sizes.has_state
