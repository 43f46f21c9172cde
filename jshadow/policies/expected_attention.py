"""Expected attention keeps the prompt tokens that later queries are expected to attend to most.

Source: Devoto et al. 2025, arXiv 2510.00636, and NVIDIA's kvpress 0.5.5 (`ExpectedAttentionPress`), whose score this
file follows. Later queries are taken to be Gaussian. Their mean and covariance before RoPE are those of the prompt's
queries. RoPE is replaced by its average over the next positions. The expectation of exp(q . k) then has a closed form.
Its softmax over the tokens, without an attention sink of the model, is multiplied by the norm of the value. The paper
takes the norm of the value after the output projection. kvpress and this file take the norm of the value itself. The
first tokens are always kept, and their queries do not count. No question is needed at the end of the prompt, because no
single query is read.

kvpress reads the queries before RoPE. Here the queries after RoPE are rotated back, in float32. kvpress refuses a
prompt of at most `sinks` tokens. Here such a prompt is kept, if the budget permits it. A test compares the kept tokens
with those of kvpress (docs/benchmarks/tests.md).
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import MASKED
from jshadow.ops.rope import cos_sin, inverse_frequencies, query_factor, rotate
from jshadow.policies.base import HookInputs
from jshadow.policies.checks import check_number, check_range
from jshadow.policies.eviction import KeepsBest
from jshadow.policies.registry import register

BLOCK = 512  # tokens that are processed at once
_MOST = 2**16  # future positions at most, because their angles are all in memory


@register(small={"kept": 14, "sinks": 2}, lossless=lambda tokens, config: {"kept": tokens})
@dataclasses.dataclass(frozen=True)
class ExpectedAttention(KeepsBest):
    """Keep the prompt tokens with the largest expected attention of later queries, times the norm of their values.

    Attributes:
        kept: number of prompt tokens that each KV head keeps, the first ones included.
        sinks: number of first tokens that are always kept. Their queries do not count.
        future: number of positions after the prompt over which RoPE is averaged.
        epsilon: a number that is added to the expected attention before it is multiplied by the norm of the value.
    """

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0

    name = "expected_attention"
    source = "arXiv 2510.00636"

    @property
    def reads(self) -> HookInputs:
        return HookInputs(all_queries=True, piece=16)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "sinks", self.sinks, 0)
        check_range(self.name, "future", self.future, 1, _MOST)
        check_number(self.name, "epsilon", self.epsilon, 0)
        return super().resolve(config, capacity)

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        position, last = jnp.arange(prompt.k_post.shape[1]), prompt.lengths[:, None]
        logits = expected_logits(spec, prompt, *_later_queries(spec, prompt, self.sinks, self.future))
        inside = ((position >= self.sinks) & (position < last))[:, None, None]
        share = jax.nn.softmax(jnp.where(inside, logits, MASKED), axis=-1).mean(axis=2)
        norms = jnp.linalg.norm(prompt.v.astype(jnp.float32), axis=-1).swapaxes(1, 2)
        scores = jnp.where(position < self.sinks, jnp.inf, (share + self.epsilon) * norms)
        return scores, jnp.zeros_like(prompt.lengths)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count the default, all queries with log-sum-exps, a float32 copy of both, the scores, blocks, covariances."""
        item, heads = jnp.dtype(spec.dtype).itemsize, spec.batch * spec.q_heads
        queries = heads * tokens * (spec.head_dim * (item + 4) + 8)
        small = heads * spec.head_dim * (BLOCK + spec.head_dim)
        norms = spec.batch * tokens * spec.kv_heads * (spec.head_dim + 2)
        return super().compress_bytes(spec, tokens) + queries + 4 * (3 * heads * tokens + 4 * small + norms)

    def compress_work(self, spec: CacheSpec, tokens: int) -> tuple[int, int]:
        """Count the covariances of the queries, and their products with the keys."""
        return 4 * spec.batch * spec.q_heads * tokens * spec.head_dim**2, 0


