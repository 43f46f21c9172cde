"""What a generation returns: the text, the tokens, the report, and the state for the next turn."""

import dataclasses

import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.report import Report
from jshadow.weights.params import Params


class FinalState:
    """The final state of a batch. The last token of each row was sampled but not fed; the first use feeds it."""

    def __init__(self, params: Params, state: KVState, last: list[list[int]]) -> None:
        """`last` has the last sampled token of each row in a list, which is empty where nothing was sampled."""
        self.params, self.latest = params, state
        self.last = [token for tokens in last for token in tokens]
        self.fed = not self.last

    def state(self) -> KVState:
        """The state that holds the prompt and all generated tokens."""
        if not self.fed:
            _, self.latest = decode.decode_step(self.params, np.array(self.last, np.int32), self.latest)
            self.fed = True
        return self.latest


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    Attributes:
        text: the new text without stop token or stop string; None without a tokenizer.
        tokens: the new token ids; a stop token that ended them is included.
        report: bytes, counts and seconds of this generation.
    """

    text: str | None
    tokens: list[int]
    report: Report
    _final: FinalState = dataclasses.field(repr=False)
    _row: int | None = dataclasses.field(repr=False, default=None)

    @property
    def state(self) -> KVState:
        """The KV state after prompt and answer, for the next turn (`generate(state=...)`, which consumes it).

        The last token was sampled but never fed; asking for the state feeds it.
        """
        state = self._final.state()
        return state if self._row is None else state.take([self._row])
