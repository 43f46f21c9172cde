"""The keys, values and hidden states of a text in each layer, as NumPy arrays. All other modules here use them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import Array

from jshadow.cache.prompt_walk import check_text, walk_layers
from jshadow.errors import PromptError
from jshadow.models.transformer import Heads
from jshadow.ops.attention import causal_attention


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer for a text of S tokens, all float32.

    Attributes:
        k_pre: keys before RoPE and after bias and norm, [S, h_kv, d].
        k_post: keys after RoPE, [S, h_kv, d].
        v: values [S, h_kv, d].
        x_in: hidden states [S, D]: the normalized input that queries, keys and values are projected from.
    """

    k_pre: np.ndarray
    k_post: np.ndarray
    v: np.ndarray
    x_in: np.ndarray


def text_of(params: Any, tokens: Any) -> np.ndarray:
    """Check the tokens of one text and return them as int32 [S]. Raises PromptError as `prompt_tensors` does."""
    ids = check_text(params.config, tokens)
    if ids.shape[0] != 1:
        raise PromptError(f"tokens must be one text [S], got {ids.shape[0]} rows")
    return np.asarray(ids[0])


def prompt_tensors(
    params: Any, tokens: Any, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[LayerTensors]:
    """Compute keys before and after RoPE, values and hidden states of a text (ShadowKV, section 3.1).

    The paper calls them K, K^RoPE, V and X.

    Args:
        params: the model's Params.
        tokens: token ids of the text, int32 [S], without padding.
        progress: called with (number of layers done, number of layers), when the next layer is requested.

    Returns:
        An iterator over the LayerTensors of all layers. Each is computed when it is requested. A layer takes
        4 * S * (3 * h_kv * d + D) bytes.

    Raises:
        PromptError: there are no tokens or more than one text, an id is out of range, or the text is longer than the
            model's context. It is raised by the call itself.
    """
    ids = jax.device_put(text_of(params, tokens)[None])
    return layers_of(params, ids, progress)


def layers_of(params: Any, ids: Array, progress: Callable[[int, int], None] | None) -> Iterator[LayerTensors]:
    """Compute `prompt_tensors` of ids [1, S] that are already checked."""

    def keep(heads: Heads, turn: Any, kind: Any) -> tuple[Array, tuple[Array, ...]]:
        k = turn.keys(heads.k_pre)
        scale = params.config.attention_scale
        out, _ = causal_attention(turn.queries(heads.q_pre), k, heads.v, scale, 0, kind.window)
        return out, (heads.k_pre, k, heads.v, heads.x_in)

    for tensors in walk_layers(params, ids, keep, progress):
        yield LayerTensors(*(np.asarray(part, np.float32)[0] for part in tensors))
