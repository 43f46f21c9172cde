"""The bases of policies that evict once: after prefill they keep some of the prompt's tokens and drop the rest.

A policy scores every prompt token, and reserves some of the newest tokens, which are kept regardless of the score. The
kept tokens are frozen, so forks share them. Tokens after the prompt are all kept, in a window. H2O also evicts later
tokens, so it has its own state.

With `SharesBudget`, the heads share the budget of a layer, so that each head keeps its own number of tokens: those with
the highest scores of all heads, as in Ada-KV (Feng et al. 2024, arXiv 2407.11550, section 3). The kept tokens of all
heads are stored one after another, in blocks of BLOCK tokens of one head. So the memory is that of the budget, and of
at most one part of a block for each head.
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
from jshadow.ops.attention import MASKED, Piece, attend, group_queries
from jshadow.ops.layout import top_k
from jshadow.policies.base import HookInputs, LayerCache, UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_range
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


class PromptLengths(struct.PyTreeNode):
    """A prompt whose tokens are elsewhere.

    Attributes:
        lengths: tokens of the prompt, int32 [B].
    """

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
    """Return the positions of the `count` tokens to keep, int32 [B, h, count], in rising order.

    Those with the highest scores [B, h, S] are kept, of equal scores the lower position, and `reserved`, int32 [B], of
    the
    newest tokens. A row with fewer than `count` tokens ends with entries equal to its length.
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


class KeepsLaterTokens(LayerCache):
    """A policy that keeps every token after the prompt in a window. Its frozen record has the prompts' `lengths`."""

    def window_slots(self, capacity: int, shortest: int) -> int:
        return max(capacity - shortest, 1)

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        left = spec.window - (lengths - state.frozen.lengths)
        return jnp.minimum(spec.capacity - lengths, left)

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        lengths: Array = state.frozen.lengths
        return lengths

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        slots, window = step.positions - state.frozen.lengths[:, None], state.live.window
        return state.replace(live=LaterTokens(window.written(step.k_post, step.v, slots, step.valid))), None


