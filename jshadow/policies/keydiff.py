"""KeyDiff keeps the prompt tokens whose keys differ most from the mean key of their head.

Source: Park et al. 2025, arXiv 2504.15364. Every key is divided by its norm. The score of a token is the negative
cosine of the angle between its key and the mean of these keys. No query is read, so the choice does not depend on a
question at the end of the prompt. The paper reads a prompt in blocks and evicts after each block. Here the whole prompt
is read first, as in NVIDIA's kvpress 0.5.5 (`KeyDiffPress` alone, without its `BlockPress`). A test compares the kept
tokens with those of kvpress (docs/benchmarks/tests.md).
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.policies.eviction import KeepsBest
from jshadow.policies.registry import register

_LEAST = 1e-12  # norms are at least this, so that a key of zeros is no division by zero


@register(small={"kept": 14}, lossless=lambda tokens, config: {"kept": tokens})
@dataclasses.dataclass(frozen=True)
class KeyDiff(KeepsBest):
    """Keep the prompt tokens whose keys are least similar to the mean key of the head.

    Attributes:
        kept: number of prompt tokens that each KV head keeps.
    """

    name = "keydiff"
    source = "arXiv 2504.15364"

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        keys = prompt.k_post.astype(jnp.float32)  # zeros in padding
        unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), _LEAST)
        mean = unit.sum(axis=1) / prompt.lengths[:, None, None]
        mean /= jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), _LEAST)
        return -jnp.einsum("bshd,bhd->bhs", unit, mean, precision="highest"), jnp.zeros_like(prompt.lengths)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        return super().compress_bytes(spec, tokens) + 4 * spec.batch * spec.kv_heads * tokens * (2 * spec.head_dim + 1)
