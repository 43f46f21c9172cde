"""What the transform code loses on a model's own keys, by bits: measured on a text, to choose `ShadowKV.key_profile`.

The quantiser of a column knows no other, so what a profile loses is a sum over columns: each is coded once in 8, 4 and
2 bits, and every profile is then a look-up. Layers count alike, each by the share of its keys' variance that is lost.
Left out is the rounding of the basis to the model's dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.prompt_walk import check_text, directions, prompts_of
from jshadow.cache.state import PromptKV
from jshadow.errors import PromptError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import own_layers
from jshadow.policies.shadowkv.key_codecs.base import EXACT
from jshadow.policies.shadowkv.key_codecs.profiles import column_errors
from jshadow.policies.shadowkv.key_codecs.query_weights import TAIL, query_weights


def key_errors(
    params: Any, tokens: Any, progress: Callable[[int, int], None] | None = None, weighed: bool = False
) -> np.ndarray:
    """Shares of the variance of centred keys before RoPE that each column of their eigenbasis loses.

    Args:
        params: Params.
        tokens: int32 [S] or [B, S], no padding; each row has a basis of its own, as a prompt has.
        progress: called with (layers done, layers).
        weighed: keys as `ShadowKV(key_weights="queries")` codes them: what is lost of their products with queries.

    Returns:
        float64 [layers, 4, columns], of the layers that see everything: in 8, 4 and 2 bits, and left out. Columns are
        filled up with zeros to a multiple of four.

    Raises:
        PromptError: tokens of a wrong shape, out of range, or too few to tell the columns apart.
    """
    text, config = check_text(params.config, tokens), params.config
    if text.shape[1] <= config.key_columns:
        raise PromptError(f"tokens must be more than the {config.key_columns} key columns, got {text.shape[1]}")
    if (text == text[:, :1]).all(axis=1).any():
        raise PromptError("tokens must not all be the same in any row")
    layers = own_layers(config)
    return np.stack(
        [
            np.asarray(layer_errors(prompt.k_pre, weights_of(config, layer, prompt) if weighed else None), np.float64)
            for layer, prompt in enumerate(prompts_of(params, text, progress)) if layer in layers
        ]
    )  # fmt: skip


def weights_of(config: ModelConfig, layer: int, prompt: PromptKV) -> Array:
    """What ShadowKV would weigh this layer's keys by."""
    assert prompt.q_post is not None
    rotated = config.attention_kind(layer).rope.rotary_dim(config.head_dim)
    return query_weights(prompt.q_post[:, -TAIL:], prompt.lengths, config.kv_heads, rotated)


@jax.jit
def layer_errors(k_pre: Array, weights: Array | None) -> Array:
    """One layer's, of keys before RoPE [B, S, h_kv, d] times weights [B, h_kv, d]: float32 [4, columns], mean over
    the rows."""
    rows = k_pre.astype(jnp.float32)
    if weights is not None:
        rows *= weights[:, None]
    rows = rows.reshape(*k_pre.shape[:2], -1)
    rows -= rows.mean(axis=1, keepdims=True)
    basis, _ = directions(jnp.einsum("bsm,bsn->bmn", rows, rows, precision=EXACT))
    rows = jnp.einsum("bsm,bmr->bsr", rows, basis, precision=EXACT)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 4)))
    errors = jax.vmap(column_errors)(rows)
    return (errors / errors[:, 3].sum(axis=1)[:, None, None]).mean(axis=0)
