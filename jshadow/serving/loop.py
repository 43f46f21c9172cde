"""The loop of an engine: it admits requests, steps the groups, and reads parts of prompts between the steps.

Only one thread calls the functions of this module, and JAX runs in no other."""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from jshadow.engine.sampling import NO_TOKEN
from jshadow.errors import JshadowError, NumericalError, ServingError
from jshadow.serving import documents
from jshadow.serving.admission import Admission, PlannedClass
from jshadow.serving.drafts import why_plain
from jshadow.serving.groups import Group, Programs, ReadPrompt
from jshadow.serving.jobs import Job, WaitingQueue, typed
from jshadow.serving.requests import Answer, DrawnToken, read_drawn


@dataclasses.dataclass
class Counts:
    """Counts since the engine was made.

    Attributes:
        finished, failed, cancelled: number of requests that ended in each way.
        tokens: number of drawn tokens.
        proposed, accepted: number of tokens that were proposed by speculation, and of these that were accepted, in the
            answers that have ended.
        steps: number of steps of groups.
        units: number of parts of prompts that were read.
        most_units: the largest number of parts between two steps of running rows.
        busy_seconds: seconds in which the engine stepped rows or read prompts.
        queue_seconds, prefill_seconds, decode_seconds: sums over the finished requests, as in `AnswerReport`.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    steps: int = 0
    units: int = 0
    most_units: int = 0
    busy_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """The figures of an engine.

    Attributes:
        counts: counts since the engine was made.
        waiting: number of requests that wait for a row.
        reading: whether a prompt is being read.
        groups: number of groups.
        rows: number of their rows.
        rows_in_use: number of these that a request has, including the row of the prompt that is being read.
        rows_spilled: number of the rows in use that are in host memory because device memory is short.
        device_bytes: planned bytes of the groups in device memory.
        host_bytes: planned bytes of the groups in host memory.
        programs: number of programs that the process has compiled since the engine was made.
    """

    counts: Counts
    waiting: int
    reading: bool
    groups: int
    rows: int
    rows_in_use: int
    rows_spilled: int
    device_bytes: int
    host_bytes: int
    programs: int


class _Reader(Protocol):
    """A prompt that is being read."""

    @property
    def rest(self) -> float:
        """The tokens that are still to be read. A part of a token is one layer of it or several."""

    def advance(self) -> bool:
        """Read the next part. Return whether it was the last one."""

    def end(self) -> ReadPrompt:
        """Return the result of reading the prompt."""


class _PromptReader:
    """A prompt that is read from its beginning: a part is that of `Programs.advance`.

    A model that proposes tokens reads the prompt too, after the other one.
    """

    def __init__(self, programs: Programs, job: Job) -> None:
        self.programs = programs
        own = None if job.plain is not None else programs.begin_draft(job.plan, job.ids)
        self.parts = [programs.begin(job.plan, job.ids), *([] if own is None else [own])]

    @property
    def rest(self) -> float:
        """The tokens that are still to be read."""
        return sum(map(self.programs.rest, self.parts))

    def advance(self) -> bool:
        """Read the next part. Return whether it was the last one."""
        place = next(place for place, part in enumerate(self.parts) if not part.done)
        self.parts[place] = self.programs.advance(self.parts[place])
        return self.parts[-1].done

    def end(self) -> ReadPrompt:
        """Return the result of reading the prompt."""
        (logits, state), *own = map(self.programs.finish, self.parts)
        return ReadPrompt(logits, state, own[0][1] if own else None)


class _DocumentReader:
    """A prompt whose beginning is stored: a part has up to `turn_chunk` of the other tokens."""

    def __init__(self, programs: Programs, job: Job, base: Any) -> None:
        """Take the stored state of the beginning. It is only read."""
        self.programs, self.ids = programs, job.ids[job.read :]
        self.state: Any = programs.begin_on(job.plan, base)
        self.logits: Any = None

    @property
    def rest(self) -> float:
        """The tokens that are still to be read."""
        return len(self.ids)

    def advance(self) -> bool:
        """Read the next part. Return whether it was the last one."""
        count = self.programs.options.turn_chunk
        self.logits, self.state = self.programs.extend(self.state, self.ids[:count])
        self.ids = self.ids[count:]
        return not self.ids

    def end(self) -> ReadPrompt:
        """Return the result of reading the prompt."""
        return ReadPrompt(self.logits, self.state)


class _Reading:
    """A job that is being read, and the row that is reserved for it.

    Attributes:
        passed: number of turns since its last part. In each of them a part of another prompt was read.
    """

    def __init__(self, programs: Programs, job: Job, group: Group, slot: int) -> None:
        self.job, self.group, self.slot, self.passed = job, group, slot, 0
        self.reader: _Reader = (
            _PromptReader(programs, job) if group.base is None else _DocumentReader(programs, job, group.base)
        )


class _Groups:
    """The groups of an engine. An empty group is kept until another class needs its bytes."""

    def __init__(self, programs: Programs, admission: Admission) -> None:
        self.programs, self.admission = programs, admission
        self._groups: list[Group] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups))

    def __len__(self) -> int:
        return len(self._groups)

    def has(self, plan: PlannedClass) -> bool:
        """Whether there is a group of a class."""
        return any(group.plan.key == plan.key for group in self._groups)

    def clear(self) -> None:
        """Forget all groups."""
        self._groups = []

    @property
    def full(self) -> bool:
        """Whether as many requests have a row as `Limits.rows` allows."""
        most, rows = self.admission.limits.rows, [job for group in self._groups for job in group.jobs]
        return most is not None and len(rows) - rows.count(None) >= most

    def release(self, job: Job) -> None:
        """Free the row of a job."""
        for group in self._groups:
            if job in group.jobs:
                group.release(group.jobs.index(job))

    def sweep(self) -> None:
        """Drop the groups on a document that have no job. Not before the end of a turn: another job may get a row."""
        self._groups = [group for group in self._groups if group.base is None or not group.empty]

    def place(self, job: Job, paused: Sequence[PlannedClass] = ()) -> tuple[Group, int] | None:
        """Reserve a row for a job, and return its group and slot.

        Return None if no row is free and no group fits, or if the job's document must be prepared again.

        Args:
            job: a job without a row.
            paused: the classes of the prompts whose reading is paused meanwhile. Their bytes are counted too.

        Raises:
            JshadowError: the stored state of the job's document cannot be used, or its rows can never fit.
        """
        base = None
        if not job.planned:
            base = self._base(job)
            if base is None:
                return None
            plan = documents.plan_rows(self.programs, job, base)
            self.admission.check(plan)
            job.plans = [plan]
        plans = [group.plan for group in self._groups]
        for group in self._groups:
            fits = group.plan.key == job.plan.key and (not paused or self.admission.fits(plans, paused))
            if fits and (slot := group.reserve(job)) is not None:
                return group, slot
        affordable = self._spill_for(job.plan, paused)
        if affordable is None:
            return None
        self._drop_empty(affordable, paused)
        if job.document is not None and base is None:
            base = self._base(job)
            if base is None:
                return None
        group = Group(job.plan, self.programs, base)
        self._groups.append(group)
        slot = group.reserve(job)
        assert slot is not None
        if affordable is not job.plan:
            group.move(affordable)
        return group, slot

    def _spill_for(self, plan: PlannedClass, paused: Sequence[PlannedClass]) -> PlannedClass | None:
        """Move as few groups to host memory as suffice for another group. Return its plan, or None if nothing does.

        The other group begins in host memory itself before any group is moved. The oldest groups move first.
        """
        kept = [group for group in self._groups if not group.empty]
        moving: list[Group] = []
        for group in [None, *(group for group in kept if group.plan.spilled is not None)]:
            moving += [] if group is None else [group]
            plans = [one.plan.spilled or one.plan if one in moving else one.plan for one in kept]
            for fresh in (plan, plan.spilled):
                if fresh is not None and self.admission.fits([*plans, fresh], paused):
                    for one in moving:
                        assert one.plan.spilled is not None
                        one.move(one.plan.spilled)
                    return fresh
        return None

    def _drop_empty(self, plan: PlannedClass, paused: Sequence[PlannedClass] = ()) -> None:
        """Drop groups without a job until a further group of a plan fits."""
        for group in [group for group in self._groups if group.empty]:
            if self.admission.fits([*(other.plan for other in self._groups), plan], paused):
                break
            self._groups.remove(group)

    def spill_empty(self, group: Group) -> None:
        """Move a group without active rows to host memory, and make its arrays anew there, if all groups fit then."""
        others, plan = [other.plan for other in self._groups if other is not group], group.home.spilled
        if plan is not None and not group.active.any() and self.admission.fits([*others, plan]):
            group.pool = None
            group.move(plan)

    def unspill(self) -> None:
        """Move a group back to device memory, if one has left it and all fit."""
        for group in self._groups:
            others = [other.plan for other in self._groups if other is not group and not other.empty]
            stays = group.plan is group.home or any(job is not None and job.spills for job in group.jobs)
            if not stays and self.admission.fits([*others, group.home]):
                self._groups.remove(group)
                self._drop_empty(group.home)
                self._groups.append(group)
                return group.move(group.home)

    def _base(self, job: Job) -> Any:
        """Return the stored state of a job's document. If a group has it, its prompt half is not loaded again."""
        return documents.base_of(job, {group.plan.document: group.base for group in self._groups})


