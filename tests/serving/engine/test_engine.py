"""The engine against `generate`: the same tokens in every slot and group, and each failure stays in its request.

Also answers while they arrive: pieces of text, and the threads that read them.
"""

import dataclasses
import itertools
import threading
import types

import numpy as np
import pytest
from serving_cases import (
    END,
    PLAIN,
    SYNC,
    THREADED,
    WARM,
    answers_of,
    engine_of,
    offline,
    poison,
    prompt_of,
    random_requests,
    run,
)

from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.errors import (
    CapacityError,
    ConfigError,
    HostMemoryError,
    NumericalError,
    PromptError,
    QueueFull,
    RequestCancelled,
    ServingError,
)
from jshadow.serving import Limits, Request, RowClass
from jshadow.serving.admission import needed_bytes
from jshadow.serving.groups import Group
from jshadow.serving.waiting import WaitingQueue

UNEQUAL = [(100, 9), (3, 8), (65, 16), (32, 1), (112, 5), (90, 12)]


@pytest.fixture
def engine():
    return engine_of()


def test_the_short_class_is_dense_and_the_long_one_is_not(engine):
    assert [plan.fallback is None for plan in engine.plans] == [False, True]


def test_short_prompts_are_read_in_larger_parts(engine):
    """Two layers of 32 tokens are four units, which are one part if the part has tokens enough."""
    for chunk, turns in ((128, 1), (64, 2), (32, 3)):
        larger = engine_of(options=dataclasses.replace(SYNC, prefill_chunk=chunk))
        answers_of(larger, [Request(prompt_of(9), 2)])
        assert larger.report().counts.units == turns
    answers_of(engine, [Request(prompt_of(80), 2)])  # two layers of three pieces with 32 tokens
    assert 4 <= engine.report().counts.units <= 6  # a part may end late by one unit


@pytest.mark.parametrize("count", [6, pytest.param(24, marks=pytest.mark.slow)])
def test_unequal_requests_are_answered_as_generate_does(engine, count):
    greedy = [dataclasses.replace(one, settings=RowSettings()) for one in random_requests(count - 6, seed=4)]
    requests = [Request(prompt_of(length), new) for length, new in UNEQUAL] + greedy
    for request, got in zip(requests, answers_of(engine, requests), strict=True):
        want = offline(request)
        assert (got.tokens, got.text) == (want.tokens, want.text)
        finish = "stop" if want.tokens[-1] == END else "length"
        assert (got.report.prompt_tokens, got.report.finish) == (len(request.prompt), finish)
    assert engine.report().counts.most_units == 1


def test_a_seed_draws_the_same_tokens_in_every_slot_and_group(engine):
    seeded = Request(prompt_of(70), 17, WARM)
    others = [Request(prompt_of(80, seed), 13 + seed) for seed in range(3)]
    requests = [seeded, others[0], seeded, seeded, others[1], seeded, others[2], seeded]
    want = offline(seeded).tokens
    results = answers_of(engine, requests)
    assert all(got.tokens == want for request, got in zip(requests, results, strict=True) if request is seeded)
    assert engine.report().groups >= 2


def test_released_rows_are_never_read(engine, monkeypatch):
    """All free rows are filled with NaN, whenever one is freed."""
    release = Group.release

    def release_and_poison(group, slot):
        release(group, slot)
        for free in np.flatnonzero([job is None for job in group.jobs]):
            poison(group, free)

    monkeypatch.setattr(Group, "release", release_and_poison)
    requests = random_requests(24, seed=1)
    poisoned = answers_of(engine, requests)
    monkeypatch.undo()
    assert [got.tokens for got in poisoned] == [want.tokens for want in answers_of(engine_of(), requests)]