def _over_blocks(tokens: int, step: Callable[[Array, Array, Array], Array], start: Array) -> Array:
    """Process tokens in blocks of equal size, and return the last result.

    `step` maps the positions of a block's tokens, int32 [block], which of them no earlier block has had, bool [block],
    and
    the result so far to the new result.
    """
    block = min(BLOCK, tokens)

    def one(i: Array, total: Array) -> Array:
        at = jnp.minimum(i * block, tokens - block) + jnp.arange(block)  # the last block overlaps the one before it
        return step(at, at >= i * block, total)

    return lax.fori_loop(0, -(-tokens // block), one, start)


def rows_at(x: Array, at: Array) -> Array:
    """Return the consecutive tokens at positions `at` of an array [B, S, h, d], float32 [B, block, h, d]."""
    return lax.dynamic_slice_in_dim(x, at[0], len(at), axis=1).astype(jnp.float32)


def _later_queries(spec: CacheSpec, prompt: PromptKV, sinks: int, future: int) -> tuple[Array, Array]:
    """Return the mean and the covariance after RoPE of the queries that follow a prompt, float32 [B, h_q, d] and [..,
    d, d].

    The first `sinks` queries do not count. RoPE is averaged over `future` positions.
    """
    every = prompt.q_post
    assert every is not None
    batch, tokens, heads, width = every.shape
    factor, lengths = query_factor(spec.rope), prompt.lengths[:, None]
    inverse = jnp.asarray(inverse_frequencies(spec.rope, width, spec.capacity))
    count = jnp.maximum(prompt.lengths - sinks, 1)[:, None, None]

    def queries(at: Array, fresh: Array, mean: Array) -> Array:
        """Return the queries of a block before RoPE, minus the mean; zeros for those that do not count."""
        cos, sin = (x[:, None] for x in cos_sin(at, inverse))
        counts = fresh & (at >= sinks) & (at < lengths)
        return jnp.where(counts[:, :, None, None], rotate(rows_at(every, at), cos, -sin, 1 / factor) - mean[:, None], 0)

    def add(at: Array, fresh: Array, total: Array) -> Array:
        return total + queries(at, fresh, none).sum(axis=1)

    def add_products(at: Array, fresh: Array, total: Array) -> Array:
        rows = queries(at, fresh, mean)
        return total + jnp.einsum("bshd,bshe->bhde", rows, rows, precision="highest")

    none = jnp.zeros((batch, heads, width), jnp.float32)
    mean = _over_blocks(tokens, add, none) / count
    covariance = _over_blocks(tokens, add_products, jnp.zeros((batch, heads, width, width))) / count[..., None]
    cos, sin = (x.mean(axis=1)[:, None] for x in cos_sin(lengths + jnp.arange(future), inverse))  # [B, 1, half]
    half = rotate(covariance, cos[:, None], sin[:, None], factor).swapaxes(2, 3)
    return rotate(mean, cos, sin, factor), rotate(half, cos[:, None], sin[:, None], factor)


def expected_logits(spec: CacheSpec, prompt: PromptKV, mean: Array, covariance: Array) -> Array:
    """Return the logarithm of the expectation of exp(scale * q . k), float32 [B, h_kv, group, S].

    Queries after RoPE are Gaussian, with `mean`, float32 [B, h_q, d], and `covariance`, float32 [B, h_q, d, d].
    """
    batch, tokens, kv_heads, width = prompt.k_post.shape
    mean = mean.reshape(batch, kv_heads, -1, width) * spec.scale
    covariance = covariance.reshape(batch, kv_heads, -1, width, width) * (spec.scale**2 / 2)

    def put(at: Array, fresh: Array, total: Array) -> Array:
        keys = rows_at(prompt.k_post, at)
        turned = jnp.einsum("bshd,bhgde->bhgse", keys, covariance, precision="highest") + mean[:, :, :, None]
        logits = jnp.einsum("bhgse,bshe->bhgs", turned, keys, precision="highest")
        return lax.dynamic_update_slice_in_dim(total, logits, at[0], axis=3)

    return _over_blocks(tokens, put, jnp.zeros((*mean.shape[:3], tokens)))
