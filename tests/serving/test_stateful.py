"""Slots, groups, the queue and the admission, at random, against a plain model. Programs of plain Python stand in."""

import dataclasses

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jshadow.engine.sampling import NO_TOKEN
from jshadow.engine.text import TextStream
from jshadow.errors import HostMemoryError, NumericalError, RequestCancelled
from jshadow.policies import Full
from jshadow.serving.admission import Admission, Limits, needed_bytes
from jshadow.serving.classes import GroupBytes, PlannedClass, RowClass, fitting
from jshadow.serving.jobs import Job
from jshadow.serving.loop import Loop
from jshadow.serving.requests import Answer, Request

PLANS = tuple(
    PlannedClass(RowClass(prompt, room, rows), Full(), None, "resident", GroupBytes(size, 0, 1, 2))
    for prompt, room, rows, size in ((4, 3, 2, 10), (9, 6, 3, 25))
)
STOP, NAN, FAILS = 6, 7, 8  # a drawn token that stops, one that stands for a NaN, a prompt that cannot be read


def next_token(history):
    """The token after a history. It depends on all of it."""
    token = hash(tuple(history)) % 50
    return NO_TOKEN if token == NAN else token


def expected(request):
    """The tokens of an answer, and the type of its error."""
    if request.prompt[0] == FAILS:
        return [], HostMemoryError
    tokens = []
    while len(tokens) < request.max_new_tokens:
        token = next_token([*request.prompt, *tokens])
        if token == NO_TOKEN:
            return tokens, NumericalError
        tokens.append(token)
        if token == STOP:
            break
    return tokens, None


class PlainPrograms:
    """The programs of an engine, with a list of tokens as the state of a row."""

    def begin(self, plan, ids):
        if ids[0] == FAILS:
            raise HostMemoryError("host_bytes must be at most 0, got 1")
        return PlainPrefill(ids, len(ids))

    def advance(self, partial):
        return dataclasses.replace(partial, left=partial.left - 1)

    def finish(self, partial):
        return next_token(partial.ids), list(partial.ids)

    def row(self, settings, ids):
        return "row"

    def first(self, logits, row):
        return logits, row

    def pool(self, state, plan):
        return [None] * plan.row_class.rows

    def insert(self, pool, slot, state, row):
        return [state if place == slot else held for place, held in enumerate(pool)]

    def step(self, pool, tokens, active):
        fed = [[*held, int(token)] if on else held for held, token, on in zip(pool, tokens, active, strict=True)]
        return np.array([next_token(held) if on else 99 for held, on in zip(fed, active, strict=True)]), fed


@dataclasses.dataclass(frozen=True)
class PlainPrefill:
    ids: list
    left: int

    @property
    def done(self):
        return self.left == 0


class Serving(RuleBasedStateMachine):
    @initialize(budget=st.integers(28, 80))
    def begin(self, budget):
        self.loop = Loop(PlainPrograms(), PLANS, Admission(Limits(device_bytes=budget)), None)
        self.answers, self.cancelled = [], []

    @rule(prompt=st.lists(st.integers(0, 49), min_size=1, max_size=9), new=st.integers(1, 6), rank=st.integers(0, 2))
    def submit(self, prompt, new, rank):
        answer = Answer(Request(prompt, new, priority=rank))
        job = Job(answer, prompt, TextStream(None), frozenset({STOP}))
        job.plans = fitting(PLANS, len(prompt), new)
        self.loop.accept(job)
        self.answers.append(answer)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def cancel(self, data):
        answer = data.draw(st.sampled_from(self.answers))
        if not answer.done:
            self.cancelled.append(answer)
        self.loop.cancel(answer)

    @rule(turns=st.integers(1, 4))
    def turn(self, turns):
        for _ in range(turns):
            self.loop.run_once()

    @invariant()
    def the_bookkeeping_holds(self):
        loop = self.loop
        jobs = [job for group in loop.groups for job in group.jobs if job is not None]
        everywhere = [*jobs, *loop.waiting]
        assert len({id(job) for job in everywhere}) == len(everywhere)
        assert {id(job.answer) for job in everywhere} == {id(answer) for answer in self.answers if not answer.done}
        assert needed_bytes([group.plan for group in loop.groups])[0] <= loop.admission.limits.device_bytes
        reading = [] if loop.reading is None else [loop.reading.job]
        for group in loop.groups:
            waiting = [job for job in group.jobs if job is not None and job in reading]
            assert group.active.tolist() == [job is not None and job not in waiting for job in group.jobs]
            for job in group.jobs:
                assert job is None or job.plan is group.plan
        for answer in self.answers:
            tokens = [token for _, token in answer._pieces]
            assert tokens == expected(answer.request)[0][: len(tokens)]

    def teardown(self):
        turns = 0
        while self.loop.run_once() or len(self.loop.waiting):
            turns += 1
            assert turns < 10_000
        assert all(group.empty for group in self.loop.groups)
        counts = self.loop.counts
        assert counts.finished + counts.failed + counts.cancelled == len(self.answers)
        assert counts.most_units <= 1
        for answer in self.answers:
            tokens, error = expected(answer.request)
            error = RequestCancelled if answer in self.cancelled else error
            if error is None:
                assert answer.result(0).tokens == tokens
            else:
                assert isinstance(answer._error, error)


Serving.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestServing = Serving.TestCase
