"""Requests, what they may draw, and their answers while they arrive."""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jshadow.engine.rows import MOST_LIKELY, WORD, RowSettings, pack_mask
from jshadow.engine.types import OnePrompt
from jshadow.errors import ConfigError, JshadowError, check_integer
from jshadow.policies import Policy

# Maps the new tokens so far to those that may follow: bool [V], or the bit mask of `pack_mask`, uint32 [W].
Allowed = Callable[[Sequence[int]], Any]
FULL_WORD = np.uint32(2**WORD - 1)


def allowed_words(allowed: Allowed, tokens: Sequence[int], size: int) -> np.ndarray:
    """Return the tokens that may follow as a bit mask, uint32 [W], as in `pack_mask`.

    Args:
        allowed: the grammar of a request.
        tokens: the new tokens so far.
        size: V, the size of the vocabulary.

    Raises:
        ConfigError: `allowed` raised an error, or its result is not such a mask, or no token may follow.
    """
    try:
        mask = np.asarray(allowed(list(tokens)))
    except JshadowError:
        raise
    except Exception as error:
        raise ConfigError(f"allowed must return bool [{size}], it raised {error!r:.80}") from error
    words = -(-size // WORD)
    packed = mask.dtype == np.uint32 and mask.shape == (words,)
    if packed and size % WORD:
        mask = mask & np.append(np.full(words - 1, FULL_WORD), FULL_WORD >> np.uint32(WORD - size % WORD))
    if not (packed or (mask.dtype == bool and mask.shape == (size,))) or not mask.any():
        raise ConfigError(
            f"allowed must return bool [{size}] or uint32 [{words}] with at least one token, got {mask.dtype} "
            f"{list(mask.shape)} with {np.count_nonzero(mask)} that are not zero"
        )
    return mask if packed else pack_mask(mask)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to be answered.

    Attributes:
        prompt: text, a chat or token ids, as in `generate`.
        max_new_tokens: maximum number of tokens to generate, at least 1.
        settings: how the tokens are drawn. The default is greedy.
        stop: strings or token ids that end the answer, as in `generate`.
        priority: a request is admitted before those of lower priorities, unless they have waited 10 s longer for each
            step between the priorities. Requests of one priority come by arrival. Of those that are submitted at once,
            each counts as one priority lower than the one before it.
        client: who asks. Clients take turns. Priorities order the requests of one client.
        name: names the request in the log.
        store: whether the engine stores the state after the prompt, and the state at the end of the answer, in its
            library.
        title: None, or the title of the document that the prompt is. `store` must be set. Only the state after the
            prompt is stored then.
        allowed: the grammar of the answer, or None. The engine calls it before each draw with the list of new tokens.
            It returns which tokens may follow, at least one, as bool [V] or as the bit mask of `pack_mask`, uint32 [W].
            `EngineOptions.grammar` must be set.
        logprobs: None, or the number of the likeliest tokens of which each piece has the log-probability, in [0, 20].
            `EngineOptions.logprobs` must be set.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    prompt: OnePrompt
    max_new_tokens: int = 128
    settings: RowSettings = dataclasses.field(default_factory=RowSettings)
    stop: str | int | Sequence[str | int] | None = None
    priority: int = 0
    client: str = ""
    name: str = ""
    store: bool = False
    title: str | None = None
    allowed: Allowed | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, least=1)
        check_integer("priority", self.priority)
        for field in ("client", "name"):
            if not isinstance(value := getattr(self, field), str):
                raise ConfigError(f"{field} must be a string, got {value!r:.80}")
        if not isinstance(self.settings, RowSettings):
            raise ConfigError(f"settings must be a RowSettings, got {self.settings!r:.80}")
        if not isinstance(self.store, bool):
            raise ConfigError(f"store must be True or False, got {self.store!r:.80}")
        if self.title is not None and not (self.store and isinstance(self.title, str)):
            raise ConfigError(f"title must be None without store, and else a string, got {self.title!r:.80}")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, least=0)
            if self.logprobs > MOST_LIKELY:
                raise ConfigError(f"logprobs must be at most {MOST_LIKELY}, got {self.logprobs}")
        if self.allowed is not None and not callable(self.allowed):
            raise ConfigError(f"allowed must be a function or None, got {self.allowed!r:.80}")


