"""Slots, groups, the queue, the admission and the tiers of a library, at random, against a plain model of them.

The model, the drafter and the library are of plain Python. A state is a list of tokens.
"""

import concurrent.futures
import contextlib
import dataclasses
import types
from unittest import mock

import numpy as np
import pytest
from few import slow
from hypothesis import settings, stateful
from hypothesis import strategies as st

from jshadow import errors
from jshadow.cache.accounting import ByteCount
from jshadow.engine.sampling import NO_TOKEN
from jshadow.engine.text import TextStream
from jshadow.library.shelf import Stored
from jshadow.library.tiers import DEVICE, HOST, MemoryTiers, Size, TierLimits
from jshadow.policies import Full
from jshadow.serving import documents, drafts
from jshadow.serving.admission import (
    Admission,
    Drafting,
    EngineOptions,
    GroupBytes,
    Limits,
    PlannedClass,
    RowClass,
    fitting,
    storable,
)
from jshadow.serving.groups import Pool
from jshadow.serving.jobs import Job
from jshadow.serving.loop import Loop
from jshadow.serving.requests import Answer, Request

PLANS = tuple(
    PlannedClass(RowClass(prompt, room, rows), Full(), None, "resident", GroupBytes(ByteCount(size), 1, ByteCount(2)))
    for prompt, room, rows, size in ((4, 3, 2, 10), (9, 6, 3, 25))
)
HOST_LIMIT = 30


