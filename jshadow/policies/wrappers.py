"""What can be put around any policy: dense first layers, and budgets that differ by layer.

A wrapper only says which policy each layer has; they compose, `DenseFirst(Pyramid(Quest()))`. On the command line a
setting with the wrapper's name in front puts it around the policy: `--set dense_first.layers=2`.
"""

import dataclasses
from typing import Any, Self

from jax import Array

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import Policy, check_range, own_layers
from jshadow.policies.full import Full
from jshadow.policies.infinigen.policy import ForeseeingFull
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.shadowkv.policy import ShadowKV
from jshadow.policies.sizing import infeasible, own_share, whole_share


@dataclasses.dataclass(frozen=True)
class Wrapper(Policy):
    """A policy around another one.

    Attributes:
        inner: the policy of the layers that the wrapper leaves alone.
    """

    inner: Policy = dataclasses.field(default_factory=ShadowKV)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.needs

    @property
    def q_tail(self) -> int:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.q_tail

    @property
    def step_rows(self) -> int:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.step_rows

    @property
    def predecode(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.predecode

    @property
    def foresees(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.foresees

    @property
    def extend_piece(self) -> int:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.extend_piece

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Resolve the inner policy. Raises ConfigError for one whose layers depend on each other."""
        if not isinstance(self.inner, Policy):
            raise ConfigError(f"{self.name}.inner must be a policy, got {self.inner!r}")
        if self.inner.couples_layers:
            raise ConfigError(f"{self.name}.inner must have layers that stand alone, got {self.inner.name}")
        return dataclasses.replace(self, inner=self.inner.resolve(config, capacity))

    def for_layer(self, layer: int, config: ModelConfig) -> Policy:
        """The inner policy's."""
        return self.inner.for_layer(layer, config)

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """The inner policy's."""
        return self.inner.fallback(config, capacity)

    @property
    def reads_fitted(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.reads_fitted

    @property
    def trains(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.inner.trains

    def fitted_shapes(self, config: ModelConfig) -> Any:
        """The inner policy's."""
        return self.inner.fitted_shapes(config)

    def fit(self, params: Any, tokens: Array, **options: Any) -> Any:
        """The inner policy's."""
        return self.inner.fit(params, tokens, **options)

    def with_fitted(self) -> Self:
        """Around the inner policy's."""
        return dataclasses.replace(self, inner=self.inner.with_fitted())

    def prefill_attention(self) -> PrefillAttention | None:
        """The inner policy's."""
        return self.inner.prefill_attention()

    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
        """The inner policy's."""
        return self.inner.init_shared(specs, fitted)

    def after_step(self, shared: Any, logits: Array, lengths: Array) -> Any:
        """The inner policy's."""
        return self.inner.after_step(shared, logits, lengths)

    def before_guess(self, shared: Any, token: Array) -> Any:
        """The inner policy's."""
        return self.inner.before_guess(shared, token)

    # A layer has one of the policies inside, never the wrapper.

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Not a layer's policy."""
        raise TypeError(f"{self.name} is no layer's policy: ask for_layer")

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Not a layer's policy."""
        raise TypeError(f"{self.name} is no layer's policy: ask for_layer")

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Not a layer's policy."""
        raise TypeError(f"{self.name} is no layer's policy: ask for_layer")

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None, carry: Any
    ) -> tuple[Array, LayerState, Any]:
        """Not a layer's policy."""
        raise TypeError(f"{self.name} is no layer's policy: ask for_layer")

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Not a layer's policy."""
        raise TypeError(f"{self.name} is no layer's policy: ask for_layer")

    @classmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """Around ShadowKV's."""
        return cls(inner=ShadowKV.lossless(num_tokens, config))

    @classmethod
    def nominal(cls, fraction: float, num_tokens: int, config: ModelConfig) -> Self:
        """Around ShadowKV's."""
        return cls(inner=ShadowKV.nominal(fraction, num_tokens, config))


@dataclasses.dataclass(frozen=True)
class DenseFirst(Wrapper):
    """Full attention in the first layers, whose queries select badly (Quest's choice, arXiv 2406.10774, section 4.2).

    Attributes:
        layers: how many of the layers that see everything.
    """

    layers: int = 2

    name = "dense_first"
    source = "arXiv 2406.10774, section 4.2"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the number too."""
        check_range(self.name, "layers", self.layers, 0, len(own_layers(config)))
        return super().resolve(config, capacity)

    def for_layer(self, layer: int, config: ModelConfig) -> Policy:
        """Full attention, or the inner policy's."""
        if own_layers(config).index(layer) >= self.layers:
            return self.inner.for_layer(layer, config)
        return ForeseeingFull() if self.inner.foresees else Full()

    @classmethod
    def nominal(cls, fraction: float, num_tokens: int, config: ModelConfig) -> Self:
        """The dense layers, and ShadowKV with what they leave."""
        own = len(own_layers(config))
        layers = min(cls.layers, own)
        share = own_share(cls.name, fraction, num_tokens, config) * own - layers
        if share <= 0:
            raise infeasible(cls.name, fraction, whole_share(layers / max(own, 1), num_tokens, config))
        rest = whole_share(share / max(own - layers, 1), num_tokens, config)
        return cls(inner=ShadowKV.nominal(rest, num_tokens, config), layers=layers)


@dataclasses.dataclass(frozen=True)
class Pyramid(Wrapper):
    """Budgets that fall from layer to layer by the same step, as many tokens in all (PyramidKV, arXiv 2406.02069).

    Attributes:
        steepness: the last layer has this part of the mean, its inverse: 20 as published; 1 for equal budgets.
    """

    steepness: float = 20.0

    name = "pyramid"
    source = "arXiv 2406.02069, section 4.2"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the steepness, and that the inner policy has a budget."""
        number = isinstance(self.steepness, int | float) and not isinstance(self.steepness, bool)
        if not number or not 1 <= self.steepness < float("inf"):
            raise ConfigError(f"pyramid.steepness must be at least 1 and finite, got {self.steepness!r}")
        made = super().resolve(config, capacity)
        if not innermost(made).budget_fields:
            raise ConfigError(f"pyramid.inner must be a policy with a budget, got {made.inner.name}")
        return made

    def for_layer(self, layer: int, config: ModelConfig) -> Policy:
        """The inner policy's with its share of the budget."""
        policy = self.inner.for_layer(layer, config)
        ranks = [other for other in own_layers(config) if self.inner.for_layer(other, config).budget_fields]
        if layer not in ranks:
            return policy  # a dense one
        last, count = 1 / self.steepness, len(ranks)
        step = (2 - 2 * last) / (count - 1) if count > 1 else 0.0
        return policy.scaled(2 - last - ranks.index(layer) * step if count > 1 else 1.0)


def innermost(policy: Policy) -> Policy:
    """What all wrappers are around."""
    return innermost(policy.inner) if isinstance(policy, Wrapper) else policy


WRAPPERS: dict[str, type[Wrapper]] = {wrapper.name: wrapper for wrapper in (DenseFirst, Pyramid)}