class EvictingPolicy(UniformPolicy, KeepsLaterTokens):
    """A policy that keeps `slots` tokens of each prompt and all tokens after it."""

    takes_sinks = True

    @property
    def reads(self) -> HookInputs:
        return HookInputs(piece=16)

    @abc.abstractmethod
    def slots(self, capacity: int) -> int:
        """Return the maximum number of tokens of a prompt that are kept."""

    @abc.abstractmethod
    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Score the tokens of a prompt, float32 [B, h, S].

        Return also how many of the newest tokens are kept regardless of their score, int32 [B].
        """

    def heads(self, spec: CacheSpec) -> int:
        """Return the number of heads h that keep their own set of tokens."""
        return spec.kv_heads

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        none = jnp.zeros(spec.batch, jnp.int32)

        def zeros(count: int) -> KeyValues:
            rows = jnp.zeros((spec.batch, self.heads(spec), count, spec.head_dim), spec.dtype)
            return KeyValues(rows, rows)

        kept = zeros(self.slots(spec.capacity))
        return LayerState(KeptPrompt(kept, none, none), LaterTokens(zeros(spec.window)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        count = self.slots(spec.capacity)
        scores, reserved = self.score(spec, prompt)
        at = best_positions(scores, prompt.lengths, reserved, count)
        # `at` is the row's length in unused entries: they hold padding or zeros, and `count` masks them
        k, v = (take_positions(x, at).astype(spec.dtype) for x in (prompt.k_post, prompt.v))
        kept = KeptPrompt(KeyValues(k, v), jnp.minimum(prompt.lengths, count), prompt.lengths)
        return state.replace(frozen=kept), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        slots, window = step.positions - state.frozen.lengths[:, None], state.live.window
        rows = (jnp.repeat(x, self.heads(spec) // spec.kv_heads, axis=2) for x in (step.k_post, step.v))
        return state.replace(live=LaterTokens(window.written(*rows, slots, step.valid))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        frozen, window = state.frozen, state.live.window
        slots = frozen.kept.k.shape[2]
        there = jnp.arange(slots) < frozen.count[:, None]
        seen = jnp.arange(window.k.shape[2]) <= (step.positions - frozen.lengths[:, None])[..., None]
        kept = Piece(frozen.kept.k, frozen.kept.v, there[:, None, None])
        later = Piece(window.k, window.v, seen[:, None])
        return attend(step.q_post, [kept, later], spec.scale, step.sinks), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        parts = {"kept": state.frozen.count, "window": lengths - state.frozen.lengths}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    def step_temporaries(self, spec: CacheSpec) -> int:
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
        check_range(self.name, "kept", self.kept, 1)
        return self

    def slots(self, capacity: int) -> int:
        return min(self.kept, capacity)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        return [Falling(lambda kept: type(self)(kept=kept), 1, num_tokens)]


BLOCK = 16  # tokens of a block; all are of one head


class KeptBlocks(struct.PyTreeNode):
    """The prompt tokens that are kept. N blocks hold the tokens of all heads, those of the first head first.

    Attributes:
        kept: keys after RoPE and values [B, N, BLOCK, d], in the order of their positions within a head.
        owner: the head of each block, int32 [B, N].
        held: number of tokens in each block, int32 [B, N].
        count: mean number of kept tokens of a head, int32 [B].
        lengths: tokens of the whole prompt, int32 [B].
    """

    kept: KeyValues
    owner: Array
    held: Array
    count: Array
    lengths: Array


class SharesBudget(KeepsBest):
    """A policy that keeps the prompt tokens with the highest scores of all heads. `kept` is the mean of the heads."""

    splits_heads = False

    @property
    @abc.abstractmethod
    def least_share(self) -> float:
        """The share of `kept` that each head keeps at least, from 0 to 1."""

    def blocks(self, spec: CacheSpec) -> int:
        """Return the number of blocks that are always enough: each head may fill a part of one block only."""
        heads, slots = spec.kv_heads, self.slots(spec.capacity)
        return min(heads * slots // BLOCK + heads, heads * -(-spec.capacity // BLOCK))

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        state, count = super().init(spec, fitted), self.blocks(spec)
        rows = jnp.zeros((spec.batch, count, BLOCK, spec.head_dim), spec.dtype)
        none, blocks = state.frozen.count, jnp.zeros((spec.batch, count), jnp.int32)
        return state.replace(frozen=KeptBlocks(KeyValues(rows, rows), blocks, blocks, none, none))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Keep the tokens with the highest scores of all heads, in blocks."""
        scores, reserved = self.score(spec, prompt)
        count = jnp.minimum(prompt.lengths, self.slots(spec.capacity))
        kept = self.chosen(scores, prompt.lengths, reserved)
        number, tokens = self.blocks(spec), kept.shape[2]
        each = kept.sum(axis=2, dtype=jnp.int32)
        needed = -(-each // BLOCK)  # blocks of each head
        first = jnp.cumsum(needed, axis=1) - needed
        place = first[..., None] * BLOCK + jnp.cumsum(kept, axis=2, dtype=jnp.int32) - 1
        place = jnp.where(kept, place, number * BLOCK).reshape(spec.batch, -1)
        row = jnp.arange(spec.batch)[:, None]
        every = jnp.arange(spec.kv_heads * tokens)  # a head's tokens one after another
        source = jnp.full((spec.batch, number * BLOCK), every.size).at[row, place].set(every, mode="drop")

        def take(x: Array) -> Array:
            flat = x.swapaxes(1, 2).reshape(spec.batch, -1, spec.head_dim).astype(spec.dtype)
            rows = flat.at[row, source].get(mode="fill", fill_value=0)
            return rows.reshape(spec.batch, number, BLOCK, spec.head_dim)

        block = jnp.arange(number)
        after = block[:, None] >= jnp.cumsum(needed, axis=1)[:, None]
        owner = jnp.minimum(after.sum(axis=2, dtype=jnp.int32), spec.kv_heads - 1)
        left = jnp.take_along_axis(each, owner, axis=1) - (block - jnp.take_along_axis(first, owner, axis=1)) * BLOCK
        frozen = KeptBlocks(
            KeyValues(take(prompt.k_post), take(prompt.v)), owner, jnp.clip(left, 0, BLOCK), count, prompt.lengths
        )
        return state.replace(frozen=frozen), None

    def chosen(self, scores: Array, lengths: Array, reserved: Array) -> Array:
        """Return which tokens are kept, bool [B, h, S]. The arguments are those of `best_positions`.

        If scores are equal, the lower head comes first, and then the lower position.
        """
        batch, heads, tokens = scores.shape
        position, last = jnp.arange(tokens), lengths[:, None, None]
        budget = jnp.minimum(lengths, self.kept)[:, None]
        scores = with_reserved(scores, lengths, reserved, self.kept)
        row = jnp.arange(batch)[:, None, None]
        safe = jnp.maximum(jnp.floor(budget * self.least_share), 1 if self.least_share else 0)[..., None]
        order = top_k(scores, tokens)
        place = jnp.zeros(order.shape, jnp.int32).at[row, jnp.arange(heads)[:, None], order].set(position)
        scores = jnp.where((place < safe) & (position < last), jnp.inf, scores).reshape(batch, -1)
        best = top_k(scores, min(heads * self.kept, heads * tokens))
        taken = jnp.arange(best.shape[1]) < heads * budget
        found = jnp.where(taken, best, scores.shape[1])
        kept = jnp.zeros(scores.shape, bool).at[row[:, :, 0], found].set(True, mode="drop")
        return kept.reshape(batch, heads, tokens)

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Compute a softmax for each block and for the window, and merge those of each head into one softmax."""
        frozen: KeptBlocks = state.frozen
        live: LaterTokens = state.live
        row = jnp.arange(spec.batch)[:, None]
        q = group_queries(step.q_post, spec.kv_heads)  # [B, h, group, T, d]
        seen = jnp.arange(live.window.k.shape[2]) <= (step.positions - frozen.lengths[:, None])[..., None]
        window = _softmax_of(q, live.window.k, live.window.v, seen[:, None, None], spec.scale, step.sinks)
        there = jnp.arange(BLOCK) < frozen.held[..., None]
        blocks = _softmax_of(q[row, frozen.owner], frozen.kept.k, frozen.kept.v, there[:, :, None, None], spec.scale)
        most = window[0].at[row, frozen.owner].max(blocks[0])

        def joined(part: int) -> Array:
            mine = window[part] * jnp.exp(window[0] - most)
            theirs = blocks[part] * jnp.exp(blocks[0] - most[row, frozen.owner])
            return mine.at[row, frozen.owner].add(theirs)

        out = joined(2) / joined(1)
        batch, heads, group, count, width = out.shape
        return out.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads * group, width).astype(step.q_post.dtype), state

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the queries, the logits, their softmax and the output of each block, and the default for the window."""
        group = spec.q_heads // spec.kv_heads
        rows = spec.batch * self.blocks(spec) * group
        return super().step_temporaries(spec) + 4 * rows * (3 * BLOCK + 3 * spec.head_dim)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count the default, the order of the scores, and the keys by head."""
        scores = 8 * 4 * spec.batch * spec.kv_heads * tokens
        keys = 2 * spec.batch * tokens * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        return super().compress_bytes(spec, tokens) + scores + keys


def _softmax_of(
    q: Array, k: Array, v: Array, there: Array, scale: float, sinks: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return the parts of a softmax: the largest logit, the sum of the exponentials, and the unscaled output, float32.

    q is [B, n, group, T, d], and k and v are [B, n, m, d]. `there` tells which keys each query sees, broadcastable to
    [B, n, group, T, m]. With the sinks of all query heads, n is the number of KV heads. The results are two arrays
    [B, n, group, T, 1] and one [B, n, group, T, d].
    """
    logits = jnp.einsum("bngtd,bnmd->bngtm", q, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(there, logits, MASKED)
    most = logits.max(axis=-1, keepdims=True)
    if sinks is not None:
        own = sinks.astype(jnp.float32).reshape(*most.shape[1:3], 1, 1)
        most = jnp.maximum(most, own)
    shares = jnp.where(there, jnp.exp(logits - most), 0)
    out = jnp.einsum("bngtm,bnmd->bngtd", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
    total = shares.sum(axis=-1, keepdims=True)
    return most, total if sinks is None else total + jnp.exp(own - most), out
