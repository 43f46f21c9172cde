"""The jobs of an engine, and the queue in which they wait."""

import bisect
import concurrent.futures
import heapq
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine.text import TextStream
from jshadow.errors import JshadowError, OutOfMemory, RequestCancelled, ServingError
from jshadow.serving.admission import PlannedClass, RowClass
from jshadow.serving.requests import Answer, AnswerReport, AnswerResult, DrawnToken, Piece, Request, allowed_words

_LOG = logging.getLogger(__name__)


def typed(error: Exception, name: str) -> JshadowError:
    """Return an error as one for the caller. The log has the traceback of an error that jshadow does not know.

    `name` is that of the request.

    Afterwards the error holds no arrays of the functions that it went through.
    """
    found: JshadowError
    if isinstance(error, JshadowError):
        found = error
    else:
        _LOG.error("the work for the request %r has failed, and the engine goes on", name, exc_info=error)
        kind = type(error).__name__
        found = ServingError(f"the work for this request has failed ({kind}), and the log of the engine has the reason")
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            found = OutOfMemory("the device or the host lacks the memory for this request; a later try may succeed")
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return found


class Job:
    """A request from its arrival to its end. Only the loop changes it.

    Attributes:
        answer: what the caller reads.
        ids: token ids of the prompt.
        plans: the classes that can hold it, by capacity. The first one is used.
        stream: the tokens so far, and their text.
        stop_ids: tokens that end the answer.
        document: the key of the stored state of the beginning of the prompt, or None.
        prepare: begins to read that state in other threads, and returns the future of what was read. None without such
            a state.
        load: returns that state from what was read, or None if it must be prepared again.
        ready: what `prepare` returned, or None if the state is not prepared.
        read: number of tokens of the prompt that were stored.
        rooms: the classes that have the room for the rest of the prompt and the answer.
        keep: stores token ids and the state that holds them. None if nothing is to be stored.
        row: the sampling settings, as arrays of one row. None before the prompt is read.
        plain: why no tokens are proposed for the answer, or None.
        proposed, accepted: number of tokens that were proposed by speculation, and of these that were accepted.
        spilled: the fetch mode while device memory was short and the row was in host memory, or None.
        spills: whether its group moves there as soon as it has a row, and stays there. For `Engine.warm`.
        widths: numbers of proposed tokens that the next steps have, whatever is accepted. For `Engine.warm`.
        stored: the future of the key of the state that was stored last, or None.
        not_stored: why a state that was to be stored was not, or None.
    """

    def __init__(self, answer: Answer, ids: list[int], stream: TextStream, stop_ids: frozenset[int]) -> None:
        self.answer, self.ids, self.stream, self.stop_ids = answer, ids, stream, stop_ids
        self.plans: list[PlannedClass] = []
        self.document: str | None = None
        self.prepare: Callable[[], concurrent.futures.Future[Any]] | None = None
        self.load: Callable[[Any], KVState | None] | None = None
        self.ready: concurrent.futures.Future[Any] | None = None
        self.read = 0
        self.rooms: list[RowClass] = []
        self.keep: Callable[..., Any] | None = None
        self.row: Any = None
        self.plain: str | None = None
        self.proposed = self.accepted = 0
        self.spilled: str | None = None
        self.spills = False
        self.widths: list[int] = []
        self.stored: concurrent.futures.Future[str] | None = None
        self.not_stored: str | None = None
        self.arrived = time.monotonic()
        self.begun = self.first = self.arrived

    @property
    def request(self) -> Request:
        """The request."""
        return self.answer.request

    @property
    def priority(self) -> int:
        """The priority of the request."""
        return self.request.priority

    @property
    def client(self) -> str:
        """Who asks."""
        return self.request.client

    @property
    def plan(self) -> PlannedClass:
        """The class in which the job runs."""
        return self.plans[0]

    @property
    def left(self) -> int:
        """Number of tokens that the answer may still get."""
        return self.request.max_new_tokens - len(self.stream.tokens)

    @property
    def waits_for_file(self) -> bool:
        """Whether the stored state of the job's document is not read yet."""
        return self.prepare is not None and (self.ready is None or not self.ready.done())

    @property
    def planned(self) -> bool:
        """Whether `plan` is that of the rows that the job uses. That of rows on a document needs its state."""
        return self.document == self.plan.document

    def is_twin(self, other: "Job") -> bool:
        """Whether this job can begin with the state after another job's prompt, in a row of the other job's class."""
        return (
            self.ids == other.ids
            and self.document == other.document
            and self.request.max_new_tokens <= other.request.max_new_tokens
            and (self.keep is None) == (other.keep is None)
        )

    @property
    def keeps_answer(self) -> bool:
        """Whether the state after the answer will be stored."""
        return self.keep is not None and self.request.title is None

    def start(self) -> None:
        """Note that the engine begins to read the prompt."""
        self.begun = time.monotonic()

    def cancel(self) -> None:
        """End the answer with RequestCancelled."""
        self.answer.end(RequestCancelled(f"the request was cancelled after {len(self.stream.tokens)} new tokens"))

    def words(self, size: int) -> np.ndarray:
        """Return the tokens that the grammar lets follow, as in `allowed_words`. `size` is that of the vocabulary."""
        assert self.request.allowed is not None
        return allowed_words(self.request.allowed, self.stream.tokens, size)

    def push(self, drawn: DrawnToken) -> str:
        """Add a drawn token, and give its text to the answer. Return why the answer is complete, or ""."""
        stream, token = self.stream, drawn.token
        if not stream.tokens:
            self.first = time.monotonic()
        if token in self.stop_ids:
            text, finish = stream.finish(), "stop"
            stream.tokens.append(token)  # after the text has ended: the token may have a text of its own
        else:
            text = stream.push(token)
            finish = "stop" if stream.stopped else ""
        if not finish and not self.left:
            text += stream.finish()
            finish = "stop" if stream.stopped else "length"
        self.answer.add(Piece(text, token, drawn.logprobs(self.request.logprobs)))
        return finish

    def complete(self, finish: str) -> None:
        """End the answer. `finish` is what `push` returned."""
        stream, plan, now = self.stream, self.plan, time.monotonic()
        report = AnswerReport(
            policy=plan.policy,
            fallback=plan.fallback,
            fetch=plan.fetch,
            prompt_tokens=len(self.ids),
            stored_tokens=self.read,
            generated_tokens=len(stream.tokens),
            finish=finish,
            queue_seconds=self.begun - self.arrived,
            prefill_seconds=self.first - self.begun,
            decode_seconds=now - self.first,
            stored=self.stored,
            not_stored=self.not_stored,
            proposed_tokens=None if plan.drafting is None else self.proposed,
            accepted_tokens=self.accepted,
            plain=self.plain,
            spilled=self.spilled,
        )
        text = None if stream.tokenizer is None else stream.text
        self.answer.end(AnswerResult(stream.tokens[: stream.kept()], text, report))


