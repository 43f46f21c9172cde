"""Wrappers around policies: dense first layers, and budgets that differ by layer.

A wrapper decides the cache of each layer. Wrappers can be nested: `DenseFirst(Pyramid(Quest()))`. On the command line,
a setting that begins with the name of a wrapper puts it around the policy: `--set dense_first.layers=2`.
"""

import dataclasses
from typing import Self

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import LayerCache, Policy, Wrapper, full_layers, innermost
from jshadow.policies.capabilities import Budgeted, CouplesLayers, capability
from jshadow.policies.checks import check_range
from jshadow.policies.full import Full
from jshadow.policies.shadowkv import ShadowKV


def _check_inner(wrapper: Wrapper) -> None:
    """Raise ConfigError unless the inner policy is a policy whose layers do not depend on each other."""
    if not isinstance(wrapper.inner, Policy):
        raise ConfigError(f"{wrapper.name}.inner must be a policy, got {wrapper.inner!r}")
    if capability(wrapper.inner, CouplesLayers) is not None:
        raise ConfigError(f"{wrapper.name}.inner must have layers that stand alone, got {wrapper.inner.name}")


@dataclasses.dataclass(frozen=True)
class DenseFirst(Wrapper):
    """Full attention in the first layers, in which selection works badly (Quest, arXiv 2406.10774, section 4.2).

    Attributes:
        inner: the policy of the other layers.
        layers: number of first layers with full attention. Layers with the model's own window are not counted.
    """

    inner: Policy = dataclasses.field(default_factory=ShadowKV)
    layers: int = 2

    name = "dense_first"
    source = "arXiv 2406.10774, section 4.2"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "layers", self.layers, 0, len(full_layers(config)))
        _check_inner(self)
        return super().resolve(config, capacity)

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        dense = full_layers(config).index(layer) < self.layers
        return Full() if dense else self.inner.for_layer(layer, config)


@dataclasses.dataclass(frozen=True)
class Pyramid(Wrapper):
    """Budgets that fall linearly from layer to layer (PyramidKV, arXiv 2406.02069). Their mean stays the same.

    Attributes:
        inner: the policy whose budgets are scaled.
        steepness: the last layer has 1 / steepness of the mean budget. The paper uses 20; with 1 all budgets are equal.
    """

    inner: Policy = dataclasses.field(default_factory=ShadowKV)
    steepness: float = 20.0

    name = "pyramid"
    source = "arXiv 2406.02069, section 4.2"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        number = isinstance(self.steepness, int | float) and not isinstance(self.steepness, bool)
        if not number or not 1 <= self.steepness < float("inf"):
            raise ConfigError(f"pyramid.steepness must be at least 1 and finite, got {self.steepness!r}")
        _check_inner(self)
        resolved = super().resolve(config, capacity)
        if not isinstance(innermost(resolved), Budgeted):
            raise ConfigError(f"pyramid.inner must be a policy with a budget, got {resolved.inner.name}")
        return resolved

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """Return the inner policy's cache for the layer, with its budget scaled."""
        caches = {other: self.inner.for_layer(other, config) for other in full_layers(config)}
        cache, ranks = caches[layer], [other for other, one in caches.items() if isinstance(one, Budgeted)]
        if not isinstance(cache, Budgeted):
            return cache  # a layer without a budget, such as one with full attention
        last, count = 1 / self.steepness, len(ranks)
        step = (2 - 2 * last) / (count - 1) if count > 1 else 0.0
        scaled = cache.scaled(2 - last - ranks.index(layer) * step if count > 1 else 1.0)
        assert isinstance(scaled, LayerCache)
        return scaled


WRAPPERS: dict[str, type[Wrapper]] = {wrapper.name: wrapper for wrapper in (DenseFirst, Pyramid)}
