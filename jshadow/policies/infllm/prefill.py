"""InfLLM's prefill attention; see policy.py."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jshadow.cache.records import PromptKV
from jshadow.models.config import AttentionKind, ModelConfig
from jshadow.ops.attention import MASKED, group_queries
from jshadow.ops.layout import top_k
from jshadow.ops.rope import RopeConfig, cos_sin, query_factor, rotate
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece

SUB_BLOCK = 64  # number of queries whose scores are in memory at once


class Memory(struct.PyTreeNode):
    """The arrays that each piece of a prompt passes on to the next.

    Attributes:
        mass: sum of the attention probabilities that each token got while it was in a query's window, float32
            [B, h_kv, S].
        representatives: mean keys of the blocks before the window [B, h_kv, U, d].
    """

    mass: Array
    representatives: Array


def far_queries(q_pre: Array, distance: int, inverse: Array, rope: RopeConfig) -> Array:
    """Rotate all queries [B, T, h_q, d] to the position `distance`, so that keys before RoPE are at that distance."""
    return rotate(q_pre, *cos_sin(jnp.full((1, 1, 1), distance), inverse), query_factor(rope))


def mean_key(keys: Array, mass: Array, count: int) -> Array:
    """Return the mean of the `count` keys with the most mass in each block.

    Args:
        keys: [B, h, n, unit, d].
        mass: sum of the attention probabilities that each key got, float32 [B, h, n, unit].
        count: number of keys to average, the representatives of a block.

    Returns:
        [B, h, n, d] in the dtype of keys.
    """
    ids = top_k(mass, min(count, mass.shape[3]))
    chosen = jnp.take_along_axis(keys, ids[..., None], axis=3).astype(jnp.float32)
    return chosen.mean(axis=3).astype(keys.dtype)


@dataclasses.dataclass(frozen=True)
class InfLLMPrefill(PrefillAttention):
    """Prefill attention in which each `multiple` consecutive queries share their blocks.

    Attributes:
        window: as in InfLLM.
        sinks: as in InfLLM.
        count: number of blocks that a query attends to.
        unit: tokens in a block.
        representatives: as in InfLLM.
        multiple: number of consecutive queries that share their blocks.
    """

    window: int
    sinks: int
    count: int
    unit: int
    representatives: int
    multiple: int

    def label(self, tokens: int | None = None) -> str:
        """Return the name of the policy."""
        return "infllm"

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks in a prompt of `tokens` tokens."""
        return max(tokens - self.sinks, 0) // self.unit

    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> Memory:
        """Return a memory of zeros."""
        batch, tokens, heads, dim = prompt.k_pre.shape
        mean_keys = jnp.zeros((batch, heads, self.blocks(tokens), dim), prompt.k_pre.dtype)
        return Memory(jnp.zeros((batch, heads, tokens), jnp.float32), mean_keys)

    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: Memory
    ) -> tuple[Array, Memory]:
        """Process the queries in groups of `multiple`, one group after the other."""
        batch, size, heads, dim = piece.q_post.shape
        assert piece.q_pre is not None, "this attention is not `ahead`"
        far = far_queries(piece.q_pre, self.window, piece.inverse, kind.rope)

        def units(x: Array) -> Array:
            return x.reshape(batch, size // self.multiple, self.multiple, heads, dim).swapaxes(0, 1)

        run = functools.partial(self.one_unit, prompt, config.attention_scale)
        starts = piece.first + jnp.arange(size // self.multiple) * self.multiple
        memory, out = lax.scan(run, aux, (starts, units(piece.q_post), units(far)))
        return out.swapaxes(0, 1).reshape(batch, size, heads, dim), memory

    def one_unit(
        self, prompt: PromptKV, scale: float, memory: Memory, unit: tuple[Array, Array, Array]
    ) -> tuple[Memory, Array]:
        """Compute the attention of one group of queries that share their blocks.

        Args:
            prompt: the keys and values of the prompt.
            scale: factor on attention scores.
            memory: the memory from the previous group.
            unit: the position of the first query, the queries after RoPE, and the queries rotated by `far_queries`.
                Both kinds of queries are [B, multiple, h_q, d].

        Returns:
            The memory for the next group, and the attention's output [B, multiple, h_q, d].
        """
        first, q, far = unit
        memory = self.remember(prompt, memory, first)
        real = first + jnp.arange(self.multiple) < prompt.lengths[:, None]
        keys, values, place = self.far_rows(prompt, memory, first, far, real)
        # the union of the windows of all queries in the group
        tokens = prompt.k_post.shape[1]
        width = min(self.window + self.multiple, tokens)
        start = jnp.clip(first - self.window, 0, tokens - width)
        near_k, near_v = (lax.dynamic_slice_in_dim(x, start, width, axis=1) for x in (prompt.k_post, prompt.v))
        token = start + jnp.arange(width)
        sub = SUB_BLOCK if self.multiple % SUB_BLOCK == 0 else self.multiple

        def some(index: Array) -> tuple[Array, Array]:
            position = first + index * sub + jnp.arange(sub)[:, None]
            queries = [lax.dynamic_slice_in_dim(x, index * sub, sub, axis=1) for x in (q, far)]
            q_near, q_far = (group_queries(x, prompt.k_post.shape[2]) for x in queries)
            near = jnp.einsum("bhgtd,bnhd->bhgtn", q_near, near_k, preferred_element_type=jnp.float32) * scale
            near = jnp.where((token <= position) & (token > position - self.window), near, MASKED)
            away = jnp.einsum("bhgtd,bnhd->bhgtn", q_far, keys, preferred_element_type=jnp.float32) * scale
            seen = (place >= 0)[:, None] & (place[:, None] <= position - self.window)
            away = jnp.where(seen[:, None, None], away, MASKED)
            # every query attends to its own token, so the largest score is not a masked one
            top = jnp.maximum(near.max(-1), away.max(-1))[..., None]
            near_weight, away_weight = jnp.exp(near - top), jnp.exp(away - top)
            total = near_weight.sum(-1) + away_weight.sum(-1)
            parts = [(near_weight, near_v), (away_weight, values)]
            out = sum(
                jnp.einsum("bhgtn,bnhd->bhgtd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
                for weight, v in parts
            )
            counts = lax.dynamic_slice_in_dim(real, index * sub, sub, axis=1)[:, None, None, :, None]
            share = jnp.where(counts, near_weight / near_weight.sum(-1, keepdims=True), 0).sum(axis=(2, 3))
            out = (out / total[..., None]).transpose(0, 3, 1, 2, 4)
            return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(q.dtype), share

        out, share = lax.map(some, jnp.arange(self.multiple // sub))
        old = lax.dynamic_slice_in_dim(memory.mass, start, width, axis=2)
        mass = lax.dynamic_update_slice_in_dim(memory.mass, old + share.sum(axis=0), start, axis=2)
        out = out.swapaxes(0, 1).reshape(q.shape)
        return memory.replace(mass=mass), out

    def left(self, position: Array) -> Array:
        """Return the number of blocks that lie completely before the window of a query at `position`."""
        return jnp.maximum(position - self.window + 1 - self.sinks, 0) // self.unit

    def remember(self, prompt: PromptKV, memory: Memory, first: Array) -> Memory:
        """Add the representatives of the blocks that have left the window since the previous group of queries."""
        batch, heads, total, dim = memory.representatives.shape
        fresh = min(-(-self.multiple // self.unit) + 1, total)
        if not fresh:
            return memory
        begin = jnp.clip(self.left(first) - fresh, 0, total - fresh)
        start = self.sinks + begin * self.unit

        def rows(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, start, fresh * self.unit, axis=1).swapaxes(1, 2)

        keys = rows(prompt.k_pre).reshape(batch, heads, fresh, self.unit, dim)
        mass = lax.dynamic_slice_in_dim(memory.mass, start, fresh * self.unit, axis=2)
        mean_keys = mean_key(keys, mass.reshape(batch, heads, fresh, self.unit), self.representatives)
        return memory.replace(
            representatives=lax.dynamic_update_slice_in_dim(memory.representatives, mean_keys, begin, axis=2)
        )

    def far_rows(
        self, prompt: PromptKV, memory: Memory, first: Array, far: Array, real: Array
    ) -> tuple[Array, Array, Array]:
        """Gather the tokens outside the window that a group of queries attends to.

        Args:
            prompt: the keys and values of the prompt.
            memory: the representatives of the blocks.
            first: position of the first query of the group.
            far: the queries rotated by `far_queries` [B, multiple, h_q, d].
            real: which queries are real tokens, bool [B, multiple].

        Returns:
            Keys before RoPE and values [B, n, h_kv, d], and their positions int32 [B, n], -1 in unused entries.
        """
        batch, tokens, heads, dim = prompt.k_pre.shape
        blocks = self.left(first)
        # the sinks; then the tokens of the block that is leaving the window, and those that leave it within the group
        rest = self.sinks + blocks * self.unit + jnp.arange(self.unit + self.multiple)
        place = jnp.concatenate([jnp.arange(min(self.sinks, tokens)), jnp.where(rest < tokens, rest, -1)])
        place = jnp.broadcast_to(place, (batch, place.shape[0]))
        count = min(self.count, memory.representatives.shape[2])
        if count:
            queries = jnp.where(real[..., None, None], far.astype(jnp.float32), 0).sum(axis=1)
            mean = queries / jnp.maximum(real.sum(axis=1), 1)[:, None, None]
            mean = mean.reshape(batch, heads, -1, dim).sum(axis=2)
            kept = memory.representatives.astype(jnp.float32)
            scores = jnp.einsum("bhd,bhnd->bn", mean, kept, precision="highest")
            candidate = jnp.arange(scores.shape[1]) < blocks
            ids = top_k(jnp.where(candidate, scores, -jnp.inf), count)
            found = self.sinks + ids[..., None] * self.unit + jnp.arange(self.unit)
            found = jnp.where((ids < blocks)[..., None], found, -1).reshape(batch, -1)
            place = jnp.concatenate([place, found], axis=1)
        index = jnp.maximum(place, 0)[:, :, None, None]
        keys, values = (jnp.take_along_axis(x, index, axis=1, mode="clip") for x in (prompt.k_pre, prompt.v))
        return keys, values, place

    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Count a group's scores and their softmax, its rows outside the window, and the other temporaries.

        The other temporaries are the far queries, the mass and the representatives.
        """
        near, sub = self.window + self.multiple, SUB_BLOCK if self.multiple % SUB_BLOCK == 0 else self.multiple
        far = self.sinks + self.unit + self.multiple + self.count * self.unit
        scores = 5 * 4 * config.q_heads * sub * (near + far)
        rows = 2 * 4 * config.key_columns * (far + near)
        queries = 3 * 4 * size * config.q_heads * config.head_dim
        kept = 4 * config.key_columns * self.blocks(tokens) + 2 * 4 * config.kv_heads * tokens
        return batch * (scores + rows + queries + kept)
