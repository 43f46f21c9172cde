"""KVzip keeps the prompt tokens to which the model attends most while it repeats the prompt.

Source: Kim et al. 2025, arXiv 2505.23416, section 3, and NVIDIA's kvpress 0.5.5 (`KVzipPress`), whose scores this file
follows. The model reads the prompt, and is then asked to repeat it, chunk by chunk (`SecondPass`). The score of a token
is the largest attention that it receives from any query while its chunk is repeated, over the query heads of its KV
head. The heads of a layer share one budget. No question at the end of the prompt is needed. The second pass takes at
least as long as the first, because each chunk attends to the whole prompt.

kvpress by default ranks the tokens of all layers together, so each layer keeps another number of tokens. Here a layer's
memory is fixed before the prompt is read, so all layers keep as many (`layerwise=True` in kvpress). kvpress puts the
template's end of a user's message before a chunk. Here it is a line break, as in kvpress for a model without a chat
template. kvpress repeats no tokens of the template before a user's message. Here the whole prompt is repeated. A
checkpoint without a tokenizer gets no request in words, only the chunk. The softmax of a score is over some of the
keys, and has no attention sink of the model. A test compares the kept tokens with those of kvpress
(docs/benchmarks/tests.md).
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.policies.base import HookInputs
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.eviction import SharesBudget
from jshadow.policies.prefill_attention import SecondPass
from jshadow.policies.registry import register
from jshadow.policies.sizing import Falling


@register(small={"kept": 14, "sinks": 2, "chunk": 24}, lossless=lambda tokens, config: {"kept": tokens})
@dataclasses.dataclass(frozen=True)
class KVzip(SharesBudget):
    """Keep the prompt tokens to which the model attends most while it repeats the prompt.

    Attributes:
        kept: mean number of prompt tokens that a KV head keeps.
        chunk: number of prompt tokens that are repeated at once.
        sinks: number of first tokens that are always kept, at most `kept`. They share the attention of every chunk.
        normalized: divide the attention by the norm of the query token's hidden state, and multiply it by the norm of
            the token's value after the output projection. This is KVzip+ of kvpress.
    """

    chunk: int = 2048
    sinks: int = 4
    normalized: bool = False

    name = "kvzip"
    source = "arXiv 2505.23416, section 3"
    size_free = ("chunk", "sinks", "normalized")

    @property
    def least_share(self) -> float:
        return 0.0

    @property
    def reads(self) -> HookInputs:
        return HookInputs(second_pass=SecondPass(self.chunk, self.sinks, self.normalized), piece=16)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "chunk", self.chunk, 1)
        check_range(self.name, "sinks", self.sinks, 0)
        check_choice(self.name, "normalized", self.normalized, (False, True))
        return super().resolve(config, capacity)

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        assert prompt.second_pass is not None
        first = jnp.arange(prompt.k_post.shape[1]) < min(self.sinks, self.kept)
        return jnp.where(first, jnp.inf, prompt.second_pass), jnp.zeros_like(prompt.lengths)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        return [Falling(lambda kept: dataclasses.replace(self, kept=kept), 1, num_tokens)]
