"""What policies learn from a text: its queries, keys and values, layer by layer, outside any compiled program."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.attention import causal_attention
from jshadow.errors import PromptError
from jshadow.models.transformer import Heads, apply_block, embed
from jshadow.rope import inverse_frequencies, rotation
from jshadow.state import PromptKV


def prompts_of(params: Any, tokens: Any) -> Iterator[PromptKV]:
    """Keys, values and queries of a text in each layer, all queries included.

    Args:
        params: Params.
        tokens: int32 [S] or [B, S], no padding.

    Yields:
        A PromptKV for each layer; hold no two of them if they are large.

    Raises:
        PromptError: no tokens, or a wrong shape.
    """
    config, tokens = params.config, jnp.atleast_2d(jnp.asarray(tokens, jnp.int32))
    if tokens.ndim != 2 or tokens.size == 0:
        raise PromptError(f"tokens must be [S] or [B, S], and some, got shape {tokens.shape}")
    batch, count = tokens.shape
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    lengths = jnp.full(batch, count, jnp.int32)

    def layer(weights: dict, x: Array, inverse: Array, kind: Any) -> tuple[Array, PromptKV]:
        turn = rotation(kind.rope, inverse, positions)

        def cache(heads: Heads) -> tuple[Array, PromptKV]:
            q, k = turn.queries(heads.q_pre), turn.keys(heads.k_pre)
            out, lse = causal_attention(q, k, heads.v, config.attention_scale, 0, kind.window)
            at = jnp.broadcast_to(positions, tokens.shape)
            return out, PromptKV(heads.k_pre, k, heads.v, lengths, at, q_post=q, lse=lse)

        return apply_block({"layer_0": weights}, config, 0, x, cache)

    run = jax.jit(layer, static_argnames=("kind",))
    x = embed(params.weights, config, tokens)
    for index in range(config.num_layers):
        kind = config.attention_kind(index)
        inverse = jnp.asarray(inverse_frequencies(kind.rope, config.head_dim, count))
        x, prompt = run(params.weights[f"layer_{index}"], x, inverse, kind=kind)
        yield prompt