def spilled_of(plan):
    """The plan of rows that have moved: half of their bytes are in host memory."""
    size = plan.bytes.rows.device
    sizes = dataclasses.replace(plan.bytes, rows=ByteCount(size - size // 2, size // 2))
    return dataclasses.replace(plan, fetch="device_put", bytes=sizes)


STOP, NAN, FAILS = 6, 7, 8  # a drawn token that stops, one that stands for a NaN, a prompt that cannot be read
WORDS = 50


def next_token(history):
    """The token after a history. It depends on all of it."""
    token = hash(tuple(history)) % WORDS
    return NO_TOKEN if token == NAN else token


def expected(request):
    """The tokens of an answer, and the type of its error."""
    if request.prompt[0] == FAILS:
        return [], errors.HostMemoryError
    tokens = []
    while len(tokens) < request.max_new_tokens and not {STOP, *(request.stop or ())}.intersection(tokens):
        if request.allowed is not None and len(tokens) >= request.allowed.most:
            return tokens, errors.PromptError
        token = next_token([*request.prompt, *tokens])
        if token == NO_TOKEN:
            return tokens, errors.NumericalError
        tokens.append(token)
    return tokens, None


@dataclasses.dataclass(frozen=True)
class Grammar:
    """It lets all words follow, and fails after so many."""

    most: int

    def __call__(self, tokens):
        if len(tokens) >= self.most:
            raise errors.PromptError(f"the grammar must end before {self.most} tokens")
        return np.ones(WORDS, bool)


@dataclasses.dataclass(frozen=True)
class PlainPrefill:
    ids: list
    left: int
    done = property(lambda self: self.left == 0)


def begin(plan, ids):
    if ids[0] == FAILS:
        raise errors.HostMemoryError("host_bytes must be at most 0, got 1")
    return PlainPrefill(ids, len(ids))


def step(pool, tokens, active):
    fed = [[*held, int(token)] if on else held for held, token, on in zip(pool.state, tokens, active, strict=True)]
    logits = np.array([next_token(held) if on else 99 for held, on in zip(fed, active, strict=True)])
    return logits, pool._replace(state=fed)


def insert(pool, slot, state, row):
    return pool._replace(state=[state if place == slot else held for place, held in enumerate(pool.state)])


@dataclasses.dataclass(frozen=True)
class Guesses:
    """The guesses of a step: the tokens of the rows before it, the newest token of each, and how many were proposed."""

    held: list
    tokens: list
    proposed: list


def remembered(drafter, ids, token, read):
    assert read.state == ids
    return [*ids, token], drafter.tokens


def with_memory(drafter, memory, slot, one, rows):
    memory = list(memory or [one] * rows)
    memory[slot] = one
    return memory


def guess(pool, memory, at, plan):
    """Two of three guesses are right, as long as those before them are."""
    tokens, proposed, state = [], [], []
    for held, token, left in zip(pool.state, *at, strict=True):
        row = [int(token)]
        for place in range(plan.width):
            right = left > 0 and hash((place, *held)) % 3
            row.append(next_token([*held, *row]) if right else 0)
        tokens.append(row)
        proposed.append(max(0, min(plan.width, int(left) - 1)))
        state.append([*held, *row[: proposed[-1] + 1]] if left else held)
    return Guesses(pool.state, tokens, np.array(proposed)), pool._replace(state=state), memory


def draw_guessed(pool, guesses, active):
    counts, drawn, state = [], np.zeros(np.shape(guesses.tokens), int), []
    for slot, (held, row, most) in enumerate(zip(guesses.held, guesses.tokens, guesses.proposed, strict=True)):
        counts.append(0)
        while active[slot] and counts[-1] <= most:
            place = counts[-1]
            drawn[slot, place] = next_token([*held, *row[: place + 1]])
            counts[-1] += 1
            if place == most or drawn[slot, place] != row[place + 1]:
                break
        if active[slot]:
            state.append([*held, *row[: counts[-1]]])
            assert state[-1] == pool.state[slot][: len(state[-1])]
        else:
            state.append(held)
    return drawn, np.array(counts), None, pool._replace(state=state)


def heard(drafter, memory, new, state):
    """The drafter remembers what the row holds, and the newest token."""
    memory = list(memory)
    for slot, (tokens, count, takes) in enumerate(zip(*new, strict=True)):
        if takes and count:
            memory[slot] = [*memory[slot], *np.atleast_1d(tokens)[:count].tolist()]
            assert memory[slot][:-1] == state[slot]
    return memory, np.array([drafter.tokens * (len(row) % 4 > 0) for row in memory])


def taken(pool, slot, change, fetch):
    (surplus, unfed), held = change, pool.state[slot]
    assert fetch == "resident"
    return [*held[: len(held) - surplus], *unfed]


DRAFTER = types.SimpleNamespace(tokens=3, cost=0.1, reader=None)
PROGRAMS = types.SimpleNamespace(
    options=EngineOptions(turn_chunk=2),
    parts=types.SimpleNamespace(vocab_size=WORDS),
    begin=begin,
    step=step,
    insert=insert,
    masked=lambda rows, words: rows,
    advance=lambda partial: dataclasses.replace(partial, left=partial.left - 1),
    rest=lambda partial: partial.left,
    finish=lambda partial: (next_token(partial.ids), list(partial.ids)),
    begin_on=lambda plan, base: list(base),
    extend=lambda state, ids: (next_token([*state, *ids]), [*state, *ids]),
    row=lambda settings, ids: "row",
    draw=lambda logits, rows, active=None: (np.atleast_1d(logits), rows),
    pool=lambda state, plan: Pool([None] * plan.row_class.rows, "rows"),
    moved=lambda pool, fetch: pool,
    consumed=lambda pool: False,
    taken=taken,
    begin_draft=lambda plan, ids: None,
    remembered=remembered,
    with_memory=with_memory,
    guess=guess,
    draw_guessed=draw_guessed,
    heard=heard,
    fork=list,
    fed=lambda state, unfed: [*state, *unfed],
)


def plan_rows(programs, job, base):
    """The plan of rows on a document. The prompt half takes a byte for each token."""
    one = min(job.rooms, key=lambda row_class: row_class.room)
    sizes = GroupBytes(ByteCount(5 * one.rows), 1, ByteCount(2), ByteCount(len(base)))
    drafting = job.plan.drafting
    plan = PlannedClass(RowClass(job.read, one.room, one.rows), Full(), None, "resident", sizes, job.document)
    return dataclasses.replace(plan, drafting=drafting)


def done(result):
    future = concurrent.futures.Future()
    future.set_result(result)
    return future


class PlainLibrary:
    """States in the memory tiers of `jshadow.Library`, and in files that can be lost."""

    capacity, fetch = PLANS[1].row_class.capacity, "resident"

    def __init__(self, device, host):
        self.recent = []  # the keys in the order of their last use
        self.files = {}  # the states that have left memory, and those that were stored
        self.lost, self.ever_lost = set(), False  # the keys of files that cannot be read, and whether there was one
        self.reads = []  # the futures of files that are read
        self.tiers = MemoryTiers(TierLimits(device, host), tuple, self.files.__setitem__)

    def longest(self, ids):
        keys = [key for key in self.recent if list(key) == ids[: len(key)]]
        return Stored(max(keys, key=len), len(max(keys, key=len)), 0, "disk") if keys else None

    def prepare(self, key):
        if self.tiers.tier_of(key) is not None:
            return done(None)
        self.reads.append(concurrent.futures.Future())
        return self.reads[-1]

    def prepared(self, key, read):
        held = self.tiers.get(key)
        if held is None and read is None:
            return None  # it has left memory since
        if held is None:
            if key in self.lost:
                self.ever_lost = True
                raise errors.CheckpointError("the file must be there, it is gone")
            self._put(key, list(self.files[key]))
        self._use(key)
        return list(key) if held is None else list(held.state)

    def start_store(self, ids, state, **note):
        assert ids == state
        key = tuple(ids)
        self.files[key] = state
        self.lost.discard(key)
        self._put(key, state)
        self._use(key)
        return done(key)

    def _put(self, key, state):
        half = len(state) // 2
        self.tiers.put(key, state, Size(len(state) - half, half))

    def _use(self, key):
        self.recent = [other for other in self.recent if other != key] + [key]

    def check(self):
        """The tiers are under their limits, by use, and hold the most recent states that fit."""
        tiers, limits = self.tiers, self.tiers.limits
        assert tiers.used(DEVICE) <= limits.device
        assert tiers.used(HOST) <= limits.host
        assert list(tiers.held) == [key for key in self.recent if key in tiers.held]
        sizes = {key: Size(len(key) - len(key) // 2, len(key) // 2) for key in self.recent}
        for key, held in tiers.held.items():
            assert tuple(held.state) == key
            assert held.size == sizes[key]
            assert isinstance(held.state, tuple) == (held.tier == HOST)
        if self.recent and tiers.fitting(sizes[self.recent[-1]]) is not None:
            assert self.recent[-1] in tiers.held
        assert set(self.files) == set(self.recent)


@contextlib.contextmanager
def plain_world():
    """Let a stored state be a list of tokens, on no device. The width of a step depends on its rows alone."""

    def choose(pace, ready, active):
        return int(ready[active].sum()) % (DRAFTER.tokens + 1)

    with (
        mock.patch.multiple(documents, plan_rows=plan_rows, commit=lambda state: state),
        mock.patch.object(drafts, "check_gives"),
        mock.patch.object(drafts.Pace, "choose", choose),
    ):
        yield


PROMPT = st.lists(st.integers(0, 49), min_size=1, max_size=9)
# The new tokens of an answer, whether its first token ends it, and after how many tokens its grammar fails.
TWIN = st.tuples(st.integers(1, 4), st.booleans(), st.none() | st.integers(0, 3))


def stored_beginnings(machine):
    """The keys of stored states that a question can follow."""
    return [key for key in machine.library.recent if len(key) < 9]


class Serving(stateful.RuleBasedStateMachine):
    @stateful.initialize(
        budget=st.integers(50, 100),
        device=st.integers(0, 30),
        host=st.integers(0, 30),
        drafter=st.sampled_from([None, DRAFTER]),
        spills=st.booleans(),
    )
    def begin(self, budget, device, host, drafter, spills):
        self.plain = plain_world()
        self.plain.__enter__()
        drafting = None if drafter is None else Drafting(drafter, None, None)
        plans = (dataclasses.replace(plan, drafting=drafting) for plan in PLANS)
        self.plans = tuple(dataclasses.replace(plan, spilled=spilled_of(plan) if spills else None) for plan in plans)
        self.library = PlainLibrary(device, host)
        limits = Limits(device_bytes=budget, host_bytes=HOST_LIMIT)
        self.loop = Loop(PROGRAMS, Admission(limits), self.library, lambda: None)
        self.answers, self.cancelled = [], []

    def ask(self, prompt, new, rank, store, stop=(), most=None):
        grammar = None if most is None else Grammar(most)
        answer = Answer(Request(prompt, new, priority=rank, store=store, stop=stop, allowed=grammar))
        job = Job(answer, prompt, TextStream(None), frozenset({STOP, *stop}))
        job.plans = fitting(self.plans, len(prompt), new)
        if store:
            library = self.library
            job.plans, job.keep = storable(job.plans, library.capacity, library.fetch), library.start_store
        documents.find_stored(self.library, job, self.plans)
        self.loop.accept(job)
        self.answers.append(answer)

    @stateful.rule(prompt=PROMPT, new=st.integers(1, 6), rank=st.integers(0, 2), store=st.booleans())
    def submit(self, prompt, new, rank, store):
        self.ask(prompt, new, rank, store)

    @stateful.precondition(lambda self: self.answers)
    @stateful.rule(data=st.data(), new=st.integers(1, 6), rank=st.integers(0, 2), store=st.booleans())
    def submit_a_prompt_again(self, data, new, rank, store):
        self.ask(data.draw(st.sampled_from(self.answers)).request.prompt, new, rank, store)

    @stateful.precondition(stored_beginnings)
    @stateful.rule(data=st.data(), new=st.integers(1, 4), store=st.booleans())
    def submit_on_a_stored_beginning(self, data, new, store):
        key = data.draw(st.sampled_from(stored_beginnings(self)))
        more = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=9 - len(key)))
        self.ask([*key, *more], new, 0, store)

    @stateful.precondition(stored_beginnings)
    @stateful.rule(data=st.data(), twins=st.lists(TWIN, min_size=2, max_size=4))
    def submit_twins_on_a_stored_beginning(self, data, twins):
        """The same question again and again. Some answers end with their first token, and some with a grammar."""
        key = data.draw(st.sampled_from(stored_beginnings(self)))
        prompt = [*key, data.draw(st.integers(0, 49))]
        for new, stops, most in twins:
            self.ask(prompt, new, 0, False, (next_token(prompt),) if stops else (), most)

    @stateful.precondition(lambda self: self.library.reads)
    @stateful.rule(data=st.data())
    def read_a_file(self, data):
        self.library.reads.pop(data.draw(st.integers(0, len(self.library.reads) - 1))).set_result("what was read")

    @stateful.precondition(lambda self: self.library.recent)
    @stateful.rule(data=st.data())
    def lose_a_file(self, data):
        self.library.lost.add(data.draw(st.sampled_from(self.library.recent)))

    @stateful.precondition(lambda self: self.answers)
    @stateful.rule(data=st.data())
    def cancel(self, data):
        answer = data.draw(st.sampled_from(self.answers))
        if not answer.done:
            self.cancelled.append(answer)
        self.loop.cancel(answer)

    @stateful.rule(turns=st.integers(1, 4))
    def turn(self, turns):
        for _ in range(turns):
            self.loop.run_once()

    @stateful.invariant()
    def the_bookkeeping_holds(self):
        self.library.check()
        loop = self.loop
        everywhere = [*(job for group in loop.groups for job in group.jobs if job is not None), *loop.waiting]
        assert len({id(job) for job in everywhere}) == len(everywhere)
        assert {id(job.answer) for job in everywhere} == {id(answer) for answer in self.answers if not answer.done}
        reading = [one.job for one in loop.readings]
        assert len(reading) <= 3
        # two of three can have given way for the same seven turns, and then one of them goes on before the other
        assert all(one.passed <= 8 for one in loop.readings)
        assert loop.groups.admission.fits([group.plan for group in loop.groups], [one.plan for one in reading[:-1]])
        for group in loop.groups:
            assert group.active.tolist() == [job is not None and job not in reading for job in group.jobs]
            assert all(job is None or job.plan == group.home for job in group.jobs)
            assert group.plan in (group.home, group.home.spilled)
            assert group.plan is group.home or all(job is None or job.spilled for job in group.jobs)
        for answer in self.answers:
            tokens = [token for _, token, _ in answer._pieces]
            assert tokens == expected(answer.request)[0][: len(tokens)]

    def teardown(self):
        turns = 0
        while self.loop.run_once() or len(self.loop.waiting):
            while self.library.reads:
                self.library.reads.pop().set_result("what was read")
            turns += 1
            assert turns < 10_000
        self.plain.__exit__(None, None, None)
        assert all(group.empty for group in self.loop.groups)
        counts = self.loop.counts
        assert counts.finished + counts.failed + counts.cancelled == len(self.answers)
        assert counts.accepted <= counts.proposed
        assert counts.most_units <= PROGRAMS.options.prompt_parts
        for answer in self.answers:
            tokens, error = expected(answer.request)
            error = errors.RequestCancelled if answer in self.cancelled else error
            if isinstance(answer._error, errors.CheckpointError):
                assert self.library.ever_lost
            elif error is None:
                assert answer.result(0).tokens == tokens
            else:
                assert isinstance(answer._error, error)


@pytest.mark.parametrize("schedules", [60, slow(2000)])
def test_every_job_of_random_schedules_ends(schedules):
    stateful.run_state_machine_as_test(Serving, settings=settings(max_examples=schedules, stateful_step_count=40))


def test_a_job_without_a_place_fails_loudly(caplog):
    loop = Loop(PROGRAMS, Admission(Limits(device_bytes=50)), PlainLibrary(9, 9), lambda: None)
    job = Job(answer := Answer(Request([1], 6)), [1], TextStream(None), frozenset())
    job.plans = fitting(PLANS, 1, 6)
    loop.accept(job)
    loop.run_once()
    loop.groups.clear()
    loop.run_once()
    with pytest.raises(errors.ServingError, match="the engine lost this request"):
        answer.result(0)
    assert "request lost" in caplog.text
    assert loop.counts.failed == 1
