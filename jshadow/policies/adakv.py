"""Ada-KV gives each head of a layer its own number of prompt tokens: the heads share one budget.

Source: Feng et al. 2024, arXiv 2407.11550, section 3. Another method scores the tokens of each head. The tokens with
the highest scores of all heads are kept, and each head keeps a share of the mean budget at least (the safeguard). So a
head whose attention is spread over many tokens keeps more of them.

NVIDIA's kvpress 0.5.5 (`AdaKVPress`) keeps the same tokens, but masks the others and frees no memory. Here the others
are dropped (`head_budgets.py`). A test compares the kept tokens with those of kvpress (docs/benchmarks/tests.md).
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
from jshadow.policies.eviction import EvictingPolicy
from jshadow.policies.head_budgets import SharesBudget
from jshadow.policies.registry import register
from jshadow.policies.scorers import SCORES, scorer_of


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
        """The share of `kept` that each head keeps at least."""
        return self.safeguard

    @property
    def scorer(self) -> EvictingPolicy:
        """The method that scores the tokens."""
        return scorer_of(self.scores, self.kept)

    @property
    def reads(self) -> HookInputs:
        """The hooks need what the scoring method needs."""
        return self.scorer.reads

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the settings, of which none is None."""
        check_number(self.name, "safeguard", self.safeguard, 0)
        if self.safeguard > 1:
            raise ConfigError(f"{self.name}.safeguard must be at most 1, got {self.safeguard!r}")
        check_choice(self.name, "scores", self.scores, SCORES)
        return super().resolve(config, capacity)

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Return the scores of the scoring method."""
        return self.scorer.score(spec, prompt)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count what the shared budget takes, and the bytes of the scoring method."""
        return super().compress_bytes(spec, tokens) + self.scorer.compress_bytes(spec, tokens)
