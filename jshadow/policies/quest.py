"""Quest scores pages by an upper bound on the scores of their keys (Tang et al. 2024, arXiv 2406.10774, section 3).

The code of the paper's evaluation selects pages for each query head. Here, as in its kernels, a KV head selects pages
for its whole group of query heads, by the largest bound in the group. The newest page is always attended to. Unlike in
the paper's system, keys and values can be offloaded. The device then holds only the minima and maxima of the pages.
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
    """Fetch the pages with the highest upper bound on a query's scores.

    Attributes:
        budget: number of tokens fetched for a query.
        unit: tokens in a page.
        recent: number of newest tokens that are always attended to, together with the other tokens of the page in which
            they begin.
        dense_layers: number of first layers with full attention.
        top_p: fetch only the best pages of the budget that together have this share of the softmax over their bounds.
            1: all pages of the budget.
    """

    budget: int = 1024
    unit: int = 16
    recent: int = 1
    dense_layers: int = 2
    top_p: float = 1.0

    name = "quest"
    source = "arXiv 2406.10774, section 3"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "dense_layers", self.dense_layers, 0)
        return super().resolve(config, capacity)

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """Return full attention for the first layers, where the bounds select badly (section 3.1)."""
        return Full() if layer < self.dense_layers else self

    def summarize(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> tuple[Array, Array]:
        real = there[:, None, ..., None]
        least = jnp.where(real, keys, jnp.inf).min(axis=3)
        most = jnp.where(real, keys, -jnp.inf).max(axis=3)
        some = real.any(axis=3)
        return jnp.where(some, least, 0).astype(spec.dtype), jnp.where(some, most, 0).astype(spec.dtype)

    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        """Return the sum over columns of max(q * minimum, q * maximum).

        No key of the page has a larger product with q.
        """
        least, most = summaries
        # if q is split by sign, this is the sum of two matrix products
        up, down = jnp.maximum(q, 0), jnp.minimum(q, 0)
        bound = jnp.einsum("bhgtd,bhnd->bhgtn", up, most, preferred_element_type=jnp.float32)
        bound = bound + jnp.einsum("bhgtd,bhnd->bhgtn", down, least, preferred_element_type=jnp.float32)
        return bound.max(axis=2)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return policies with page sizes from small to large, without dense layers.

        The smaller the pages, the more bounds are on the device.
        """
        cls = type(self)
        units = [unit for unit in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if unit <= max(num_tokens, 16)]
        return [[cls(unit=unit, budget=max(cls.budget, unit), dense_layers=0)] for unit in units]
