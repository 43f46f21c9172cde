"""The loop of an engine: it admits requests, steps the groups, and reads one prompt between the steps.

Only one thread calls the functions of this module, and JAX runs in no other.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jshadow.engine.sampling import NO_TOKEN
from jshadow.errors import JshadowError, NumericalError, ServingError
from jshadow.serving import documents
from jshadow.serving.admission import Admission
from jshadow.serving.drawn import DrawnToken, read_drawn
from jshadow.serving.failures import typed
from jshadow.serving.groups import Group
from jshadow.serving.jobs import Job
from jshadow.serving.placing import Groups
from jshadow.serving.programs import Programs
from jshadow.serving.reading import Reading
from jshadow.serving.report import Counts
from jshadow.serving.requests import Answer
from jshadow.serving.waiting import WaitingQueue

LOG = logging.getLogger(__name__)
MOST_READINGS = 2  # prompts that are being read at once, all but one of them paused
MOST_PREPARED = 4  # documents of waiting jobs whose files are read, and are held in host memory


class Loop:
    """The requests of an engine, and the rows that they have.

    Attributes:
        waiting: the jobs that have no row yet.
        groups: the groups.
        readings: the prompts that are being read. Only the last one goes on. The others are paused.
        counts: what was done.
        closed: the error with which further jobs end, or None.
    """

    def __init__(self, programs: Programs, admission: Admission, library: Any, wake: Callable[[], None]) -> None:
        """Begin without requests. Any thread calls `wake` when there may be more to do."""
        self.programs, self.library, self.wake = programs, library, wake
        self.waiting: WaitingQueue[Job] = WaitingQueue()
        self.groups = Groups(programs, admission)
        self.readings: list[Reading] = []
        self.counts = Counts()
        self.closed: JshadowError | None = None
        self._units = 0  # since the last step
        self._open: set[Job] = set()  # accepted and not ended

    # Messages

    def accept(self, job: Job, place: int = 0) -> None:
        """Take a new job. `place` is its number among those that came with it."""
        if self.closed is not None:
            return job.answer.end(self.closed)
        self._open.add(job)
        self.waiting.push(job, place)

    def cancel(self, answer: Answer) -> None:
        """Cancel a request. Nothing happens if it has ended."""
        for job in self._jobs():
            if job.answer is answer:
                self._drop(job)
                self.counts.cancelled += 1
                return job.cancel()

    def close(self, error: JshadowError) -> None:
        """End all jobs, and all that come later, with an error."""
        self.closed = error
        for job in list(self._jobs()):
            job.answer.end(error)
            self.counts.failed += 1
        self.waiting, self.readings = WaitingQueue(), []
        self.groups.clear()

    def _jobs(self) -> Iterator[Job]:
        yield from self.waiting
        for group in self.groups:
            yield from (job for job in group.jobs if job is not None)

    def _drop(self, job: Job) -> None:
        """Take a job out of the queue, of the reading and of its row."""
        self.waiting.remove(job)
        self.readings = [reading for reading in self.readings if reading.job is not job]
        self.groups.release(job)

    def _fail(self, job: Job, error: JshadowError) -> None:
        self._drop(job)
        self.counts.failed += 1
        job.answer.end(error)

    @contextlib.contextmanager
    def _work_for(self, job: Job) -> Iterator[None]:
        """A context manager for the work of one job. An error fails that job, unless it has harmed others."""
        try:
            yield
        except Exception as error:
            if any(group.broken for group in self.groups):
                raise
            self._fail(job, typed(error))

    def _fail_lost(self) -> None:
        """Fail each job that neither waits nor has a row. Without a defect of the engine there is none."""
        self._open = {job for job in self._open if not job.answer.done}
        for job in self._open.difference(self._jobs()):
            error = ServingError("the engine lost this request, which is a defect of jshadow; please report it")
            LOG.error("request lost after %d tokens of its answer: %s", len(job.stream.tokens), self.counts)
            self._fail(job, error)
            self._open.discard(job)

    # One turn

    def run_once(self) -> bool:
        """Step each group with an active row once, and read at most one part of a prompt. Return whether any ran."""
        begun = time.monotonic()
        ran = self._run_once()
        self.groups.sweep()
        self._fail_lost()
        if ran:
            self.counts.busy_seconds += time.monotonic() - begun
        return ran

    def _run_once(self) -> bool:
        self._admit()
        self._prepare()
        stepping = [group for group in self.groups if group.active.any()]
        for group in stepping:
            group.start_step()
        for group in stepping:
            self._start_draw(group)
        self.counts.steps += len(stepping)
        self.counts.most_units = max(self.counts.most_units, self._units if stepping else 0)
        self._units = 0
        # The part is given to the device before the tokens of the steps are waited for.
        reading, done = self.readings[-1] if self.readings else None, False
        if reading is not None:
            with self._work_for(reading.job):
                done, reading.moved = reading.reader.advance(), True
            self.counts.units += 1
            self._units += 1
        for group in stepping:
            for slot, tokens in group.drawn():
                job = group.jobs[slot]
                assert job is not None
                with self._work_for(job):
                    self._push(job, group, slot, tokens)
        if reading is not None and done:
            self._begin_answers(reading)
        return bool(stepping) or reading is not None

    def _start_draw(self, group: Group) -> None:
        """Start to draw. The tokens that grammars allow are found meanwhile, because the step runs already."""
        for slot, job in enumerate(group.jobs):
            if job is not None and group.active[slot] and job.request.allowed is not None:
                with self._work_for(job):
                    group.allow(slot, job.words(self.programs.parts.vocab_size))
        group.start_draw()

    def _push(self, job: Job, group: Group, slot: int, tokens: Sequence[DrawnToken]) -> None:
        """Give the tokens that a step drew to the job of a row."""
        for drawn in tokens:
            finish = self._add(job, drawn)
            if finish and job.keeps_answer:
                documents.keep(job, job.ids + job.stream.tokens, functools.partial(group.row, slot, [drawn.token]))
            if finish or job.answer.done:
                return self._complete(job, finish)

    def _add(self, job: Job, drawn: DrawnToken) -> str:
        """Add a token to an answer. Return why the answer is complete, or "". NO_TOKEN fails the job."""
        if drawn.token == NO_TOKEN:
            count = len(job.stream.tokens)
            error = NumericalError(
                f"logits must be numbers, got NaN in those that follow the prompt and {count} generated tokens; check "
                "the weights, or run the model in a wider dtype"
            )
            self._fail(job, error)
            return ""
        self.counts.tokens += 1
        return job.push(drawn)

    def _complete(self, job: Job, finish: str) -> None:
        """Free the row of a job whose answer is complete. A job that failed has no row any more."""
        if not finish:
            return
        self._drop(job)
        job.complete(finish)
        report = job.answer.result().report
        self.counts.finished += 1
        self.counts.queue_seconds += report.queue_seconds
        self.counts.prefill_seconds += report.prefill_seconds
        self.counts.decode_seconds += report.decode_seconds

    def _begin_answers(self, reading: Reading) -> None:
        """Begin the answer of a job whose prompt was read, and those of the waiting jobs with the same prompt."""
        self.readings.remove(reading)
        job, group, read = reading.job, reading.group, None
        with self._work_for(job):
            read = reading.reader.end()
            self._begin_answer(job, group, reading.slot, read)
        if read is None:
            return
        for twin in [other for other in self.waiting if other.is_twin(job)]:
            if (slot := group.reserve(twin)) is None:
                return
            self.waiting.remove(twin)
            twin.plans = [group.plan]
            twin.start()
            with self._work_for(twin):
                twin.row = self.programs.row(twin.request.settings, twin.ids)
                self._begin_answer(twin, group, slot, read)

    def _begin_answer(self, job: Job, group: Group, slot: int, read: tuple[Any, Any]) -> None:
        """Draw the first token after a prompt, and make the row active. `read` has the logits [1, V] and the state."""
        (logits, state), programs, row = read, self.programs, job.row
        if job.request.allowed is not None:
            row = programs.masked(row, job.words(programs.parts.vocab_size)[None])
        tokens, row = programs.draw(logits, row)
        wanted = job.request.logprobs is not None
        [drawn] = read_drawn(tokens, programs.likely(logits, tokens) if wanted else None)
        if job.keep is not None and drawn.token != NO_TOKEN:
            documents.keep(job, job.ids, lambda: state)
        finish = self._add(job, drawn)
        if finish and job.keeps_answer:
            documents.keep(job, [*job.ids, drawn.token], lambda: programs.fed(programs.fork(state), [drawn.token]))
        if finish or job.answer.done:
            return self._complete(job, finish)
        group.insert(slot, state, row, drawn.token)

    # Admission

    def _prepare(self) -> None:
        """Begin to read the files of the documents that the first waiting jobs need."""
        soon: set[str | None] = set()
        for job in self.waiting if self.library is not None else ():
            if job.prepare is None or len(soon | {job.document}) > MOST_PREPARED:
                continue
            soon.add(job.document)
            if job.ready is None:
                with self._work_for(job):
                    job.ready = job.prepare()
                    job.ready.add_done_callback(lambda _: self.wake())

    def _admit(self) -> None:
        """Begin to read the first prompt that can have a row.

        A prompt with a higher priority than that which is being read interrupts it. At most one reading is paused, and
        a part of it is read between two interruptions.
        A job that waits for a row of a class without a group is not overtaken. So it gets its group as soon as enough
        rows of other classes are free.
        """
        full, paused = set(), self.readings[0] if self.readings else None
        for job in self.waiting if len(self.readings) < MOST_READINGS else ():
            if paused is not None and not paused.moved:
                return
            if paused is not None and job.priority <= paused.job.priority:
                continue
            if job.waits_for_file or (job.planned and job.plan.key in full):
                continue
            place = None
            with self._work_for(job):
                place = self.groups.place(job, None if paused is None else paused.job.plan)
                if place is not None:
                    job.row = self.programs.row(job.request.settings, job.ids)
                    self.readings.append(Reading(self.programs, job, *place))
            if job.answer.done or job.waits_for_file:
                continue
            if place is not None:
                self.waiting.take(job)
                job.start()
                if paused is not None:
                    paused.moved = False
                return
            if not self.groups.has(job.plan):
                return self.waiting.hold(job)
            full.add(job.plan.key)