def test_a_nan_fails_its_own_row_alone(engine):
    requests = [Request(prompt_of(length), 16) for length in (90, 91, 92, 93)]
    answers = [engine.submit(request) for request in requests]
    while not all(map(list.__len__, (answer._pieces for answer in answers))):
        engine.run_once()
    group = next(group for group in engine._loop.groups if group.active.all())
    poison(group, group.jobs.index(next(job for job in group.jobs if job.answer is answers[1])))
    run(engine)
    with pytest.raises(NumericalError, match=r"NaN in those that follow the prompt and [1-9]"):
        answers[1].result(0)
    for place in (0, 2, 3):
        assert answers[place].result(0).tokens == offline(requests[place]).tokens
    assert engine.report().rows_in_use == 0


def test_cancelled_requests_free_their_row_their_prefill_or_their_place(engine):
    requests = [Request(prompt_of(100, seed), 17) for seed in range(3)]
    active, reading, waiting = [engine.submit(request) for request in requests]
    while not active._pieces:
        engine.run_once()
    engine.run_once()
    assert engine._loop.readings[0].job.answer is reading
    for answer in (active, reading, waiting):
        engine.cancel(answer)
    run(engine)
    for answer in (active, reading, waiting):
        with pytest.raises(RequestCancelled, match="cancelled"):
            answer.result(0)
    report = engine.report()
    assert (report.rows_in_use, report.waiting, report.reading) == (0, 0, False)
    engine.cancel(active)  # nothing happens
    assert answers_of(engine, requests[:1])[0].tokens == offline(requests[0]).tokens


def test_a_request_that_waits_is_overtaken_for_a_short_time_only():
    queue = WaitingQueue()
    arrived = {"upload": (0.0, -1), "soon": (9.0, 0), "late": (11.0, 0), "urgent": (15.0, 1), "same": (0.0, -1)}
    for name, (seconds, priority) in arrived.items():
        queue.push(types.SimpleNamespace(name=name, arrived=seconds, priority=priority))
    assert [item.name for item in queue] == ["urgent", "soon", "upload", "same", "late"]


def test_requests_come_by_priority_and_then_by_arrival(engine):
    plan = engine.plans[1]
    one_group = engine_of(limits=Limits(device_bytes=needed_bytes([plan])[0]))
    order, kept = [], [one_group.submit(Request(prompt_of(100, seed), 20)) for seed in range(4)]
    requests = [Request(prompt_of(70, place), 2, priority=priority) for place, priority in enumerate((0, 1, 0, 2, 1))]
    answers = [one_group.submit(request) for request in requests]
    while one_group.run_once():
        order += [place for place, answer in enumerate(answers) if answer.done and place not in order]
    assert order == [3, 1, 4, 0, 2]
    assert all(answer.result(0).report.generated_tokens == 20 for answer in kept)


def test_a_higher_priority_interrupts_a_reading_if_the_bytes_suffice(engine):
    long, short = Request(prompt_of(100), 5, WARM, priority=-1), Request(prompt_of(90, 2), 5)
    plan = engine.plans[1]
    both = needed_bytes([plan])[0] + plan.bytes.reading
    for limit, first in ((both, short), (both - 1, long)):
        tight = engine_of(limits=Limits(device_bytes=limit))
        answers = [tight.submit(long)]
        for _ in range(2):
            tight.run_once()
        answers.append(tight.submit(short))
        while not any(answer.done for answer in answers):
            tight.run_once()
        [done] = [answer for answer in answers if answer.done]
        assert done.request is first
        run(tight)
        assert [answer.result(0).tokens for answer in answers] == [offline(answer.request).tokens for answer in answers]


def test_a_part_is_read_between_two_interruptions(engine):
    engine.submit(Request(prompt_of(100), 1, priority=-1))
    engine.run_once()
    for seed in range(3):
        engine.submit(Request(prompt_of(90, seed), 1))
    read = []
    while engine.run_once():
        read += [one.job.request.priority for one in engine._loop.readings[-1:]]
    assert [priority for priority, _ in itertools.groupby(read)] == [0, -1, 0, -1, 0, -1]


