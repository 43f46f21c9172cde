"""The loop that generates, token by token, for every evaluation."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine import decode

Draw = Callable[[Array, int], np.ndarray]
Take = Callable[[int, int], bool]


def generate_rows(
    params: Any, logits: Array, state: KVState, most: int, draw: Draw, take: Take, rows: int | None = None
) -> KVState:
    """Draw tokens and feed them until every row has ended. Consumes the state.

    The last token of a row is never fed: neither the one that ends it, nor the last of `most`.

    Args:
        params: the Params that made the state.
        logits: float32 [B, V], of each row's last token.
        state: its rows end with those tokens.
        most: tokens to draw for each row, at least 1.
        draw: gives the next tokens int32 [B] from logits [B, V] and the number of tokens drawn before.
        take: is given each new token as (row, token). Returns whether the row goes on.
        rows: only the first `rows` rows generate, the others are padding. None: all.

    Returns:
        The state after the tokens that were fed.
    """
    active = np.arange(state.batch) < (state.batch if rows is None else rows)
    for index in range(most):
        tokens = draw(logits, index)
        for row in np.flatnonzero(active):
            active[row] = take(int(row), int(tokens[row]))
        if not active.any() or index == most - 1:
            break
        logits, state = decode.decode_step(params, tokens, state, active=active)
    return state


def greedy(logits: Array, index: int) -> np.ndarray:
    """The likeliest token of each row of logits [B, V], int32 [B]; a tie goes to the lower id."""
    return np.asarray(logits).argmax(-1).astype(np.int32)