@dataclasses.dataclass(frozen=True)
class AnswerReport:
    """The figures of one answer.

    Attributes:
        policy: the resolved policy that ran.
        fallback: why a dense cache was used instead of the engine's policy, or None.
        fetch: the fetch mode.
        prompt_tokens: number of tokens in the prompt.
        stored_tokens: number of these that were in the library, so that they were not read again.
        generated_tokens: number of tokens drawn, including a stop token or the tokens of a stop string.
        finish: "stop" if a stop token or a stop string ended the answer, "length" if max_new_tokens did.
        queue_seconds: time until the engine began to read the prompt.
        prefill_seconds: time from there to the first token. It includes the steps of other requests.
        decode_seconds: time from the first token to the end.
        stored: the future of the key of the state that was stored last, or None. It is done when the file is complete.
        not_stored: why a state that was to be stored was not, or None. An error after the end of the answer is told by
            `stored` alone.
        proposed_tokens: number of tokens that were proposed by speculation. None: the engine does not speculate.
        accepted_tokens: number of these that were accepted.
        spilled: the fetch mode while device memory was short and the row was in host memory, or None.
        plain: why no tokens were proposed in an engine that speculates, or None.
    """

    policy: Policy
    fallback: str | None
    fetch: str
    prompt_tokens: int
    stored_tokens: int
    generated_tokens: int
    finish: str
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    stored: "concurrent.futures.Future[str] | None" = None
    not_stored: str | None = None
    proposed_tokens: int | None = None
    accepted_tokens: int = 0
    plain: str | None = None
    spilled: str | None = None


@dataclasses.dataclass(frozen=True)
class AnswerResult:
    """A complete answer.

    Attributes:
        tokens: the new token ids. A stop token is included. The tokens of a stop string are left out.
        text: the new text without the stop token or the stop string. None without a tokenizer.
        report: the figures.
    """

    tokens: list[int]
    text: str | None
    report: AnswerReport


class Logprobs(NamedTuple):
    """The natural logarithms of probabilities at one place of an answer, as the model gives them at temperature 1.

    Penalties, biases, grammars and filters do not change them.

    Attributes:
        chosen: that of the drawn token.
        top: the likeliest tokens with theirs, the likeliest first. `Request.logprobs` tells how many.
    """

    chosen: float
    top: list[tuple[int, float]]


class Piece(NamedTuple):
    """A token of an answer.

    Attributes:
        text: the text that became final with the token. It may be empty.
        token: the token id.
        logprobs: the log-probabilities, if the request wants them.
    """

    text: str
    token: int
    logprobs: Logprobs | None = None


class Answer:
    """The answer to a request while it arrives. Any thread may read it, any number of times.

    Iterate over it for its pieces. If the request failed, its error follows the last piece.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._pieces: list[Piece] = []
        self._listeners: list[Callable[[], None]] = []
        self._result: AnswerResult | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether the answer is complete or has failed."""
        return self._result is not None or self._error is not None

    @property
    def complete(self) -> bool:
        """Whether the answer has a result. If not, it goes on or has failed."""
        return self._result is not None

    def listen(self, callback: Callable[[], None]) -> None:
        """Call a function after each later change of the answer, in the thread of the engine. It must be quick."""
        with self._changed:
            self._listeners.append(callback)

    def since(self, place: int) -> tuple[list[Piece], bool]:
        """Return the pieces from number `place` on that have arrived, and whether the answer has ended."""
        with self._changed:
            return self._pieces[place:], self.done

    def __iter__(self) -> Iterator[Piece]:
        place = 0
        while True:
            with self._changed:
                while place == len(self._pieces) and not self.done:
                    self._changed.wait()
                pieces = self._pieces[place:]
            yield from pieces
            place += len(pieces)
            if not pieces:
                if self._error is not None:
                    raise self._error
                return

    def result(self, timeout: float | None = None) -> AnswerResult:
        """Wait for the end of the answer, and return it.

        Args:
            timeout: seconds to wait at most. None: without a limit.

        Raises:
            TimeoutError: the answer is not complete in time. It goes on.
            JshadowError: the request failed. RequestCancelled tells that it was cancelled.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self.done:
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"the answer must be complete within timeout={timeout} seconds, it is not")
                self._changed.wait(left)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def add(self, piece: Piece) -> None:
        """Add a piece. Only the engine calls this."""
        with self._changed:
            self._pieces.append(piece)
            self._tell()

    def end(self, outcome: AnswerResult | BaseException) -> None:
        """End the answer with its result or an error. The first end counts. Only the engine calls this."""
        with self._changed:
            if self.done:
                return
            if isinstance(outcome, AnswerResult):
                self._result = outcome
            else:
                self._error = outcome
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for callback in self._listeners:
            callback()


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
    """Wait for the tokens of all rows, int32 [rows] or [rows, n], and for what `likely_tokens` returned, if anything.

    The tokens of a row follow one another in the result.
    """
    ids = np.ravel(np.asarray(tokens)).tolist()
    if likely is None:
        return [DrawnToken(token) for token in ids]
    return [DrawnToken(*row) for row in zip(ids, *map(np.asarray, likely), strict=True)]
