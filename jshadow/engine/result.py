"""What a generation returns: the text, the tokens, the report, and the state for the next turn."""

import dataclasses

import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.report import Report
from jshadow.weights.params import Params


class FinalStates:
    """The final states of the rows of a batch. A row's last sampled token is fed when its state is first asked for.

    A row that a stop string ended may have an older state than its neighbors. Rows with the same state share it.
    """

    def __init__(self, params: Params, rows: list[tuple[KVState, list[int]]]) -> None:
        """Take for each row a state of the whole batch, and the tokens that are still to be fed to the row."""
        self.params = params
        self.states = {id(state): state for state, _ in rows}
        self.keys = [id(state) for state, _ in rows]
        self.unfed = [list(tokens) for _, tokens in rows]

    def of_row(self, row: int) -> KVState:
        """Return the state of the batch in which this row holds its prompt and all its tokens."""
        key = self.keys[row]
        sharing = [self.keys[other] == key for other in range(len(self.keys))]
        while any(active := [mine and bool(unfed) for mine, unfed in zip(sharing, self.unfed, strict=True)]):
            tokens = [unfed[0] if fed else 0 for fed, unfed in zip(active, self.unfed, strict=True)]
            _, self.states[key] = decode.decode_step(
                self.params, np.array(tokens, np.int32), self.states[key], active=active
            )
            self.unfed = [unfed[1:] if fed else unfed for fed, unfed in zip(active, self.unfed, strict=True)]
        return self.states[key]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    Attributes:
        text: the new text without the stop token or the stop string; None without a tokenizer.
        tokens: the new token ids that `state` holds. A stop token is included. The tokens of a stop string are left
            out. If a stop string begins in the middle of a token, the whole token is left out.
        report: bytes, counts and seconds of this generation.
    """

    text: str | None
    tokens: list[int]
    report: Report
    _final: FinalStates = dataclasses.field(repr=False)
    _row: int | None = dataclasses.field(repr=False, default=None)

    @property
    def state(self) -> KVState:
        """The KV state after the prompt and `tokens`. `generate(state=...)` continues it with the next turn.

        The last token is fed when the state is first asked for.
        """
        state = self._final.of_row(self._row or 0)
        return state if self._row is None else state.take([self._row])