def test_a_request_that_waits_for_bytes_is_not_overtaken(engine):
    """The groups of the long class take all bytes. A short request waits for one of them to be empty."""
    long, short = engine.plans[1], engine.plans[0]
    small = engine_of(limits=Limits(device_bytes=needed_bytes([long])[0]))
    first = small.submit(Request(prompt_of(100), 4))
    while not first._pieces:
        small.run_once()
    waits, later = small.submit(Request(prompt_of(5), 8)), small.submit(Request(prompt_of(100, 1), 4))
    while not waits.done:
        assert not later._pieces
        small.run_once()
        assert small.report().device_bytes <= long.bytes.device + short.bytes.device
    assert first.done
    run(small)
    assert later.result(0).tokens == offline(later.request).tokens


def test_requests_that_can_never_fit_are_refused(engine):
    for prompt, new in ((321, 1), (3, 65)):
        with pytest.raises(CapacityError, match=rf"prompt=320 \+ room=64\), got {prompt} \+ {new} tokens"):
            engine.submit(Request(prompt_of(prompt), new))
    small = engine_of(limits=Limits(device_bytes=1000))
    with pytest.raises(CapacityError, match=r"device_bytes=1000 .*, got \d+ and 0 bytes"):
        small.submit(Request(prompt_of(100), 1))
    full = engine_of(limits=Limits(waiting=2))
    for _ in range(2):
        full.submit(Request([5], 1))
    with pytest.raises(QueueFull, match=r"limits\.waiting=2"):
        full.submit(Request([5], 1))
    run(full)
    for refused, kind in ((3 * [Request([5], 1)], ConfigError), ([Request([5], 1), Request([], 1)], PromptError)):
        with pytest.raises(kind):
            full.submit_all(refused)
        assert full.report().waiting == 0
        assert not full.run_once()


def test_bad_arguments_are_refused(engine):
    with pytest.raises(PromptError, match="vocab_size=257"):
        engine.submit(Request([300], 1))
    with pytest.raises(ConfigError, match="store must be False"):
        engine.submit(Request([3], 1, store=True))
    for field, value in (("max_new_tokens", 0), ("priority", True), ("settings", Sampler()), ("store", 1)):
        with pytest.raises(ConfigError, match=field):
            Request([3], **{field: value})
    with pytest.raises(ConfigError, match="classes"):
        engine_of(classes=())
    with pytest.raises(ConfigError, match=r"row_class\.room"):
        RowClass(3, 0)
    with pytest.raises(CapacityError, match="context=512"):
        engine_of(classes=(RowClass(500, 13),))
    with pytest.raises(ConfigError, match=r"limits\.waiting"):
        Limits(waiting=0)
    with pytest.raises(ConfigError, match="batch without penalties"):
        engine_of(options=PLAIN).submit(Request([3], 1, RowSettings(presence_penalty=1.0)))
    biased = engine_of(options=dataclasses.replace(SYNC, bias_limit=1))
    for bias, error, match in (({3: 1, 4: 1}, ConfigError, "bias_limit=1"), ({257: 1}, PromptError, "vocab_size=257")):
        with pytest.raises(error, match=match):
            biased.submit(Request([3], 1, RowSettings(logit_bias=bias)))


def test_an_error_of_one_request_does_not_stop_the_others(engine, monkeypatch):
    programs, begin = engine._loop.programs, engine._loop.programs.begin

    def begin_or_fail(plan, ids):
        if ids[0] == 99:
            raise HostMemoryError("host_bytes must be at most 1, got 2")
        return begin(plan, ids)

    monkeypatch.setattr(programs, "begin", begin_or_fail)
    bad, good = engine.submit(Request([99, 3], 2)), engine.submit(Request([98, 3], 2))
    run(engine)
    with pytest.raises(HostMemoryError):
        bad.result(0)
    assert good.result(0).tokens == offline(good.request).tokens
    assert engine.report().rows_in_use == 0


