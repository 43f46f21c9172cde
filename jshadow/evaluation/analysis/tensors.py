"""The tensors that a text leaves in each layer, as NumPy arrays. All observations use them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.prompt_walk import check_text, walk_layers
from jshadow.errors import PromptError
from jshadow.models.transformer import Heads
from jshadow.ops.attention import causal_attention


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """One layer's tensors of one text of S tokens, float32.

    Attributes:
        k_pre: keys before RoPE (after bias and norm) [S, h_kv, d].
        k_post: keys after RoPE [S, h_kv, d].
        v: values [S, h_kv, d].
        x_in: hidden states, the normed input that queries, keys and values are projected from [S, D].
    """

    k_pre: np.ndarray
    k_post: np.ndarray
    v: np.ndarray
    x_in: np.ndarray


def text_of(params: Any, tokens: Any) -> np.ndarray:
    """One text as int32 [S]. Raises PromptError."""
    ids = check_text(params.config, tokens)
    if ids.shape[0] != 1:
        raise PromptError(f"tokens must be one text [S], got {ids.shape[0]} rows")
    return np.asarray(ids[0])


def prompt_tensors(
    params: Any, tokens: Any, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[LayerTensors]:
    """Keys before and after RoPE, values and hidden states of a text (ShadowKV, section 3.1: K, K^RoPE, V and X).

    Args:
        params: Params.
        tokens: int32 [S], no padding.
        progress: called with (layers done, layers), when the next one is asked for.

    Returns:
        LayerTensors of the layers in turn, each computed when it is asked for. Take a list of them where they fit:
        4 * S * (3 * h_kv * d + D) bytes a layer.

    Raises:
        PromptError: no tokens, more than one text, an id out of range, or more than the model's context. At the call.
    """
    ids = jnp.asarray(text_of(params, tokens))[None]
    return layers_of(params, ids, progress)


def layers_of(params: Any, ids: Array, progress: Callable[[int, int], None] | None) -> Iterator[LayerTensors]:
    """`prompt_tensors` of checked ids [1, S]."""

    def keep(heads: Heads, turn: Any, kind: Any) -> tuple[Array, tuple[Array, ...]]:
        k = turn.keys(heads.k_pre)
        scale = params.config.attention_scale
        out, _ = causal_attention(turn.queries(heads.q_pre), k, heads.v, scale, 0, kind.window)
        return out, (heads.k_pre, k, heads.v, heads.x_in)

    for tensors in walk_layers(params, ids, keep, progress):
        yield LayerTensors(*(np.asarray(part[0], np.float32) for part in tensors))
