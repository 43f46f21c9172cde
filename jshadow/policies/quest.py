"""Quest: pages by the largest product that a key in them could have (Tang et al. 2024, arXiv 2406.10774, section 3).

The published evaluation selects per query head over repeated keys; here, as in its kernels, a KV head's pages serve its
group, by the largest bound in it. The newest page is always attended. Keys and values may be offloaded, which the
paper's system does not do: the minima and maxima are what a device must hold.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.policies.base import LayerCache
from jshadow.policies.capabilities import Sized
from jshadow.policies.checks import check_range
from jshadow.policies.full import Full
from jshadow.policies.registry import register
from jshadow.policies.retrieval import RetrievalPolicy


@register(
    small={"budget": 12, "unit": 4, "dense_layers": 1},
    lossless=lambda tokens, config: {"budget": max(tokens, 4), "unit": 4, "dense_layers": 0},
)
@dataclasses.dataclass(frozen=True)
class Quest(RetrievalPolicy, Sized):
    """Fetch the pages whose upper bound on a query's scores is highest.

    Attributes:
        budget: tokens fetched for a query.
        unit: tokens of a page.
        recent: newest tokens that are always attended, with the pages they are in.
        dense_layers: first layers that attend to everything.
        top_p: share of the softmax over the budget that is enough.
    """

    budget: int = 1024
    unit: int = 16
    recent: int = 1
    dense_layers: int = 2
    top_p: float = 1.0

    name = "quest"
    source = "arXiv 2406.10774, section 3"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the settings."""
        check_range(self.name, "dense_layers", self.dense_layers, 0)
        return super().resolve(config, capacity)

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """The first layers are dense: pages say little there (section 3.1)."""
        return Full() if layer < self.dense_layers else self

    def summarise(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> tuple[Array, Array]:
        """The least and the largest number of each column of a page's keys."""
        real = there[:, None, ..., None]
        least = jnp.where(real, keys, jnp.inf).min(axis=3)
        most = jnp.where(real, keys, -jnp.inf).max(axis=3)
        some = real.any(axis=3)
        return jnp.where(some, least, 0).astype(spec.dtype), jnp.where(some, most, 0).astype(spec.dtype)

    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        """Sum over columns of the larger of q * least and q * most: no key of the page has a larger product."""
        least, most = summaries
        # with q split by sign that is two products of matrices
        up, down = jnp.maximum(q, 0), jnp.minimum(q, 0)
        bound = jnp.einsum("bhgtd,bhnd->bhgtn", up, most, preferred_element_type=jnp.float32)
        bound = bound + jnp.einsum("bhgtd,bhnd->bhgtn", down, least, preferred_element_type=jnp.float32)
        return bound.max(axis=2)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Keys and values offloaded and no dense layer, by the size of pages: the smaller, the more bounds are kept."""
        cls = type(self)
        units = [unit for unit in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if unit <= max(num_tokens, 16)]
        return [[cls(unit=unit, budget=max(cls.budget, unit), dense_layers=0)] for unit in units]
