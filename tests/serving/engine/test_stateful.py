"""Slots, groups, the queue, the admission and the tiers of a library, at random, against a plain model of them."""

from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from plain_serving import PLANS, STOP, Grammar, PlainLibrary, PlainPrograms, expected, next_token, plan_rows

from jshadow.engine.text import TextStream
from jshadow.errors import CheckpointError, RequestCancelled, ServingError
from jshadow.serving import documents
from jshadow.serving.admission import Admission, Limits
from jshadow.serving.classes import fitting, storable
from jshadow.serving.jobs import Job
from jshadow.serving.loop import Loop
from jshadow.serving.requests import Answer, Request


def plain_documents():
    """Let a stored state be a list of tokens, which lies on no device."""
    return mock.patch.multiple(documents, plan_rows=plan_rows, commit=lambda state: state)


# The new tokens of an answer, whether its first token ends it, and after how many tokens its grammar fails.
TWIN = st.tuples(st.integers(1, 4), st.booleans(), st.none() | st.integers(0, 3))


class Serving(RuleBasedStateMachine):
    @initialize(budget=st.integers(50, 100), device=st.integers(0, 30), host=st.integers(0, 30))
    def begin(self, budget, device, host):
        self.plain = plain_documents()
        self.plain.__enter__()
        self.library = PlainLibrary(device, host)
        self.loop = Loop(PlainPrograms(), Admission(Limits(device_bytes=budget)), self.library)
        self.answers, self.cancelled = [], []

    def ask(self, prompt, new, rank, store, stop=(), most=None):
        grammar = None if most is None else Grammar(most)
        answer = Answer(Request(prompt, new, priority=rank, store=store, stop=stop, allowed=grammar))
        job = Job(answer, prompt, TextStream(None), frozenset({STOP, *stop}))
        job.plans = fitting(PLANS, len(prompt), new)
        if store:
            library = self.library
            job.plans, job.keep = storable(job.plans, library.capacity, library.fetch), library.start_store
        documents.find_stored(self.library, job, PLANS)
        self.loop.accept(job)
        self.answers.append(answer)

    @rule(
        prompt=st.lists(st.integers(0, 49), min_size=1, max_size=9),
        new=st.integers(1, 6),
        rank=st.integers(0, 2),
        store=st.booleans(),
    )
    def submit(self, prompt, new, rank, store):
        self.ask(prompt, new, rank, store)

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), new=st.integers(1, 6), rank=st.integers(0, 2), store=st.booleans())
    def submit_a_prompt_again(self, data, new, rank, store):
        self.ask(data.draw(st.sampled_from(self.answers)).request.prompt, new, rank, store)

    @precondition(lambda self: any(len(key) < 9 for key in self.library.recent))
    @rule(data=st.data(), new=st.integers(1, 4), store=st.booleans())
    def submit_on_a_stored_beginning(self, data, new, store):
        key = data.draw(st.sampled_from([key for key in self.library.recent if len(key) < 9]))
        more = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=9 - len(key)))
        self.ask([*key, *more], new, 0, store)

    @precondition(lambda self: any(len(key) < 9 for key in self.library.recent))
    @rule(data=st.data(), twins=st.lists(TWIN, min_size=2, max_size=4))
    def submit_twins_on_a_stored_beginning(self, data, twins):
        """The same question again and again. Some answers end with their first token, and some with a grammar."""
        key = data.draw(st.sampled_from([key for key in self.library.recent if len(key) < 9]))
        prompt = [*key, data.draw(st.integers(0, 49))]
        for new, stops, most in twins:
            self.ask(prompt, new, 0, False, (next_token(prompt),) if stops else (), most)

    @precondition(lambda self: self.library.reads)
    @rule(data=st.data())
    def read_a_file(self, data):
        self.library.reads.pop(data.draw(st.integers(0, len(self.library.reads) - 1))).set_result(None)

    @precondition(lambda self: self.library.recent)
    @rule(data=st.data())
    def lose_a_file(self, data):
        self.library.lost.add(data.draw(st.sampled_from(self.library.recent)))

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
        self.library.check()
        loop = self.loop
        jobs = [job for group in loop.groups for job in group.jobs if job is not None]
        everywhere = [*jobs, *loop.waiting]
        assert len({id(job) for job in everywhere}) == len(everywhere)
        assert {id(job.answer) for job in everywhere} == {id(answer) for answer in self.answers if not answer.done}
        reading = [one.job for one in loop.readings]
        assert len(reading) < 2 or reading[0].priority < reading[1].priority
        assert loop.groups.admission.fits([group.plan for group in loop.groups], *[one.plan for one in reading[:-1]])
        for group in loop.groups:
            waiting = [job for job in group.jobs if job is not None and job in reading]
            assert group.active.tolist() == [job is not None and job not in waiting for job in group.jobs]
            for job in group.jobs:
                assert job is None or job.plan == group.plan
        for answer in self.answers:
            tokens = [token for _, token, _ in answer._pieces]
            assert tokens == expected(answer.request)[0][: len(tokens)]

    def teardown(self):
        self.plain.__exit__(None, None, None)
        with plain_documents():
            self.finish()

    def finish(self):
        for future in self.library.reads:
            future.set_result(None)
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
            if isinstance(answer._error, CheckpointError):
                assert self.library.ever_lost
            elif error is None:
                assert answer.result(0).tokens == tokens
            else:
                assert isinstance(answer._error, error)


@pytest.mark.parametrize("schedules", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_job_of_random_schedules_ends(schedules):
    run_state_machine_as_test(Serving, settings=settings(max_examples=schedules, stateful_step_count=40))


def test_a_job_without_a_place_fails_loudly(caplog):
    loop, answer = (
        Loop(PlainPrograms(), Admission(Limits(device_bytes=50)), PlainLibrary(9, 9)),
        Answer(Request([1], 6)),
    )
    job = Job(answer, [1], TextStream(None), frozenset())
    job.plans = fitting(PLANS, 1, 6)
    loop.accept(job)
    loop.run_once()
    loop.groups.clear()
    loop.run_once()
    with pytest.raises(ServingError, match="the engine lost this request"):
        answer.result(0)
    assert "request lost" in caplog.text
    assert loop.counts.failed == 1
