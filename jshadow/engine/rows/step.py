"""Decode steps of a batch whose rows have sampling settings of their own. B rows, V tokens in the vocabulary."""

import functools

import jax
from jax import Array

from jshadow.cache.state import Reads, Writes
from jshadow.engine.rows.sampling import RowSampling, draw
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.models.config import ModelConfig


@functools.partial(
    jax.jit, static_argnames=("config",), donate_argnames=("writes", "rows"), compiler_options=COMPILER_OPTIONS
)
def step_rows(
    weights: dict, fed: tuple[Array, Array], reads: Reads, writes: Writes, rows: RowSampling, *, config: ModelConfig
) -> tuple[Array, Writes, RowSampling]:
    """Feed a token to each active row, and draw the next token of each row, in one program.

    Args:
        weights, config: the model.
        fed: the token of each row, int32 [B], and whether the row is active, bool [B]. A row that is not active does
            not change, and its next token has no meaning.
        reads, writes: the two halves of the state. The memory of `writes` is reused.
        rows: the sampling settings of the rows. Their memory is reused.

    Returns:
        The next tokens, int32 [B], with NO_TOKEN in a row whose logits contain a NaN, the new `writes` and the new
        `rows`.
    """
    token, active = fed
    logits, writes = step_writes(weights, config, token[:, None], active.astype("int32"), reads, writes)
    tokens, rows = draw(rows, logits, active)
    return tokens, writes, rows


@functools.partial(jax.jit, donate_argnames=("rows",))
def first_tokens(rows: RowSampling, logits: Array) -> tuple[Array, RowSampling]:
    """Draw the first token of each row from the logits of its prompt, float32 [B, V]. The memory of `rows` is reused.

    Returns:
        The tokens, int32 [B], with NO_TOKEN in a row whose logits contain a NaN, and the rows for the next draw.
    """
    return draw(rows, logits)