def test_a_failure_of_the_loop_ends_all_answers():
    broken = engine_of()

    def fail(*_):
        raise RuntimeError("INTERNAL: the device is lost")

    broken._loop.programs.step = fail
    answers = [broken.submit(Request(prompt_of(5, seed), 4)) for seed in range(3)]
    run(broken)
    for answer in answers:
        with pytest.raises(ServingError, match="the device is lost"):
            answer.result(0)
    assert "the device is lost" in str(broken.failure)
    with pytest.raises(ServingError, match="the device is lost"):
        broken.submit(Request([3], 1))


def test_an_engine_closed_at_once_ends_its_answers():
    closed = engine_of(options=THREADED)
    answers = [closed.submit(Request(prompt_of(100, seed), 16)) for seed in range(4)]
    closed.close(drain=False)
    with pytest.raises(ServingError, match="closed before the answer"):
        answers[3].result(0)


# Answers while they arrive


def test_stop_strings_and_pieces_of_text():
    engine = engine_of()
    free = offline(Request(prompt_of(70, 4), 16, WARM))
    stop = free.text[3:5]
    request = Request(prompt_of(70, 4), 16, WARM, stop=stop)
    answer, heard = engine.submit(request), []
    answer.listen(lambda: heard.append((len(answer.since(0)[0]), answer.complete)))
    busy = engine.report().counts.busy_seconds
    run(engine)
    got, want = answer.result(0), offline(request)
    assert (got.tokens, got.text) == (want.tokens, want.text)
    count = got.report.generated_tokens
    assert heard == [(place, False) for place in range(1, count + 1)] + [(count, True)]
    assert answer.since(count - 1) == (list(answer)[-1:], True)
    assert engine.report().counts.busy_seconds > busy
    assert engine.failure is None
    assert got.report.finish == "stop"
    assert "".join(piece.text for piece in answer) == got.text == free.text[: free.text.index(stop)]
    end = Request(prompt_of(70, 4), 16, WARM, stop=free.tokens[2])
    assert answers_of(engine, [end])[0].tokens == offline(end).tokens


def test_threads_submit_and_read_at_once():
    """The engine runs in its own thread; four others submit, stream and cancel."""
    requests, got = random_requests(12, seed=2), {}
    with engine_of(options=THREADED) as threaded:

        def client(part):
            for place in part:
                answer = threaded.submit(requests[place])
                pieces = [piece.token for piece in answer]
                got[place] = answer.result(60).tokens
                assert pieces == got[place]

        clients = [threading.Thread(target=client, args=(range(start, 12, 4),)) for start in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        late = [threaded.submit(Request(prompt_of(100, seed), 16)) for seed in range(2)]
        with pytest.raises(TimeoutError):
            late[1].result(0)
    assert all(len(answer.result(0).tokens) == 16 for answer in late)  # they were drained
    engine = engine_of()
    assert got == {place: answers_of(engine, [request])[0].tokens for place, request in enumerate(requests)}
    with pytest.raises(ServingError, match="closed"):
        threaded.submit(Request([3], 1))
    with pytest.raises(ConfigError, match=r"options\.threaded"):
        threaded.run_once()


def test_requests_with_one_prompt_read_it_once():
    engine, prompt = engine_of(), prompt_of(70, 4)
    settings = [RowSettings(WARM.sampler, seed) for seed in range(5)]
    requests = [Request(prompt, new, one) for new, one in zip((25, 19, 1, 25, 18), settings, strict=True)]
    longer, other = Request(prompt, 28, settings[1]), Request(prompt_of(70, 5), 5)
    parts = engine.report().counts.units
    answers = [engine.submit(request) for request in (*requests, longer, other)]
    run(engine)
    assert [answer.result(0).tokens for answer in answers] == [offline(answer.request).tokens for answer in answers]
    # Four rows are enough for five answers: that of one token is complete at once. The longer one reads for itself.
    assert engine.report().counts.units - parts == 3 * units_of(engine, prompt)


def units_of(engine, prompt):
    """The number of turns that the reading of a prompt takes."""
    before = engine.report().counts.units
    engine.submit(Request(prompt, 1))
    run(engine)
    return engine.report().counts.units - before
