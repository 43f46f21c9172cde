"""Ada-KV gives each head of a layer its own number of prompt tokens: the heads share one budget.

Source: Feng et al. 2024, arXiv 2407.11550, section 3. Another method scores the tokens of each head. The tokens with
the highest scores of all heads are kept, and each head keeps a share of the mean budget at least (the safeguard). So a
head whose attention is spread over many tokens keeps more of them.

NVIDIA's kvpress 0.5.5 (`AdaKVPress`) keeps the same tokens, but masks the others and frees no memory. Here the others
are dropped (`SharesBudget`). A test compares the kept tokens with those of kvpress (docs/benchmarks/tests.md).
"""

import dataclasses
from typing import Self

from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import HookInputs
from jshadow.policies.checks import check_choice, check_number
from jshadow.policies.eviction import EvictingPolicy, SharesBudget
from jshadow.policies.expected_attention import ExpectedAttention
from jshadow.policies.keydiff import KeyDiff
from jshadow.policies.kvzip import KVzip
from jshadow.policies.registry import register
from jshadow.policies.snapkv import SnapKV

SCORES = ("snapkv", "expected_attention", "keydiff", "kvzip")


def scorer_of(name: str, kept: int) -> EvictingPolicy:
    """Return the method of SCORES that scores tokens, of which `kept` are kept. SnapKV's window has at most half of
    them.
    """
    if name == "snapkv":
        window = max(1, min(SnapKV.observation_window, kept // 2))
        return SnapKV(max_capacity_prompt=kept, observation_window=window)
    others = {"expected_attention": ExpectedAttention, "keydiff": KeyDiff, "kvzip": KVzip}
    return others[name](kept=kept)


@register(small={"kept": 14}, lossless=lambda tokens, config: {"kept": tokens})
@dataclasses.dataclass(frozen=True)
class AdaKV(SharesBudget):
    """Keep the prompt tokens with the highest scores of all heads of a layer.

    Attributes:
        kept: mean number of prompt tokens that a KV head keeps.
        safeguard: the share of `kept` that each head keeps at least.
        scores: the method that scores the tokens, with its default settings: "snapkv", "expected_attention", "keydiff"
            or "kvzip".
    """

    safeguard: float = 0.2
    scores: str = "snapkv"

    name = "adakv"
    source = "arXiv 2407.11550, section 3"

    @property
    def least_share(self) -> float:
        return self.safeguard

    @property
    def scorer(self) -> EvictingPolicy:
        """The method that scores the tokens."""
        return scorer_of(self.scores, self.kept)

    @property
    def reads(self) -> HookInputs:
        return self.scorer.reads

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_number(self.name, "safeguard", self.safeguard, 0)
        if self.safeguard > 1:
            raise ConfigError(f"{self.name}.safeguard must be at most 1, got {self.safeguard!r}")
        check_choice(self.name, "scores", self.scores, SCORES)
        return super().resolve(config, capacity)

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        return self.scorer.score(spec, prompt)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        return super().compress_bytes(spec, tokens) + self.scorer.compress_bytes(spec, tokens)
