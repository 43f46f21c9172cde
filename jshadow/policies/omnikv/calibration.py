"""Choose OmniKV's filter layers by a measurement on a text (OmniKV, ICLR 2025, section 3 and appendix).

A layer is a good filter if later layers attend to the tokens that its own attention ranks highest. For each layer i and
each later layer j, this measures the share of j's attention that falls on the top tokens of i, as a mean over queries
and heads. Layers with the model's own window are left out. Most heads attend strongly to the first token (a sink), and
nearly every layer ranks it high. So all shares are large and differ little. Only their order matters.
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

QUERIES = 64  # number of evenly spaced queries that are measured in each row of a text


class FilterMasses(NamedTuple):
    """The result of the measurement.

    Attributes:
        layers: the n layers that attend to all tokens, in order.
        masses: float64 [n, n]. Entry [i, j] is the share of the attention of layers[j] that falls on the top tokens of
            layers[i]; NaN for j <= i.
        budget: number of top tokens.
    """

    layers: tuple[int, ...]
    masses: np.ndarray
    budget: int

    @property
    def scores(self) -> np.ndarray:
        """The mean of each layer's masses over all later layers, float64 [n]. It is NaN for the last layer."""
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
    """Measure how well each layer chooses tokens for the layers after it.

    A layer scores a token by the largest attention that any head gives it, as OmniKV's filters do. It chooses among all
    tokens up to the query's own. The queries are evenly spaced among those that can attend to more tokens than the
    budget.

    Args:
        params: the model's Params.
        tokens: int32 [S] or [B, S], without padding.
        budget: number of tokens that a layer chooses. It must be less than S.
        queries: maximum number of queries that are measured in each row.
        progress: called with (layers done, number of layers).

    Raises:
        PromptError: tokens have a wrong shape, are out of range, or are not more than the budget.
        ConfigError: budget or queries is below 1.
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
    """Compute the top tokens and the attention of the queries at some positions.

    Args:
        q: queries after RoPE [B, S, h_q, d].
        k: keys after RoPE [B, S, h_kv, d].
        at: positions of the queries, int32 [n].
        scale: factor on attention scores.
        budget: number of top tokens T.

    Returns:
        The top tokens int32 [B, n, T], and the attention as a mean over heads, float32 [B, n, S].
    """

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
    """Choose filter layers: the best layer in each of `count` equal stretches of the model, in rising order.

    The stretches keep the filters apart and the first filter early, since all layers before it are dense. A filter must
    have a sparse layer to serve. Therefore the last two layers are not chosen, and there are at least two layers
    between two filters. A model that is too shallow for `count` filters gets fewer, at least one.

    Raises:
        ConfigError: count is below 1, or no layer attends to all tokens.
    """
    check_range("choose_filters", "count", count, 1)
    if not found.layers:
        raise ConfigError("filter layers must see all tokens, got a model whose layers all see a window only")
    usable = max(len(found.layers) - 2, 1)
    scores = np.nan_to_num(found.scores, nan=-1.0)
    ranks: list[int] = []
    for part in np.array_split(np.arange(usable), min(count, -(-usable // 3))):
        free = [int(rank) for rank in part if not ranks or rank >= ranks[-1] + 3]
        if free:
            ranks.append(max(free, key=lambda rank: (scores[rank], -rank)))
    return tuple(found.layers[rank] for rank in ranks)


def dense_share(filters: tuple[int, ...], config: ModelConfig) -> float:
    """Return the share of layers with full attention, among those that do not have the model's own window.

    These are the layers before the first filter, the filters, and the layer after each filter.
    """
    full = full_layers(config)
    ranks = [full.index(layer) for layer in filters]
    dense = set(range(ranks[0])) | set(ranks) | {rank + 1 for rank in ranks}
    return len([rank for rank in dense if rank < len(full)]) / len(full)