_LOG = logging.getLogger(__name__)
_NOT_READ = "the model that proposes tokens has not read the prompt, which an earlier request shares that has a grammar"
_MOST_READINGS = 3  # prompts that are being read at once. A turn reads a part of one of them.
_MOST_PASSED = 7  # turns in a row that a prompt gives way to others that are being read
_SHORTER = 2  # how many times fewer tokens a prompt has that is read before one that is being read
_MOST_PREPARED = 4  # documents of waiting jobs whose files are read, and are held in host memory


class Loop:
    """The requests of an engine, and the rows that they have.

    Attributes:
        waiting: the jobs that have no row yet.
        groups: the groups.
        readings: the prompts that are being read.
        counts: what was done.
        closed: the error with which further jobs end, or None.
    """

    def __init__(self, programs: Programs, admission: Admission, library: Any, wake: Callable[[], None]) -> None:
        """Begin without requests. Any thread calls `wake` when there may be more to do."""
        self.programs, self.library, self.wake = programs, library, wake
        self.waiting: WaitingQueue[Job] = WaitingQueue()
        self.groups = _Groups(programs, admission)
        self.readings: list[_Reading] = []
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
            self._count_guesses(job)
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
        self._count_guesses(job)
        self.waiting.remove(job)
        self.readings = [reading for reading in self.readings if reading.job is not job]
        self.groups.release(job)

    def _count_guesses(self, job: Job) -> None:
        self.counts.proposed += job.proposed
        self.counts.accepted += job.accepted

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
            self._fail(job, typed(error, job.request.name))

    def _fail_lost(self) -> None:
        """Fail each job that neither waits nor has a row. Without a defect of the engine there is none."""
        self._open = {job for job in self._open if not job.answer.done}
        for job in self._open.difference(self._jobs()):
            error = ServingError("the engine lost this request, which is a defect of jshadow; please report it")
            count, name = len(job.stream.tokens), job.request.name
            _LOG.error("request lost after %d tokens of its answer, its name is %r: %s", count, name, self.counts)
            self._fail(job, error)
            self._open.discard(job)

    # One turn

    def run_once(self) -> bool:
        """Read a part of a prompt, and step each group with an active row if that is due. Return whether any ran.

        A step is due after `EngineOptions.prompt_parts` parts, and while no prompt is read. Each turn begins with the
        messages and the admission, so a short prompt that comes behind long ones waits for at most one part of them.
        """
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
        if not self.readings and not len(self.waiting):
            self.groups.unspill()
        due = not self.readings or self._units >= self.programs.options.prompt_parts
        stepping = [group for group in self.groups if due and group.active.any()]
        begun = time.monotonic()
        for group in stepping:
            group.start_step()
        for group in stepping:
            self._start_draw(group)
        self.counts.steps += len(stepping)
        if due:
            self.counts.most_units = max(self.counts.most_units, self._units if stepping else 0)
            self._units = 0
        # The part is given to the device before the tokens of the steps are waited for.
        reading, done = self._next_reading(), False
        if reading is not None:
            with self._work_for(reading.job):
                done = reading.reader.advance()
            self.counts.units += 1
            self._units += 1
        for group in stepping:
            drawn = group.drawn()
            if reading is None and len(stepping) == 1:
                group.timed(time.monotonic() - begun)
            for slot, tokens in drawn:
                job = group.jobs[slot]
                assert job is not None
                with self._work_for(job):
                    self._push(job, group, slot, tokens)
        if reading is not None and done:
            self._begin_answers(reading)
        return bool(stepping) or reading is not None

    def _next_reading(self) -> _Reading | None:
        """Return the prompt that is read on: of those of the highest priority the one with the fewest tokens left.

        The shortest rest first makes the mean wait shortest (Schrage, Operations Research 16, 1968). A prompt that has
        given way long enough comes first, so that a long one goes on too.
        """
        if not self.readings:
            return None
        chosen = max(self.readings, key=lambda one: (one.passed >= _MOST_PASSED, one.job.priority, -one.reader.rest))
        for reading in self.readings:
            reading.passed = 0 if reading is chosen else reading.passed + 1
        return chosen

    def _start_draw(self, group: Group) -> None:
        """Start to draw. The tokens that grammars allow are found meanwhile, because the step runs already."""
        for slot, job in enumerate(group.jobs):
            if job is not None and group.active[slot] and job.request.allowed is not None:
                with self._work_for(job):
                    group.allow(slot, job.words(self.programs.parts.vocab_size))
        group.start_draw()

    def _push(self, job: Job, group: Group, slot: int, tokens: Sequence[DrawnToken]) -> None:
        """Give the tokens that a step drew to the job of a row."""
        for later, drawn in zip(reversed(range(len(tokens))), tokens, strict=True):
            finish = self._add(job, drawn)
            if finish and job.keeps_answer:
                state = functools.partial(group.row, slot, later, [drawn.token])
                documents.keep(job, job.ids + job.stream.tokens, state)
            if finish or job.answer.done:
                job.accepted -= max(0, later - 1)  # behind the end; the last of these was drawn and not guessed
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

    def _begin_answers(self, reading: _Reading) -> None:
        """Begin the answer of a job whose prompt was read, and those of the waiting jobs with the same prompt."""
        self.readings.remove(reading)
        job, group, read = reading.job, reading.group, None
        with self._work_for(job):
            read = reading.reader.end()
            self._begin_answer(job, group, reading.slot, read)
        if read is None:
            return
        for twin in [other for other in self.waiting if other.is_twin(job)]:
            if self.groups.full or (slot := group.reserve(twin)) is None:
                return
            self.waiting.remove(twin)
            twin.plans = [group.home]
            twin.start()
            with self._work_for(twin):
                twin.row, twin.plain = self.programs.row(twin.request.settings, twin.ids), why_plain(twin)
                if group.plan.drafter is not None and group.plan.drafter.reader is not None:
                    twin.plain = twin.plain or (_NOT_READ if read.own is None else None)
                self._begin_answer(twin, group, slot, read)

    def _begin_answer(self, job: Job, group: Group, slot: int, read: ReadPrompt) -> None:
        """Draw the first token after a prompt, and make the row active."""
        logits, state, programs, row = read.logits, read.state, self.programs, job.row
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
        group.insert(slot, read, row, drawn.token)

    # Admission

    def _prepare(self) -> None:
        """Begin to read the files of the documents that the first waiting jobs need."""
        soon: set[str | None] = set()
        for job in self.waiting if self.library is not None else ():
            if job.prepare is None or len(soon | {job.document}) > _MOST_PREPARED:
                continue
            soon.add(job.document)
            if job.ready is None:
                with self._work_for(job):
                    job.ready = job.prepare()
                    job.ready.add_done_callback(lambda _: self.wake())

    def _admit(self) -> None:
        """Begin to read the first prompt that can have a row, and that goes before the prompts that are being read.

        A job that waits for the first group of its class is passed only by those of a higher priority.
        """
        full, paused = set(), [reading.job.plan for reading in self.readings]
        ranks = [(reading.job.priority, reading.reader.rest) for reading in self.readings]
        held: Job | None = None
        for job in self.waiting if len(self.readings) < _MOST_READINGS and not self.groups.full else ():
            if held is not None and job.priority <= held.priority:
                continue
            if not all(_goes_before(job, *rank) for rank in ranks):
                held = held or (None if self.groups.has(job.plan) else job)
                continue
            if job.waits_for_file or (job.planned and job.plan.key in full):
                continue
            place = None
            with self._work_for(job):
                place = self.groups.place(job, paused)
                if place is not None:
                    job.row, job.plain = self.programs.row(job.request.settings, job.ids), why_plain(job)
                    self.readings.append(_Reading(self.programs, job, *place))
                    if job.spills:
                        self.groups.spill_empty(place[0])
            if job.answer.done or job.waits_for_file:
                continue
            if place is not None:
                self.waiting.take(job)
                return job.start()
            if not self.groups.has(job.plan):
                return self.waiting.hold(job)
            full.add(job.plan.key)


def _goes_before(job: Job, priority: int, rest: float) -> bool:
    """Return whether a waiting job is read before a prompt of this priority with `rest` tokens left.

    It is if its priority is higher. With the same priority, it must be much shorter.
    """
    if job.priority != priority:
        return job.priority > priority
    return _SHORTER * (len(job.ids) - job.read) <= rest
