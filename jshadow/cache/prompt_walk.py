"""Running a text through the model layer by layer, to get its queries, keys and values. Policies learn from them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.cache.recurrence import text_outputs
from jshadow.errors import PromptError
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import Heads, apply_block, embed
from jshadow.ops.attention import causal_attention
from jshadow.ops.rope import inverse_frequencies, rotation

_NOTHING = 1e-5  # an eigenvalue below this share of the largest one is only rounding error


def directions(spread: Array) -> tuple[Array, Array]:
    """Return the eigenvectors of symmetric matrices, in order of falling eigenvalue.

    Args:
        spread: positive semidefinite matrices, float32 [..., d, d].

    Returns:
        The eigenvectors as columns, float32 [..., d, d], and a mask bool [..., d] that is False where the eigenvalue is
        only rounding error.
    """
    values, vectors = jnp.linalg.eigh(spread)
    return vectors[..., ::-1], values[..., ::-1] > _NOTHING * values[..., -1:]


def prompts_of(
    params: Any, tokens: Any, progress: Callable[[int, int], None] | None = None
) -> Iterator[PromptKV | None]:
    """Yield the keys, values and queries of a text in each layer, under exact attention.

    Args:
        tokens: int32 [S] or [B, S], without padding.
        progress: called with (layers done, number of layers) when the caller asks for the next layer.

    Yields:
        A PromptKV for each layer, with `q_post` and `lse`, and None for a recurrent layer. To save memory, drop each
        one before you ask for the next.

    Raises:
        PromptError: there are no tokens, the shape is wrong, an id is out of range, or the text is longer than the
            model's context.
    """
    config, tokens = params.config, check_text(params.config, tokens)
    batch, count = tokens.shape
    at = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), tokens.shape)
    lengths = jnp.full(batch, count, jnp.int32)

    def keep(heads: Heads, turn: Any, kind: Any) -> tuple[Array, PromptKV]:
        q, k = turn.queries(heads.q_pre), turn.keys(heads.k_pre)
        out, lse = causal_attention(q, k, heads.v, config.attention_scale, 0, kind.window, heads.sinks)
        return out, PromptKV(heads.k_pre, k, heads.v, lengths, at, q_post=q, lse=lse, sinks=heads.sinks)

    yield from walk_layers(params, tokens, keep, progress)


def walk_layers(
    params: Any,
    tokens: Array,
    keep: Callable[[Heads, Any, Any], tuple[Array, Any]],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Any]:
    """Run tokens through the model, one compiled layer at a time, and yield a result for each layer.

    Args:
        tokens: int32 [B, S], as `check_text` returns them.
        keep: called as keep(heads, rotation, attention kind) while the layer is traced. It returns the attention's
            output and the result to yield. The result of a recurrent layer is None, without a call.
        progress: called with (layers done, number of layers) when the caller asks for the next layer.
    """
    config, count = params.config, tokens.shape[1]
    recurrent = config.recurrent
    positions = jnp.arange(count, dtype=jnp.int32)[None]

    def layer(weights: dict, x: Array, inverse: Array, sizes: ModelConfig, kind: Any) -> tuple[Array, Any]:
        turn = rotation(kind.rope, inverse, positions)
        if kind.recurrent:
            return apply_block({"layer_0": weights}, sizes, 0, x, lambda heads: (text_outputs(heads, recurrent), None))
        return apply_block({"layer_0": weights}, sizes, 0, x, lambda heads: keep(heads, turn, kind))

    run = jax.jit(layer, static_argnames=("sizes", "kind"))
    x = embed(params.weights, config, tokens)
    for index in range(config.num_layers):
        kind, sizes = config.attention_kind(index), config.at(index)
        inverse = jnp.asarray(inverse_frequencies(kind.rope, sizes.head_dim, count))
        x, result = run(params.weights[f"layer_{index}"], x, inverse, sizes=sizes, kind=kind)
        yield result
        if progress is not None:
            progress(index + 1, config.num_layers)


def check_text(config: ModelConfig, tokens: Any) -> Array:
    """Check a text [S] or [B, S], and return it as int32 [B, S].

    Raises:
        PromptError: as in `prompts_of`.
    """
    ids = np.atleast_2d(np.asarray(tokens))
    if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise PromptError(f"tokens must be integers [S] or [B, S], at least one, got {ids.dtype} {np.shape(tokens)}")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise PromptError(f"tokens must lie in [0, vocab_size={config.vocab_size}), got {ids.min()} to {ids.max()}")
    if ids.shape[1] > config.context:
        raise PromptError(f"tokens must be at most the model's context={config.context}, got {ids.shape[1]}")
    return jnp.asarray(ids, jnp.int32)
