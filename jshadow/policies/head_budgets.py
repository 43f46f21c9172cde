"""The base of policies whose heads share the budget of a layer, so that each head keeps its own number of tokens.

The tokens with the highest scores of all heads are kept, as in Ada-KV (Feng et al. 2024, arXiv 2407.11550, section 3).
The kept tokens of all heads are stored one after another, in blocks of BLOCK tokens of one head. So the memory is that
of the budget, and of at most one part of a block for each head.
"""

import abc
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import MASKED, group_queries
from jshadow.ops.layout import top_k
from jshadow.policies.eviction import KeepsBest, LaterTokens, with_reserved

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
        """Return a state in which no token is kept."""
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
        """Return which tokens are kept, bool [B, h, S].

        Args:
            scores: float32 [B, h, S]. If scores are equal, the lower head comes first, and then the lower position.
            lengths: number of tokens in each row, int32 [B].
            reserved: number of newest tokens of each row that all heads keep, int32 [B].
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
        """Compute exact attention over the kept prompt tokens and the window.

        A softmax is computed for each block and for the window. Those of one head are then merged into one softmax.
        """
        frozen: KeptBlocks = state.frozen
        live: LaterTokens = state.live
        row = jnp.arange(spec.batch)[:, None]
        q = group_queries(step.q_post, spec.kv_heads)  # [B, h, group, T, d]
        seen = jnp.arange(live.window.k.shape[2]) <= (step.positions - frozen.lengths[:, None])[..., None]
        window = softmax_of(q, live.window.k, live.window.v, seen[:, None, None], spec.scale)
        there = jnp.arange(BLOCK) < frozen.held[..., None]
        blocks = softmax_of(q[row, frozen.owner], frozen.kept.k, frozen.kept.v, there[:, :, None, None], spec.scale)
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


def softmax_of(q: Array, k: Array, v: Array, there: Array, scale: float) -> tuple[Array, Array, Array]:
    """Return the parts of a softmax: the largest logit, the sum of the exponentials, and the unscaled output, float32.

    Args:
        q: queries [B, n, group, T, d].
        k: keys [B, n, m, d].
        v: values [B, n, m, d].
        there: which keys each query sees, bool, broadcastable to [B, n, group, T, m].
        scale: factor on the products.

    Returns:
        Two arrays [B, n, group, T, 1] and one [B, n, group, T, d].
    """
    logits = jnp.einsum("bngtd,bnmd->bngtm", q, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(there, logits, MASKED)
    most = logits.max(axis=-1, keepdims=True)
    shares = jnp.where(there, jnp.exp(logits - most), 0)
    out = jnp.einsum("bngtm,bnmd->bngtd", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return most, shares.sum(axis=-1, keepdims=True), out
