"""What eviction policies share: some of a prompt's tokens are kept for good, the rest are gone.

A policy says which: `score` of every prompt token, `reserved` the newest ones that stay whatever their score. Kept rows
are frozen (forks share them), later tokens lie in a window behind them and stay; whoever evicts those as well (H2O)
has a state of its own.
"""

import abc
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import top_k, write_rows
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.costs import Costs


class KeptPrompt(struct.PyTreeNode):
    """What is left of a prompt.

    Attributes:
        kept: keys after RoPE and values [B, h, C, d], by position.
        count: rows of them that are real, int32 [B].
        lengths: tokens of the prompt, int32 [B].
    """

    kept: KeyValues
    count: Array
    lengths: Array


class LaterTokens(struct.PyTreeNode):
    """Attributes: window: tokens after the prompt [B, h, W, d]; token len_b + i in slot i."""

    window: KeyValues


def best_positions(scores: Array, lengths: Array, reserved: Array, count: int) -> Array:
    """Positions of the tokens that are kept, rising.

    Args:
        scores: float32 [B, h, S]; higher is kept longer.
        lengths: int32 [B].
        reserved: int32 [B], the newest tokens of each row that are kept whatever their score.
        count: tokens to keep.

    Returns:
        int32 [B, h, count]; the length of the row where there are no more. Equal scores: the lower position.
    """
    position = jnp.arange(scores.shape[2])
    last = lengths[:, None, None]
    # of more reserved tokens than are kept the newest stay
    order = jnp.where(position >= last - jnp.minimum(reserved, count)[:, None, None], jnp.inf, scores)
    order = jnp.where(position < last, order, -jnp.inf)
    found = top_k(order, min(count, scores.shape[2]))
    found = jnp.where(found < last, found, last)
    missing = count - found.shape[2]
    if missing:
        found = jnp.concatenate([found, jnp.broadcast_to(last, (*found.shape[:2], missing))], axis=2)
    return jnp.sort(found, axis=2)


def take_positions(x: Array, positions: Array) -> Array:
    """Rows of x [B, S, h_kv, d] at positions [B, h, n], h a multiple of h_kv -> [B, h, n, d]; zeros past the end."""
    batch, heads, _ = positions.shape
    row = jnp.arange(batch)[:, None, None]
    head = (jnp.arange(heads) // (heads // x.shape[2]))[None, :, None]
    return x.at[row, positions, head].get(mode="fill", fill_value=0)


class EvictingPolicy(UniformPolicy, Costs):
    """A prompt is cut down to `slots` tokens once; everything after it is kept."""

    @property
    def reads(self) -> HookInputs:
        """Pieces of 16 tokens."""
        return HookInputs(piece=16)

    @abc.abstractmethod
    def slots(self, capacity: int) -> int:
        """Tokens of a prompt that are kept at most."""

    @abc.abstractmethod
    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Float32 scores [B, h, S] of a prompt's tokens, and the reserved newest ones, int32 [B]."""

    def heads(self, spec: CacheSpec) -> int:
        """Heads that keep tokens of their own."""
        return spec.kv_heads

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Room for everything after the shortest prompt."""
        return max(capacity - shortest, 1)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Nothing kept."""
        none = jnp.zeros(spec.batch, jnp.int32)

        def zeros(count: int) -> KeyValues:
            rows = jnp.zeros((spec.batch, self.heads(spec), count, spec.head_dim), spec.dtype)
            return KeyValues(rows, rows)

        return LayerState(KeptPrompt(zeros(self.slots(spec.capacity)), none, none), LaterTokens(zeros(spec.window)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Keep the best tokens."""
        count = self.slots(spec.capacity)
        scores, reserved = self.score(spec, prompt)
        at = best_positions(scores, prompt.lengths, reserved, count)
        # past a row's end lie zeros, and past the prompt's width nothing
        k, v = (take_positions(x, at).astype(spec.dtype) for x in (prompt.k_post, prompt.v))
        kept = KeptPrompt(KeyValues(k, v), jnp.minimum(prompt.lengths, count), prompt.lengths)
        return state.replace(frozen=kept), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write new tokens behind the prompt."""
        slots, window = step.positions - state.frozen.lengths[:, None], state.live.window
        rows = (jnp.repeat(x, self.heads(spec) // spec.kv_heads, axis=2) for x in (step.k_post, step.v))
        k, v = (write_rows(old, new, slots, step.valid) for old, new in zip((window.k, window.v), rows, strict=True))
        return state.replace(live=LaterTokens(KeyValues(k, v))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Exact attention over what is kept and what came since."""
        frozen, window = state.frozen, state.live.window
        there = jnp.arange(frozen.kept.k.shape[2]) < frozen.count[:, None]
        seen = jnp.arange(window.k.shape[2]) <= (step.positions - frozen.lengths[:, None])[..., None]
        kept = Piece(frozen.kept.k, frozen.kept.v, there[:, None, None])
        return attend(step.q_post, [kept, Piece(window.k, window.v, seen[:, None])], spec.scale), state

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Capacity and window both end."""
        left = spec.window - (lengths - state.frozen.lengths)
        return jnp.minimum(spec.capacity - lengths, left)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """What is kept of the prompt, and all after it."""
        parts = {"kept": state.frozen.count, "window": lengths - state.frozen.lengths}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores of all slots, and a copy of them in float32 where keys are no float32."""
        slots = self.slots(spec.capacity) + spec.window
        return 3 * 4 * spec.batch * spec.q_heads * slots + 4 * spec.batch * self.heads(spec) * slots * spec.head_dim
