"""A serving engine: requests of any thread come and go in rows of a few fixed sizes."""

import functools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax

from jshadow.engine.report import CompileClock
from jshadow.engine.rows import RowSettings, check_row
from jshadow.engine.speculation.drafter import Pace
from jshadow.engine.text import TextStream, encode, split_stops
from jshadow.errors import ConfigError, JshadowError, QueueFull, ServingError
from jshadow.policies import Policy
from jshadow.serving.admission import (
    Admission,
    EngineOptions,
    Limits,
    PlannedClass,
    RowClass,
    fitting,
    held_bytes,
    plan_classes,
    storable,
)
from jshadow.serving.documents import check_library, find_stored, not_kept
from jshadow.serving.groups import Programs
from jshadow.serving.jobs import Job
from jshadow.serving.loop import EngineReport, Loop
from jshadow.serving.requests import Answer, Request
from jshadow.weights.params import Params

_LOG = logging.getLogger(__name__)
_NEW_CLIENTS = 1 / 16  # of the requests that may wait, for clients of which none waits


class Engine:
    """Answers requests with one model. Any thread may call its methods.

    One thread runs JAX. It begins with the first request. `close`, or the end of a `with` block, ends it.

    Args:
        params: the model, from `load`.
        policy: how keys and values are kept. None means ShadowKV(). A class in which the policy has no effect has a
            dense cache.
        classes: the sizes of rows. A request gets a row of the smallest class that can hold it.
        library: a `jshadow.Library`, or None. A prompt whose beginning is stored there is not read again.
        limits: bytes and queue length. None: what the machine has.
        options: further settings. None: the defaults.

    Raises:
        ConfigError: a setting is out of range, or the library is of another model, policy or learned arrays.
        CapacityError: a class has more tokens than the model's context.
    """

    def __init__(
        self,
        params: Params,
        policy: Policy | None = None,
        *,
        classes: Sequence[RowClass],
        library: Any = None,
        limits: Limits | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.params, self.options = params, options or EngineOptions()
        if jax.process_count() > 1:
            raise ConfigError(f"an engine must run in one process, got {jax.process_count()} joined processes")
        self.plans = plan_classes(params, policy, classes, self.options)
        self.admission = Admission((limits or Limits()).of_machine())
        programs = Programs(params, self.options)
        if library is not None:
            check_library(library, programs, policy)
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop = Loop(programs, self.admission, library, lambda: self._messages.put(lambda: None))
        self._lock, self._tokenizing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._arriving: Counter[str] = Counter()  # requests that the loop has not seen yet, by client
        self._compiled = CompileClock.programs

    # For any thread

    def submit(self, request: Request) -> Answer:
        """Give a request to the engine, and return its answer, which arrives later. Raises as `submit_all`."""
        [answer] = self.submit_all([request])
        return answer

    def submit_all(self, requests: Sequence[Request]) -> list[Answer]:
        """Give requests to the engine, all or none, and return their answers, which arrive later.

        A prompt that several of the requests have is read once, if there are rows for all of them.

        Raises:
            PromptError: the prompt is empty, or has a token id out of range, or needs a tokenizer.
            CapacityError: no class can hold the request, no group of such a class fits the limits, or the request is to
                be stored and no class that can hold it has the capacity of the library.
            QueueFull: as many requests wait as may.
            ConfigError: there are more requests than may wait, a setting does not fit the engine, or a request is to be
                stored and the library has another fetch mode.
            ServingError: the engine is closed or has failed.
        """
        most = self.admission.limits.waiting
        if most is not None and len(requests) > most:
            raise ConfigError(f"requests must be at most limits.waiting={most} at once, got {len(requests)}")
        clients = Counter(request.client for request in requests)
        self._reserve(clients, most)
        try:
            jobs = [self._job(request) for request in requests]
            self._send(functools.partial(self._accept, jobs))
        except BaseException:
            self._release(clients)
            raise
        return [job.answer for job in jobs]

    def cancel(self, answer: Answer) -> None:
        """Cancel a request. Its row becomes free, and its answer raises RequestCancelled unless it is complete."""
        with self._lock:
            self._messages.put(lambda: self._loop.cancel(answer))

    def warm(self, told: Callable[[int, int], None] | None = None) -> None:
        """Compile the programs of each class, so that later requests compile nothing.

        Requests of a few tokens run in each class, and on a document with the room of each class if the engine has a
        library. Two things may compile later: the change of an answer's window when it is stored (`Request.store`), and
        rows on a stored answer that need more room than their class has.

        Args:
            told: called before each part of the work with the number of parts that are done, and the number of all
                parts. None: nothing is called.

        Raises:
            CapacityError: no group of a class fits the limits.
            ServingError: the engine is closed or has failed.
        """
        parts: list[Callable[[], None]] = []
        for [plan] in (self._possible([plan]) for plan in self.plans):
            one = plan.row_class
            ids = [0] * min(one.prompt, 2 * self.options.piece(one))  # at most two pieces
            for place in (plan, plan.spilled):
                if place is not None and self.admission.fits([place]):
                    parts.append(functools.partial(self._warm, plan, ids, spills=place is not plan))
        library, rooms = self._loop.library, {plan.row_class.room: plan for plan in reversed(self.plans)}
        for room, plan in rooms.items() if library is not None else ():
            if min(room, library.capacity - 1) >= 2:
                parts.append(functools.partial(self._warm, plan, [0, 0], library))
        for done, part in enumerate(parts):
            if told is not None:
                told(done, len(parts))
            part()

    def _warm(self, plan: PlannedClass, ids: list[int], library: Any = None, *, spills: bool = False) -> None:
        """Answer requests of a class, on a document of one token if there is a library.

        A group compiles a program for each number of tokens that a step may propose. So a request takes a step with
        each of these numbers. If its room is too short for all of these steps, several requests share them.
        """
        most = plan.row_class.room if library is None else min(plan.row_class.room - 1, library.capacity - 2)
        drafter = self.options.speculate
        widths = [] if drafter is None else list(reversed(Pace(drafter.tokens, drafter.cost, 1).widths))
        steps = max(1, most - 1)  # the first token comes before the first step
        for first in range(0, max(1, len(widths)), steps):
            self._warm_with(plan, ids, widths[first : first + steps], most, library, spills)

    def _warm_with(
        self, plan: PlannedClass, ids: list[int], widths: list[int], most: int, library: Any, spills: bool
    ) -> None:
        """Answer a request of at most `most` tokens, whose steps propose so many tokens."""
        # A seed of more than 32 bits takes one program more.
        request = Request(ids, min(max(3, 1 + len(widths)), most), RowSettings(seed=-(2**63)))
        job = Job(Answer(request), ids, TextStream(None), frozenset())
        job.widths, job.spills = widths, spills
        job.plans, job.read = [plan], 0 if library is None else 1
        own = self._loop.library
        if own is not None and (library is not None or plan.row_class.capacity == own.capacity):
            job.keep = not_kept
        if library is not None:
            job.document, job.rooms = "", [plan.row_class]
            job.load = lambda _: self._loop.programs.document(library)
        self._reserve(Counter([request.client]))
        self._send(functools.partial(self._accept, [job]))
        while not self.options.threaded and self.run_once():
            pass
        job.answer.result()

    @property
    def failure(self) -> JshadowError | None:
        """The error with which the engine's loop ended, or None."""
        return None if self._closing else self._loop.closed

    def report(self) -> EngineReport:
        """Return the figures of the engine. They may be of different moments while it runs."""
        loop = self._loop
        groups = list(loop.groups)
        device, host = held_bytes(group.plan for group in groups)
        return EngineReport(
            counts=loop.counts,
            waiting=len(loop.waiting),
            reading=bool(loop.readings),
            groups=len(groups),
            rows=sum(len(group.jobs) for group in groups),
            rows_in_use=sum(job is not None for group in groups for job in group.jobs),
            rows_spilled=sum(
                len(group.jobs) - group.jobs.count(None) for group in groups if group.plan is not group.home
            ),
            device_bytes=device,
            host_bytes=host,
            programs=CompileClock.programs - self._compiled,
        )

    def close(self, drain: bool = True) -> None:
        """End the engine. Further requests raise ServingError.

        Args:
            drain: whether the requests that were submitted are answered first. If not, they end with ServingError.
        """
        with self._lock:
            self._closing = True
            if not drain:
                self._messages.put(lambda: self._loop.close(ServingError("the engine was closed before the answer")))
            self._messages.put(lambda: None)  # wakes the thread
            thread = self._thread
        if thread is not None:
            thread.join()
        while thread is None and (self._turn() or len(self._loop.waiting)):
            pass
        self._loop.close(self._loop.closed or ServingError("the engine is closed"))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    def run_once(self) -> bool:
        """Take the messages of other threads, and run one turn. Return whether there may be more to do.

        A turn reads at most one part of a prompt, and steps each group with an active row once if that is due.

        Raises:
            ConfigError: the engine has a thread of its own.
        """
        if self.options.threaded:
            raise ConfigError("options.threaded must be False for run_once, got True")
        return self._turn()

    def _job(self, request: Request) -> Job:
        """Return the job of a request. Raises the errors of `submit_all` except QueueFull and ServingError."""
        library = self._loop.library
        if request.store and library is None:
            raise ConfigError("store must be False in an engine without a library, got True")
        if request.allowed is not None and not self.options.grammar:
            raise ConfigError("allowed must be None in an engine without options.grammar, got a function")
        if request.logprobs is not None and not self.options.logprobs:
            raise ConfigError(f"logprobs must be None in an engine without options.logprobs, got {request.logprobs}")
        check_row(request.settings, self._loop.programs.parts)
        params = self.params
        with self._tokenizing:
            ids = encode(params.tokenizer, request.prompt, params.config.vocab_size)
        texts, stops = split_stops(request.stop, params.tokenizer)
        plans = fitting(self.plans, len(ids), request.max_new_tokens)
        if request.store:
            plans = storable(plans, library.capacity, library.fetch)
        plans = self._possible(plans)
        stop_ids = frozenset(params.config.eos_ids) | set(stops)
        job = Job(Answer(request), ids, TextStream(params.tokenizer, texts), stop_ids)
        job.plans = plans
        if request.store:
            job.keep = library.start_store
        if library is not None:
            find_stored(library, job, self.plans)
        return job

    # For the thread of the loop

    def _possible(self, plans: Sequence[PlannedClass]) -> list[PlannedClass]:
        """Return the plans of which a group fits the limits. Raises CapacityError if there is none."""
        possible = [plan for plan in plans if any(one and self.admission.fits([one]) for one in (plan, plan.spilled))]
        if not possible:
            self.admission.check(plans[0])
        return possible

    def _accept(self, jobs: Sequence[Job]) -> None:
        self._release(Counter(job.client for job in jobs))
        for place, job in enumerate(jobs):
            self._loop.accept(job, place)

    def _reserve(self, clients: Counter[str], limit: int | None = None) -> None:
        """Count requests that the loop has not seen yet. Raises QueueFull if too many would wait."""
        waiting, count = self._loop.waiting, clients.total()
        with self._lock:
            if limit is not None:
                waits = any(waiting.count(client) or self._arriving[client] for client in clients)
                most = limit - int(limit * _NEW_CLIENTS) if waits else limit
                if len(waiting) + self._arriving.total() + count > most:
                    raise QueueFull(f"at most {most} of limits.waiting={limit} requests may wait, got {count} more")
            self._arriving.update(clients)

    def _release(self, clients: Counter[str]) -> None:
        """Count requests no longer that the loop has seen or that were refused."""
        with self._lock:
            self._arriving.subtract(clients)
            self._arriving = +self._arriving

    def _send(self, message: Callable[[], None]) -> None:
        """Give a message to the loop, and start its thread if it does not run."""
        with self._lock:
            if self._closing or self._loop.closed is not None:
                raise self._loop.closed or ServingError("the engine is closed")
            self._messages.put(message)
            if self._thread is None and self.options.threaded:
                self._thread = threading.Thread(target=self._serve, name="jshadow-engine", daemon=True)
                self._thread.start()

    def _turn(self, message: Callable[[], None] | None = None) -> bool:
        """Run a message, the waiting messages and one turn. Return whether there may be more to do."""
        try:
            if message is not None:
                message()
            while not self._messages.empty():
                self._messages.get()()
            return self._loop.run_once() or not self._messages.empty()
        except Exception as error:
            failure = error if isinstance(error, JshadowError) else ServingError(f"the engine's loop failed: {error}")
            failure.__cause__ = None if failure is error else error
            _LOG.exception("the engine's loop has failed, and answers nothing more")
            self._loop.close(failure)
            return False

    def _serve(self) -> None:
        """Run turns until the engine is closed and has nothing left to do, or has failed."""
        message = None
        while True:
            more, message = self._turn(message), None
            if more:
                continue
            with self._lock:
                idle = self._messages.empty() and not len(self._loop.waiting)
                if idle and (self._closing or self._loop.closed is not None):
                    return
            message = self._messages.get()
