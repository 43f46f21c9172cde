"""SnapKV: what the prompt's last queries looked at is kept (Li et al. 2024, arXiv 2404.14469, section 4).

The paper leaves open which pooling its listing means, and its code repeats keys for all query heads before it selects.
Here: the maximum, as in the paper's LongBench settings, and one set for each KV head by the mean over its query heads
(`granularity="q_head"` keeps one for each query head, and its keys and values with it, as the published code does).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import MASKED, group_queries
from jshadow.policies.base import HookInputs
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.eviction import EvictingPolicy
from jshadow.policies.registry import register
from jshadow.policies.sizing import Falling


@register(
    small={"max_capacity_prompt": 14, "observation_window": 5, "kernel": 3},
    lossless=lambda tokens, config: {"max_capacity_prompt": max(tokens, SnapKV.observation_window)},
)
@dataclasses.dataclass(frozen=True)
class SnapKV(EvictingPolicy, Budgeted, Sized):
    """Keep the prompt's newest tokens, and those that these attended to most.

    Attributes:
        max_capacity_prompt: tokens of a prompt that are kept, the observation window included.
        observation_window: newest prompt tokens: their queries choose, and they are kept.
        kernel: tokens over which scores are pooled, an odd number: neighbours of what is kept are kept too.
        pooling: "max" or "avg".
        granularity: "kv_head" or "q_head".
    """

    max_capacity_prompt: int = 2048
    observation_window: int = 32
    kernel: int = 7
    pooling: str = "max"
    granularity: str = "kv_head"

    name = "snapkv"
    source = "arXiv 2404.14469, section 4"
    budget_fields = ("max_capacity_prompt",)

    @property
    def reads(self) -> HookInputs:
        """The queries of the observation window."""
        return HookInputs(last_queries=self.observation_window, piece=16)

    def scaled(self, share: float) -> Self:
        """Also the window, where the prompt's budget would not hold it."""
        scaled = super().scaled(share)
        return dataclasses.replace(
            scaled, observation_window=min(self.observation_window, max(1, scaled.max_capacity_prompt // 2))
        )

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the settings."""
        check_range(self.name, "observation_window", self.observation_window, 1)
        check_range(self.name, "max_capacity_prompt", self.max_capacity_prompt, self.observation_window)
        check_range(self.name, "kernel", self.kernel, 1)
        check_choice(self.name, "kernel % 2", self.kernel % 2, (1,))
        check_choice(self.name, "pooling", self.pooling, ("max", "avg"))
        check_choice(self.name, "granularity", self.granularity, ("kv_head", "q_head"))
        return self

    def slots(self, capacity: int) -> int:
        """Never more than the capacity."""
        return min(self.max_capacity_prompt, capacity)

    def heads(self, spec: CacheSpec) -> int:
        """Heads with a set of their own."""
        return spec.q_heads if self.granularity == "q_head" else spec.kv_heads

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Attention of the last queries to each token, summed, pooled along the tokens."""
        assert prompt.q_tail is not None
        tokens, window = prompt.k_post.shape[1], self.observation_window
        position, last = jnp.arange(tokens), prompt.lengths[:, None]
        own = last - window + jnp.arange(window)  # positions of the queries [B, w]; negative ones repeat the first
        seen = position <= own[:, :, None]
        queries = group_queries(prompt.q_tail, spec.kv_heads)
        logits = jnp.einsum("bhgtd,bshd->bhgts", queries, prompt.k_post, preferred_element_type=jnp.float32)
        logits *= spec.scale
        probs = jax.nn.softmax(jnp.where(seen[:, None, None], logits, MASKED), axis=-1)
        probs = jnp.where((own >= 0)[:, None, None, :, None], probs, 0)
        scores = probs.sum(axis=3)  # [B, h_kv, group, S]
        scores = scores.mean(axis=2) if self.granularity == "kv_head" else scores.reshape(spec.batch, -1, tokens)
        inside = position < jnp.maximum(last - window, 0)
        return pool(jnp.where(inside[:, None], scores, 0), self.kernel, self.pooling), jnp.full_like(last[:, 0], window)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Scores of the window's queries, their masked form and their softmax."""
        return (
            super().compress_bytes(spec, tokens) + 3 * 4 * spec.batch * spec.q_heads * self.observation_window * tokens
        )

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """All numbers of tokens; a small one has a small window."""
        cls = type(self)

        def make(slots: int) -> Any:
            return cls(max_capacity_prompt=slots, observation_window=max(1, min(cls.observation_window, slots // 2)))

        return [Falling(make, 1, num_tokens)]


def pool(scores: Array, kernel: int, pooling: str) -> Array:
    """Scores [B, h, S], each the maximum or the mean of `kernel` neighbours; beyond the ends lie zeros."""
    half, shape, ones = kernel // 2, (1, 1, kernel), (1, 1, 1)
    pad = ((0, 0), (0, 0), (half, half))
    if pooling == "max":
        return lax.reduce_window(scores, 0.0, lax.max, shape, ones, pad)
    return lax.reduce_window(scores, 0.0, lax.add, shape, ones, pad) / kernel
