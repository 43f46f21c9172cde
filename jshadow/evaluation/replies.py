"""The loop that generates token by token, for all evaluations."""

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
    """Draw tokens and feed them until every row has ended. This consumes the state.

    The last token of a row is never fed, whether it ends the row or is the last of `most` tokens.

    Args:
        params: the Params that the state was prefilled with.
        logits: float32 [B, V], the logits of each row's last token.
        state: the state after these tokens.
        most: maximum number of tokens of each row, at least 1.
        draw: called as draw(logits [B, V], number of tokens drawn before). It returns the next tokens, int32 [B].
        take: called with each new token as take(row, token). It returns whether the row continues.
        rows: only the first `rows` rows generate; the others are padding. None means all rows.

    Returns:
        The state after the last fed token.
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
    """Return the most likely token of each row of logits [B, V], int32 [B]. The lower id wins a tie.

    `index` is ignored. It is there because `generate_rows` passes it.
    """
    return np.asarray(logits).argmax(-1).astype(np.int32)
