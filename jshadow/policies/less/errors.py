"""The errors of LESS and H2O relative to full attention, on a text without training. `jshadow fit` reports them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.policies.h2o import H2O
from jshadow.policies.less.training import OF_QUERIES, TILE, Examples, answers, examples_of


def errors_of(policy: H2O, params: Any, tokens: Any, fitted: Any) -> np.ndarray:
    """Measure the relative squared error of each layer's attention output on a text.

    The error is the sum of squared differences from full attention, divided by the sum of squares of full attention.
    All queries after the first eviction are counted.

    Args:
        policy: H2O or LESS. Settings that are None are resolved for a capacity of the text's length.
        params: the model's Params.
        tokens: token ids, int32 [S] or [B, S], without padding. There must be more than heavy + recent + 1 of them.
        fitted: the arrays that `LESS.fit` returned.

    Returns:
        float64 [L, 2]: the error of H2O, and that of LESS. NaN for layers with the model's own window.

    Raises:
        PromptError: as in `LESS.fit`.
    """
    out = np.full((params.config.num_layers, 2), np.nan)
    for layer, first, examples in examples_of(policy, params, tokens):
        kernels = jax.tree.map(lambda leaf, layer=layer: leaf[layer], fitted)
        out[layer] = [float(x) for x in layer_errors(kernels, examples, first=first)]
    return out


@functools.partial(jax.jit, static_argnames=("first",))
def layer_errors(kernels: Any, examples: Examples, *, first: int) -> tuple[Array, Array]:
    """Return the relative squared errors of H2O and of LESS in one layer, for the queries from position `first` on."""
    tokens, none = examples.k.shape[2], jnp.zeros(examples.k.shape[1])
    size = min(TILE, tokens - first)

    def tile(start: Array) -> Array:
        at = start + jnp.arange(size)
        cut = {name: lax.dynamic_slice_in_dim(getattr(examples, name), start, size, axis=3) for name in OF_QUERIES}
        part = examples._replace(**cut)
        answered = answers(kernels, part.q, at, part, none)
        parts = (part.sparse - part.full, answered - part.full, part.full)
        return jnp.stack([jnp.square(x).sum(axis=(0, 1, 2, 4)) for x in parts])

    starts = jnp.minimum(jnp.arange(first, tokens, size), tokens - size)
    sums = lax.map(tile, starts)  # [tiles, 3, size]
    at = starts[:, None] + jnp.arange(size)
    begun = first + size * jnp.arange(len(starts))
    whole = jnp.where((at >= begun[:, None])[:, None], sums, 0).sum(axis=(0, 2))
    return whole[0] / whole[2], whole[1] / whole[2]
