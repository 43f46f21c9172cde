"""The tokens that a draw gave, on the host."""

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jshadow.serving.requests import Logprobs


class DrawnToken(NamedTuple):
    """A drawn token of one row. It is NO_TOKEN if the logits were no numbers.

    Attributes:
        token: the token id.
        chosen: its log-probability, if log-probabilities were computed.
        ids, values: the likeliest tokens, int32 [K], and their log-probabilities, float32 [K].
    """

    token: int
    chosen: Any = None
    ids: Any = None
    values: Any = None

    def logprobs(self, count: int | None) -> Logprobs | None:
        """Return the log-probabilities with the `count` likeliest tokens. None for None."""
        if count is None:
            return None
        top = zip(self.ids[:count].tolist(), self.values[:count].tolist(), strict=True)
        return Logprobs(float(self.chosen), list(top))


def read_drawn(tokens: Array, likely: tuple[Array, Array, Array] | None) -> list[DrawnToken]:
    """Wait for the tokens of all rows, int32 [rows], and for what `likely_tokens` returned, if anything."""
    ids = np.asarray(tokens).tolist()
    if likely is None:
        return [DrawnToken(token) for token in ids]
    return [DrawnToken(*row) for row in zip(ids, *map(np.asarray, likely), strict=True)]
