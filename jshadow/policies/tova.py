"""TOVA keeps the prompt tokens that the last query attends to most, the same tokens for all heads of a layer.

Source: Oren et al. 2024, arXiv 2401.06104. The attention is averaged over all query heads. The paper evicts one token
at each step, after the prompt too. Here the tokens of a prompt are evicted once, and all later tokens are kept, as in
NVIDIA's kvpress 0.5.5 (`TOVAPress`). kvpress and this file always keep the last token of the prompt. The paper does
not. In a model with attention sinks, the sink takes its part of the softmax. A test compares the kept tokens with those
of kvpress (docs/benchmarks/tests.md).
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import MASKED, group_queries, softmax_with
from jshadow.policies.base import HookInputs
from jshadow.policies.eviction import KeepsBest
from jshadow.policies.registry import register


@register(small={"kept": 14}, lossless=lambda tokens, config: {"kept": tokens})
@dataclasses.dataclass(frozen=True)
class TOVA(KeepsBest):
    """Keep the prompt tokens that the prompt's last query attends to most, averaged over all heads.

    Attributes:
        kept: number of prompt tokens that are kept, the last one included.
    """

    name = "tova"
    source = "arXiv 2401.06104"

    @property
    def reads(self) -> HookInputs:
        return HookInputs(last_queries=1, piece=16)

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Score each token by the attention of the last query, averaged over all query heads."""
        assert prompt.q_tail is not None
        queries = group_queries(prompt.q_tail, spec.kv_heads)
        logits = jnp.einsum("bhgtd,bshd->bhgts", queries, prompt.k_post, preferred_element_type=jnp.float32)
        there = jnp.arange(prompt.k_post.shape[1]) < prompt.lengths[:, None]
        probs = softmax_with(jnp.where(there[:, None, None, None], logits * spec.scale, MASKED), prompt.sinks)
        scores = probs.mean(axis=(1, 2, 3))  # [B, S]
        scores = scores if spec.heads_axis is None else lax.pmean(scores, spec.heads_axis)
        shape = (spec.batch, spec.kv_heads, scores.shape[1])
        return jnp.broadcast_to(scores[:, None], shape), jnp.ones_like(prompt.lengths)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        return super().compress_bytes(spec, tokens) + 3 * 4 * spec.batch * spec.q_heads * tokens
