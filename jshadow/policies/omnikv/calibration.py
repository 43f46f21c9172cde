"""Which layers of a model serve as OmniKV's filters: measured on a text (OmniKV, ICLR 2025, section 3 and appendix).

A layer is a good filter where the tokens that its own attention ranks highest are those that later layers attend to.
For each layer i and each later layer j: the share of j's attention that falls on i's top tokens, mean over queries and
heads. Layers that see a window only neither choose nor count. Most heads give much to the first token (a sink), which
nearly every layer ranks high: masses are large and differ little, and it is their order that chooses.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.prompt_walk import check_text, prompts_of
from jshadow.errors import ConfigError, PromptError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import group_queries
from jshadow.policies.checks import check_range
from jshadow.policies.omnikv.policy import full_layers

QUERIES = 64  # of each row of a text, evenly spaced


class FilterMasses(NamedTuple):
    """What a text told.

    Attributes:
        layers: layers that see everything, in order.
        masses: float64 [n, n]: of the attention of layers[j], what falls on the top tokens of layers[i]; NaN for
            j <= i.
        budget: tokens of a top set.
    """

    layers: tuple[int, ...]
    masses: np.ndarray
    budget: int

    @property
    def scores(self) -> np.ndarray:
        """Mean over all later layers, float64 [n]; NaN for the last one."""
        count = np.arange(len(self.layers))[::-1]
        return np.nansum(self.masses, axis=1) / np.where(count > 0, count, np.nan)


def filter_masses(
    params: Any,
    tokens: Any,
    *,
    budget: int,
    queries: int = QUERIES,
    progress: Callable[[int, int], None] | None = None,
) -> FilterMasses:
    """Measure how well each layer chooses for those behind it.

    A layer's score of a token is the largest attention that any head gives it, as in OmniKV's selection; it chooses
    among all tokens up to the query's own. Queries are evenly spaced over those that see more than the budget.

    Args:
        params: Params.
        tokens: int32 [S] or [B, S], no padding.
        budget: tokens that a layer chooses; fewer than S.
        queries: of each row, at most.
        progress: called with (layers done, layers).

    Raises:
        PromptError: tokens of a wrong shape, out of range, or no more than the budget.
        ConfigError: budget or queries below 1.
    """
    check_range("filter_masses", "budget", budget, 1)
    check_range("filter_masses", "queries", queries, 1)
    text, config = check_text(params.config, tokens), params.config
    count = text.shape[1]
    if count <= budget:
        raise PromptError(f"tokens must be more than budget={budget}, got {count}: nothing would be left out")
    at = np.unique(np.linspace(budget, count - 1, min(queries, count - budget)).round().astype(np.int32))
    layers = full_layers(config)
    chosen: list[Array] = []
    masses = np.full((len(layers), len(layers)), np.nan)
    for layer, prompt in enumerate(prompts_of(params, text, progress)):
        if layer not in layers:
            continue
        best, given = layer_attention(
            prompt.q_post, prompt.k_post, jnp.asarray(at), scale=config.attention_scale, budget=budget
        )
        for rank, one in enumerate(chosen):
            masses[rank, len(chosen)] = float(jnp.take_along_axis(given, one, axis=2).sum(axis=2).mean())
        chosen.append(best)
    return FilterMasses(layers, masses, budget)


@functools.partial(jax.jit, static_argnames=("scale", "budget"))
def layer_attention(q: Array, k: Array, at: Array, *, scale: float, budget: int) -> tuple[Array, Array]:
    """Of the queries at some positions [n]: their top tokens int32 [B, n, T], and mean attention float32 [B, n, S]."""

    def one(position: Array) -> tuple[Array, Array]:
        query = group_queries(jnp.take(q, position[None], axis=1), k.shape[2]).astype(jnp.float32)
        logits = jnp.einsum("bhgtd,bshd->bhgs", query, k.astype(jnp.float32)) * scale
        seen = jnp.arange(k.shape[1]) <= position
        probs = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        ranked = jnp.where(seen, probs.max(axis=(1, 2)), -1.0)
        return jax.lax.top_k(ranked, budget)[1], probs.mean(axis=(1, 2))

    best, given = jax.lax.map(one, at)
    return best.swapaxes(0, 1), given.swapaxes(0, 1)


def choose_filters(found: FilterMasses, count: int) -> tuple[int, ...]:
    """The layers to filter at, rising: the peak of each of `count` equal stretches of the model.

    A stretch each keeps them apart, and the first one early: all layers before it are dense. A filter needs a sparse
    layer to serve, so that the last two layers are none, and between two filters lie at least two layers. A model too
    shallow for `count` gets fewer, but one.

    Raises:
        ConfigError: count below 1, or no layer that sees everything.
    """
    check_range("choose_filters", "count", count, 1)
    if not found.layers:
        raise ConfigError("filter layers must see everything, got a model whose layers all see a window only")
    usable = max(len(found.layers) - 2, 1)
    scores = np.nan_to_num(found.scores, nan=-1.0)
    ranks: list[int] = []
    for part in np.array_split(np.arange(usable), min(count, -(-usable // 3))):
        free = [int(rank) for rank in part if not ranks or rank >= ranks[-1] + 3]
        if free:
            ranks.append(max(free, key=lambda rank: (scores[rank], -rank)))
    return tuple(found.layers[rank] for rank in ranks)


def dense_share(filters: tuple[int, ...], config: ModelConfig) -> float:
    """Share of the layers that see everything which stay dense: those before the first filter, filters, and the layer
    behind each."""
    own = full_layers(config)
    ranks = [own.index(layer) for layer in filters]
    dense = set(range(ranks[0])) | set(ranks) | {rank + 1 for rank in ranks}
    return len([rank for rank in dense if rank < len(own)]) / len(own)
