"""Cycles of speculation of rows that have sampling settings of their own, in two programs.

The model reads the proposed tokens in the first one. In the second one, each row draws the tokens that follow. So a
caller can find the tokens that a grammar allows while the first one runs.

B rows, w proposed tokens, V tokens in the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.spec import everywhere
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.rows import RowSampling, draw
from jshadow.engine.speculation.drafter import Memory, Progress
from jshadow.engine.speculation.run import Guesses, GuessPlan, read_guesses, without_refused
from jshadow.engine.step import COMPILER_OPTIONS
from jshadow.models.config import ModelConfig


@functools.partial(
    jax.jit, static_argnames=("config", "plan"), donate_argnames=("writes", "live"), compiler_options=COMPILER_OPTIONS
)
def guess_rows(
    models: tuple[dict, Any],
    reads: Reads,
    writes: Writes,
    live: Any,
    far: tuple[Progress, RowSampling],
    *,
    config: ModelConfig,
    plan: GuessPlan,
) -> tuple[Guesses, Writes, Any]:
    """Propose tokens for each row, and let the model read them.

    Args:
        models: the weights, and the drafter's fixed arrays.
        reads, writes: the two halves of the state. The memory of `writes` is reused.
        live: the live part of the drafter's memory. It is reused too.
        far: how far each row is, and its sampling settings. With 1 token left, nothing is proposed for a row.

    Returns:
        The guesses, and the new `writes` and `live`.
    """
    (weights, fixed), state = models, KVState.of(reads, writes)
    at, rows = far

    def draw_next(logits: Array, place: Array) -> Array:
        return draw(rows.replace(step=rows.step + place), logits)[0]

    guesses, state, live = read_guesses(weights, config, plan, state, Memory(fixed, live), at, draw_next)
    guesses, live = everywhere((guesses, live), reads.specs[0].shards)
    return guesses, state.split()[1], live


@functools.partial(jax.jit, donate_argnames=("rows", "writes"), compiler_options=COMPILER_OPTIONS)
def draw_guessed(
    rows: RowSampling, guesses: Guesses, reads: Reads, writes: Writes, active: Array
) -> tuple[Array, Array, RowSampling, Writes]:
    """Draw the tokens of each row up to the first one that differs from the guess, and give back the wrong guesses.

    Args:
        rows: the sampling settings. Each draw is that of `draw`, one after the other. Their memory is reused.
        guesses: what `guess_rows` returned.
        reads, writes: the two halves of the state after it. The memory of `writes` is reused.
        active: bool [B]. The other rows do not change.

    Returns:
        The tokens int32 [B, w + 1], how many of them are real int32 [B] (at least 1 for an active row, else 0), the
        rows for the next draw, and the new `writes`.
    """

    def one_place(carry: tuple[RowSampling, Array], xs: tuple[Array, Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        (rows, going), (logits, guess, place) = carry, xs
        drawn, rows = draw(rows, logits, going)
        return (rows, going & (drawn == guess) & (place < guesses.proposed)), (drawn, going)

    count = guesses.tokens.shape[1]
    following = jnp.roll(guesses.tokens, -1, axis=1)  # at the last place there is no guess, and no row goes on
    places = guesses.logits.swapaxes(0, 1), following.T, jnp.arange(count)
    (rows, _), (tokens, real) = lax.scan(one_place, (rows, active), places)
    counts = real.sum(axis=0, dtype=jnp.int32)
    state = without_refused(guesses, counts, KVState.of(reads, writes))
    return tokens.T, counts, rows, state.split()[1]
