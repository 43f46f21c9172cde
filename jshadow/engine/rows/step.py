"""Decode steps of a batch whose rows have sampling settings of their own. B rows, V tokens in the vocabulary.

A step is two programs. The host can find the tokens that a grammar allows while the first one runs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.state import Reads, Writes
from jshadow.engine.rows.sampling import RowSampling, draw
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.models.config import ModelConfig

MOST_LIKELY = 20  # tokens of which a step gives log-probabilities, as many as OpenAI's API has at most


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS)
def row_logits(
    weights: dict, fed: tuple[Array, Array], reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Writes]:
    """Feed a token to each active row.

    Args:
        weights, config: the model.
        fed: the token of each row, int32 [B], and whether the row is active, bool [B]. A row that is not active does
            not change, and its logits have no meaning.
        reads, writes: the two halves of the state. The memory of `writes` is reused.

    Returns:
        The logits for the next token, float32 [B, V], and the new `writes`.
    """
    token, active = fed
    return step_writes(weights, config, token[:, None], active.astype("int32"), reads, writes)


@functools.partial(jax.jit, donate_argnames=("rows",))
def draw_rows(rows: RowSampling, logits: Array, active: Array | None = None) -> tuple[Array, RowSampling]:
    """Draw the next token of each row, as `draw` does. The memory of `rows` is reused."""
    return draw(rows, logits, active)


@jax.jit
def likely_tokens(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Return the log-probabilities of the drawn tokens and of the likeliest ones, before any sampling setting.

    Args:
        logits: float32 [B, V].
        tokens: the drawn tokens, int32 [B]. The value of a row with NO_TOKEN has no meaning.

    Returns:
        The log-probability of each drawn token, float32 [B]; the min(V, MOST_LIKELY) likeliest tokens, int32 [B, K],
        the likeliest first; and their log-probabilities, float32 [B, K].
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    values, ids = jax.lax.top_k(logits, min(MOST_LIKELY, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)
    return (chosen - total)[:, 0], ids, values - total
