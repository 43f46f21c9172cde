"""The base of policies that evict once: after prefill they keep some of the prompt's tokens and drop the rest.

A policy scores every prompt token, and reserves some of the newest tokens, which are kept regardless of the score. The
kept tokens are frozen, so forks share them. Tokens after the prompt are all kept, in a window. H2O also evicts later
tokens, so it has its own state.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import top_k, write_rows
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_range
from jshadow.policies.costs import Costs
from jshadow.policies.sizing import Falling


class KeptPrompt(struct.PyTreeNode):
    """The prompt tokens that are kept.

    Attributes:
        kept: keys after RoPE and values of the kept tokens [B, h, C, d], in the order of their positions.
        count: number of kept tokens, int32 [B]. Entries from count on are unused.
        lengths: tokens of the whole prompt, int32 [B].
    """

    kept: KeyValues
    count: Array
    lengths: Array


class LaterTokens(struct.PyTreeNode):
    """The tokens after the prompt.

    Attributes:
        window: keys after RoPE and values [B, h, W, d]. Slot i of row b is the token at position lengths[b] + i.
    """

    window: KeyValues


def with_reserved(scores: Array, lengths: Array, reserved: Array, count: int) -> Array:
    """Return the scores [B, h, S] with infinity for reserved tokens, and minus infinity after a row's last token.

    The arguments are those of `best_positions`. At most `count` of the newest tokens are reserved.
    """
    position, last = jnp.arange(scores.shape[2]), lengths[:, None, None]
    order = jnp.where(position >= last - jnp.minimum(reserved, count)[:, None, None], jnp.inf, scores)
    return jnp.where(position < last, order, -jnp.inf)


def best_positions(scores: Array, lengths: Array, reserved: Array, count: int) -> Array:
    """Return the positions of the tokens to keep.

    Args:
        scores: float32 [B, h, S]. The tokens with the highest scores are kept. Of equal scores, the lower position is
            kept.
        lengths: number of tokens in each row, int32 [B].
        reserved: number of newest tokens of each row that are kept regardless of their score, int32 [B].
        count: number of tokens to keep.

    Returns:
        int32 [B, h, count], in rising order. A row with fewer than `count` tokens ends with entries equal to its
        length.
    """
    last = lengths[:, None, None]
    found = top_k(with_reserved(scores, lengths, reserved, count), min(count, scores.shape[2]))
    found = jnp.where(found < last, found, last)
    missing = count - found.shape[2]
    if missing:
        found = jnp.concatenate([found, jnp.broadcast_to(last, (*found.shape[:2], missing))], axis=2)
    return jnp.sort(found, axis=2)


def take_positions(x: Array, positions: Array) -> Array:
    """Gather the tokens at different positions for each head.

    Args:
        x: keys or values [B, S, h_kv, d].
        positions: int32 [B, h, n], where h is a multiple of h_kv.

    Returns:
        [B, h, n, d], with zeros where a position is S or larger.
    """
    batch, heads, _ = positions.shape
    row = jnp.arange(batch)[:, None, None]
    head = (jnp.arange(heads) // (heads // x.shape[2]))[None, :, None]
    return x.at[row, positions, head].get(mode="fill", fill_value=0)


class KeepsLaterTokens(UniformPolicy):
    """A policy that keeps every token after the prompt in a window. Its frozen record has the prompts' `lengths`."""

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Return the number of slots for all tokens after the shortest prompt."""
        return max(capacity - shortest, 1)

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Return how many more tokens fit into both the capacity and the window."""
        left = spec.window - (lengths - state.frozen.lengths)
        return jnp.minimum(spec.capacity - lengths, left)

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return the length of the prompt. Each later token has a slot of its own, so all of them can be given back."""
        lengths: Array = state.frozen.lengths
        return lengths


class EvictingPolicy(KeepsLaterTokens, Costs):
    """A policy that keeps `slots` tokens of each prompt and all tokens after it."""

    @property
    def reads(self) -> HookInputs:
        """The hooks of a step process a turn's new tokens in pieces of 16."""
        return HookInputs(piece=16)

    @abc.abstractmethod
    def slots(self, capacity: int) -> int:
        """Return the maximum number of tokens of a prompt that are kept."""

    @abc.abstractmethod
    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Score the tokens of a prompt.

        Returns:
            The scores, float32 [B, h, S], and how many of the newest tokens are kept regardless of their score, int32
            [B].
        """

    def heads(self, spec: CacheSpec) -> int:
        """Return the number of heads h that keep their own set of tokens."""
        return spec.kv_heads

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Return a state in which no token is kept."""
        none = jnp.zeros(spec.batch, jnp.int32)

        def zeros(count: int) -> KeyValues:
            rows = jnp.zeros((spec.batch, self.heads(spec), count, spec.head_dim), spec.dtype)
            return KeyValues(rows, rows)

        kept = zeros(self.slots(spec.capacity))
        return LayerState(KeptPrompt(kept, none, none), LaterTokens(zeros(spec.window)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Keep the tokens with the highest scores and the reserved ones."""
        count = self.slots(spec.capacity)
        scores, reserved = self.score(spec, prompt)
        at = best_positions(scores, prompt.lengths, reserved, count)
        # `at` is the row's length in unused entries: they hold padding or zeros, and `count` masks them
        k, v = (take_positions(x, at).astype(spec.dtype) for x in (prompt.k_post, prompt.v))
        kept = KeptPrompt(KeyValues(k, v), jnp.minimum(prompt.lengths, count), prompt.lengths)
        return state.replace(frozen=kept), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the new tokens to the window."""
        slots, window = step.positions - state.frozen.lengths[:, None], state.live.window
        rows = (jnp.repeat(x, self.heads(spec) // spec.kv_heads, axis=2) for x in (step.k_post, step.v))
        k, v = (write_rows(old, new, slots, step.valid) for old, new in zip((window.k, window.v), rows, strict=True))
        return state.replace(live=LaterTokens(KeyValues(k, v))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Compute exact attention over the kept prompt tokens and the window."""
        frozen, window = state.frozen, state.live.window
        slots = frozen.kept.k.shape[2]
        there = jnp.arange(slots) < frozen.count[:, None]
        seen = jnp.arange(window.k.shape[2]) <= (step.positions - frozen.lengths[:, None])[..., None]
        kept = Piece(frozen.kept.k, frozen.kept.v, there[:, None, None])
        later = Piece(window.k, window.v, seen[:, None])
        return attend(step.q_post, [kept, later], spec.scale), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Count the kept prompt tokens, and all tokens after the prompt."""
        parts = {"kept": state.frozen.count, "window": lengths - state.frozen.lengths}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the scores of all slots, and a float32 copy of the keys or of the values."""
        slots = self.slots(spec.capacity) + spec.window
        return 3 * 4 * spec.batch * spec.q_heads * slots + 4 * spec.batch * self.heads(spec) * slots * spec.head_dim


@dataclasses.dataclass(frozen=True)
class KeepsBest(EvictingPolicy, Budgeted, Sized):
    """An evicting policy with one budget, and no other setting that takes memory.

    Attributes:
        kept: number of prompt tokens that each KV head keeps.
    """

    kept: int = 2048

    budget_fields = ("kept",)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the budget."""
        check_range(self.name, "kept", self.kept, 1)
        return self

    def slots(self, capacity: int) -> int:
        """Return the number of prompt tokens that are kept, at most the capacity."""
        return min(self.kept, capacity)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return one policy for each number of tokens from num_tokens down to 1."""
        return [Falling(lambda kept: type(self)(kept=kept), 1, num_tokens)]