_AGE_SECONDS = 10.0  # by which an item counts as earlier for each step of its priority
_MOST_TURNS = 4096  # clients whose last turn is known


class _Waiting(Protocol):
    """An item of the queue."""

    arrived: float  # in seconds

    @property
    def priority(self) -> int:
        """An item with a higher number comes before those of its client that arrived a short time earlier."""

    @property
    def client(self) -> str:
        """Who asks."""


class WaitingQueue[Item: _Waiting]:
    """Items by the turns of their clients, and those of one client by priority and arrival.

    The client whose last turn is the longest ago comes first, so that many requests of one client delay another one by
    few. (Nagle, RFC 970, 1985) No item waits for ever: within one client its age counts too.
    """

    def __init__(self) -> None:
        self._items: dict[str, list[tuple[float, int, Item]]] = {}
        self._last: dict[str, int] = {}  # the number of each client's last turn, from the oldest to the newest
        self._arrivals, self._turns, self._size = itertools.count(), itertools.count(1), 0

    def __len__(self) -> int:
        """Return the number of items. Any thread may ask for it, and for `count`."""
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in the order in which they would have their turns."""
        items = {client: list(entries) for client, entries in self._items.items()}
        turns = [(self._last.get(client, 0), entries[0][:2], client, 0) for client, entries in items.items()]
        heapq.heapify(turns)
        later = itertools.count(max(self._last.values(), default=0) + 1)
        while turns:
            _, _, client, place = heapq.heappop(turns)
            yield items[client][place][2]
            if place + 1 < len(items[client]):
                heapq.heappush(turns, (next(later), (0.0, 0), client, place + 1))

    def count(self, client: str) -> int:
        """Return the number of items of a client."""
        return len(self._items.get(client, ()))

    def push(self, item: Item, place: int = 0) -> None:
        """Add an item. `place` is its number among those that came with it, each of which counts as less urgent."""
        rank = item.arrived - _AGE_SECONDS * (item.priority - place)
        bisect.insort(self._items.setdefault(item.client, []), (rank, next(self._arrivals), item))
        self._size += 1

    def take(self, item: Item) -> None:
        """Remove an item that has its turn."""
        self.remove(item)
        self._last.pop(item.client, None)
        self._last[item.client] = next(self._turns)
        if len(self._last) > _MOST_TURNS:
            del self._last[next(iter(self._last))]

    def hold(self, item: Item) -> None:
        """Keep the turn of an item's client: no client that comes later is before it."""
        self._last.pop(item.client, None)

    def remove(self, item: Item) -> bool:
        """Remove an item. Return whether it was in the queue."""
        entries = self._items.get(item.client, [])
        kept = [entry for entry in entries if entry[2] is not item]
        if kept:
            self._items[item.client] = kept
        else:
            self._items.pop(item.client, None)
        self._size -= len(entries) - len(kept)
        return len(kept) < len(entries)
