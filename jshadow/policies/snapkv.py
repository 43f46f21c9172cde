"""SnapKV keeps the prompt tokens that the last queries of the prompt attend to most.

Source: Li et al. 2024, arXiv 2404.14469, section 4. The paper does not state the kind of pooling. Here the default is
the maximum, as in the paper's LongBench settings. In the published code, each query head selects its own set of tokens
and stores their keys and values (`granularity="q_head"`). Here, by default, each KV head has one set of tokens. It is
selected by the mean of the scores over the query heads of the KV head. In a model with attention sinks, a score is the
attention that the model gives, so the sink takes its part of the softmax.

NVIDIA's kvpress 0.5.5 has other defaults than the paper: a window of 64 queries, and the mean over 5 tokens. With
`observation_window=64`, `kernel=5` and `pooling="avg"`, a test compares the kept tokens with those of kvpress
(docs/benchmarks/tests.md).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import MASKED, group_queries, softmax_with
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
    """Keep the prompt's newest tokens and the tokens that these attend to most.

    Attributes:
        max_capacity_prompt: number of prompt tokens that are kept, the observation window included.
        observation_window: number of newest prompt tokens. Their queries score the others, and they are always kept.
        kernel: number of tokens over which scores are pooled, an odd number. Pooling also keeps the neighbors of an
            important token.
        pooling: "max" or "avg".
        granularity: "kv_head": each KV head keeps one set of tokens. "q_head": each query head does.
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
        return HookInputs(last_queries=self.observation_window, piece=16)

    def scaled(self, share: float) -> Self:
        """Scale the budget, and limit the observation window to half of it."""
        scaled = super().scaled(share)
        return dataclasses.replace(
            scaled, observation_window=min(self.observation_window, max(1, scaled.max_capacity_prompt // 2))
        )

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "observation_window", self.observation_window, 1)
        check_range(self.name, "max_capacity_prompt", self.max_capacity_prompt, self.observation_window)
        check_range(self.name, "kernel", self.kernel, 1)
        check_choice(self.name, "kernel % 2", self.kernel % 2, (1,))
        check_choice(self.name, "pooling", self.pooling, ("max", "avg"))
        check_choice(self.name, "granularity", self.granularity, ("kv_head", "q_head"))
        return self

    def slots(self, capacity: int) -> int:
        return min(self.max_capacity_prompt, capacity)

    def heads(self, spec: CacheSpec) -> int:
        return spec.q_heads if self.granularity == "q_head" else spec.kv_heads

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Score each token by the attention of the last queries, summed over them and pooled along the tokens."""
        assert prompt.q_tail is not None
        tokens, window = prompt.k_post.shape[1], self.observation_window
        position, last = jnp.arange(tokens), prompt.lengths[:, None]
        query_positions = last - window + jnp.arange(window)  # [B, w]; negative in a prompt shorter than the window
        seen = position <= query_positions[:, :, None]
        queries = group_queries(prompt.q_tail, spec.kv_heads)
        logits = jnp.einsum("bhgtd,bshd->bhgts", queries, prompt.k_post, preferred_element_type=jnp.float32)
        logits *= spec.scale
        probs = softmax_with(jnp.where(seen[:, None, None], logits, MASKED), prompt.sinks)
        probs = jnp.where((query_positions >= 0)[:, None, None, :, None], probs, 0)
        scores = probs.sum(axis=3)  # [B, h_kv, group, S]
        scores = scores.mean(axis=2) if self.granularity == "kv_head" else scores.reshape(spec.batch, -1, tokens)
        inside = position < jnp.maximum(last - window, 0)
        return pool(jnp.where(inside[:, None], scores, 0), self.kernel, self.pooling), jnp.full_like(last[:, 0], window)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count the default, and the scores of the window's queries, their masked form and their softmax."""
        return (
            super().compress_bytes(spec, tokens) + 3 * 4 * spec.batch * spec.q_heads * self.observation_window * tokens
        )

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return one policy for each number of tokens from num_tokens down to 1.

        The observation window is at most half of this number.
        """
        cls = type(self)

        def make(slots: int) -> Any:
            return cls(max_capacity_prompt=slots, observation_window=max(1, min(cls.observation_window, slots // 2)))

        return [Falling(make, 1, num_tokens)]


def pool(scores: Array, kernel: int, pooling: str) -> Array:
    """Replace each score of [B, h, S] by the maximum or the mean of the `kernel` scores around it.

    Scores before the first and after the last token count as 0.
    """
    half, shape, ones = kernel // 2, (1, 1, kernel), (1, 1, 1)
    pad = ((0, 0), (0, 0), (half, half))
    if pooling == "max":
        return lax.reduce_window(scores, 0.0, lax.max, shape, ones, pad)
    return lax.reduce_window(scores, 0.0, lax.add, shape, ones, pad) / kernel
