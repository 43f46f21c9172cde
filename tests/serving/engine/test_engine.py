"""The engine against `generate` and single steps: the same tokens in every slot and group. Each failure is alone."""

import dataclasses
import itertools
import threading
import types

import jax
import numpy as np
import pytest
from serving_cases import (
    CLASSES,
    OPTIONS,
    PARAMS,
    WARM,
    answers_of,
    engine_of,
    offline,
    prompt_of,
    random_requests,
    run,
)

import jshadow
from jshadow import errors
from jshadow.engine.decode import decode_step, prefill
from jshadow.engine.rows import RowSettings, draw, pack_mask, row_of
from jshadow.engine.sampling import Sampler
from jshadow.errors import CapacityError, ConfigError, PromptError, ServingError
from jshadow.policies import Full, Loki
from jshadow.serving import Limits, Request, RowClass
from jshadow.serving.admission import needed_bytes
from jshadow.serving.jobs import WaitingQueue

VOCABULARY = PARAMS.config.vocab_size
UNEQUAL = [(100, 9), (3, 8), (65, 16), (32, 1), (112, 5), (90, 12)]
ONE = Request([3], 1)


@pytest.fixture
def engine():
    return engine_of()


def test_short_prompts_are_read_in_larger_parts(engine):
    """Two layers of 32 tokens are four units, which are one part if the part has tokens enough."""
    for chunk, turns in ((128, 1), (64, 2), (32, 3)):
        larger = engine_of(prefill_chunk=chunk)
        answers_of(larger, [Request(prompt_of(9), 2)])
        assert larger.report().counts.units == turns
    answers_of(engine, [Request(prompt_of(80), 2)])  # two layers of three pieces with 32 tokens
    assert 4 <= engine.report().counts.units <= 6  # a part may end late by one unit


def test_unequal_requests_are_answered_as_generate_does(engine):
    assert [plan.fallback is None for plan in engine.plans] == [False, True]  # the short class is dense
    requests = [Request(prompt_of(length), new) for length, new in UNEQUAL]
    for request, got in zip(requests, answers_of(engine, requests), strict=True):
        want = offline(request)
        assert (got.tokens, got.text) == (want.tokens, want.text)
        finish = "stop" if want.tokens[-1] in PARAMS.config.eos_ids else "length"
        assert (got.report.prompt_tokens, got.report.finish) == (len(request.prompt), finish)
    assert engine.report().counts.most_units == OPTIONS.prompt_parts


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_are_stepped_after_so_many_parts_of_prompts(parts):
    engine = engine_of(prompt_parts=parts)
    running = engine.submit(Request(prompt_of(3), 16))
    run(engine, running, 1)
    long = engine.submit(Request(prompt_of(320), 1))
    while not long.done:
        pieces, units = len(running._pieces), engine.report().counts.units
        while len(running._pieces) == pieces and not long.done:
            engine.run_once()
        assert engine.report().counts.units - units <= parts
    assert engine.report().counts.most_units == parts
    run(engine)
    assert running.result(0).tokens == offline(running.request).tokens


def test_a_seed_draws_the_same_tokens_in_every_slot_and_group(engine):
    seeded = Request(prompt_of(70), 17, WARM)
    others = [Request(prompt_of(80, seed), 13 + seed) for seed in range(3)]
    requests = [seeded, others[0], seeded, seeded, others[1], seeded, others[2], seeded]
    want = offline(seeded).tokens
    results = answers_of(engine, requests)
    assert all(got.tokens == want for request, got in zip(requests, results, strict=True) if request is seeded)
    assert engine.report().groups >= 2


def test_released_rows_are_never_read_and_a_nan_fails_its_own_row_alone(engine, poison_row_of):
    requests = random_requests(24, seed=1)
    bad, *answers = [engine.submit(request) for request in (Request(prompt_of(90), 16), *requests)]
    run(engine, bad, 2)
    poison_row_of(engine, bad)
    run(engine)
    with pytest.raises(errors.NumericalError, match=r"NaN in those that follow the prompt and [1-9]"):
        bad.result(0)
    assert engine.report().rows_in_use == 0
    clean = engine_of()  # its rows are not poisoned
    for request, answer in zip(requests, answers, strict=True):
        [alone] = answers_of(clean, [request])
        assert answer.result(0).tokens == alone.tokens


# The order of requests


def waiting(name, arrived, priority=0, client=""):
    return types.SimpleNamespace(name=name, arrived=arrived, priority=priority, client=client)


def names(queue):
    return " ".join(item.name for item in queue)


def test_a_request_that_waits_is_overtaken_for_a_short_time_only():
    queue = WaitingQueue()
    for item in (("upload", 0.0, -1), ("soon", 9.0), ("late", 11.0), ("urgent", 15.0, 1), ("same", 0.0, -1)):
        queue.push(waiting(*item))
    assert names(queue) == "urgent soon upload same late"


def test_many_requests_of_one_client_or_of_one_body_delay_another_by_few():
    queue = WaitingQueue()
    for place in range(5):
        queue.push(waiting(f"a{place}", 0.0, client="a"), place)
    queue.push(waiting("a-", 5.0, client="a"))  # another body
    for place in range(2):
        queue.push(waiting(f"b{place}", 6.0, client="b"))
    queue.push(late := waiting("c0", 7.0, client="c"))
    assert names(queue) == "a0 b0 c0 a- b1 a1 a2 a3 a4"
    assert (len(queue), queue.count("a"), queue.count("d")) == (9, 6, 0)
    taken = []
    while len(queue):
        queue.take(first := next(iter(queue)))
        taken.append(first.name)
        if first.name == "a-":  # clients that had no turn yet come first, and none is before one that holds its turn
            queue.push(waiting("d0", 8.0, client="d"))
            queue.push(waiting("c1", 9.0, client="c"))
            queue.hold(next(item for item in queue if item.name == "b1"))
    assert " ".join(taken) == "a0 b0 c0 a- b1 d0 c1 a1 a2 a3 a4"
    assert not queue.remove(late)
    assert queue.count("a") == 0


def test_a_higher_priority_interrupts_a_reading_if_the_bytes_suffice(engine):
    long, short = Request(prompt_of(100), 5, WARM, priority=-1), Request(prompt_of(90, 2), 5)
    both = needed_bytes([engine.plans[1]]).device + engine.plans[1].bytes.reading.device
    for limit, first in ((both, short), (both - 1, long)):
        tight = engine_of(limits=Limits(device_bytes=limit))
        answers = [tight.submit(long)]
        for _ in range(2):
            tight.run_once()
        answers.append(tight.submit(short))
        while not any(answer.done for answer in answers):
            tight.run_once()
        assert [answer.request for answer in answers if answer.done] == [first]
        run(tight)
        assert [answer.result(0).tokens for answer in answers] == [offline(answer.request).tokens for answer in answers]


def test_a_long_prompt_goes_on_between_those_of_a_higher_priority(engine, monkeypatch):
    """It gives way for seven turns, and then a part of it is read."""
    loop, read = engine._loop, []
    choose = loop._next_reading
    monkeypatch.setattr(loop, "_next_reading", lambda: (read.append(reading := choose()), reading)[1])
    answers = [engine.submit(Request(prompt_of(100), 1, priority=-1))]
    engine.run_once()
    answers += [engine.submit(Request(prompt_of(90, seed), 1)) for seed in range(4)]
    while not all(answer.done for answer in answers[1:]):
        engine.run_once()
    turns = [(rank, len(list(some))) for rank, some in itertools.groupby(read, lambda one: one.job.priority)]
    assert turns[:5] == [(-1, 1), (0, 7), (-1, 1), (0, 7), (-1, 1)]
    run(engine)
    assert answers[0].result(0).tokens == offline(answers[0].request).tokens


def test_a_short_prompt_is_read_before_what_is_left_of_long_ones(engine):
    """It gives the tokens that it gives alone. One of half the length or more waits."""
    prompts = [prompt_of(300), prompt_of(310, 1), prompt_of(200, 2), prompt_of(40, 3), prompt_of(10, 4)]
    answers = [engine.submit(Request(ids, 2)) for ids in prompts]
    ended = []
    while engine.run_once():
        ended += [answer for answer in answers if answer.done and answer not in ended]
    assert [len(answer.request.prompt) for answer in ended][:2] in ([10, 40], [40, 10])
    for answer in answers:
        assert answer.result(0).tokens == offline(answer.request).tokens


def test_a_request_that_waits_for_bytes_is_not_overtaken(engine):
    """The groups of the long class take all bytes. A short request waits for one of them to be empty."""
    short, long = engine.plans
    small = engine_of(limits=Limits(device_bytes=needed_bytes([long])[0]))
    first = small.submit(Request(prompt_of(100), 4))
    run(small, first)
    waits, later = small.submit(Request(prompt_of(5), 8)), small.submit(Request(prompt_of(100, 1), 4))
    while not waits.done:
        assert not later._pieces
        small.run_once()
        assert small.report().device_bytes <= long.bytes.rows.device + short.bytes.rows.device
    assert first.done
    run(small)
    assert later.result(0).tokens == offline(later.request).tokens


# Refusals and failures


def even_then_odd(tokens):
    """Tokens of even and of odd ids in turn."""
    return np.arange(VOCABULARY) % 2 == len(tokens) % 2


def submit(request, **settings):
    return lambda: engine_of(**settings).submit(request)


def biased(bias):
    return submit(Request([3], 1, RowSettings(logit_bias=bias)), bias_limit=1)


SMALL, PENALTY = Limits(device_bytes=1000), RowSettings(presence_penalty=1.0)
REFUSED = [
    (submit(Request(prompt_of(321), 1)), CapacityError, r"prompt=320 \+ room=64\), got 321 \+ 1 tokens"),
    (submit(Request(prompt_of(3), 65)), CapacityError, r"prompt=320 \+ room=64\), got 3 \+ 65 tokens"),
    (submit(Request(prompt_of(100), 1), limits=SMALL), CapacityError, r"device_bytes=1000 .*, got \d+ and 0 bytes"),
    (submit(Request([300], 1)), PromptError, "vocab_size=257"),
    (submit(Request([3], 1, store=True)), ConfigError, "store must be False"),
    (submit(Request([3], 1, PENALTY), penalties=False), ConfigError, "batch without penalties"),
    (biased({3: 1, 4: 1}), ConfigError, "bias_limit=1"),
    (biased({257: 1}), PromptError, "vocab_size=257"),
    (submit(Request([3], 1, allowed=even_then_odd), grammar=False), ConfigError, r"options\.grammar"),
    (submit(Request([3], 1, logprobs=0), logprobs=False), ConfigError, r"options\.logprobs"),
    (lambda: Request([3], 0), ConfigError, "max_new_tokens"),
    (lambda: Request([3], priority=True), ConfigError, "priority"),
    (lambda: Request([3], settings=Sampler()), ConfigError, "settings"),
    (lambda: Request([3], store=1), ConfigError, "store"),
    (lambda: Request([3], title="Harbor"), ConfigError, "title must be None without store"),
    (lambda: Request([3], allowed=[True]), ConfigError, "allowed must be a function"),
    *(
        (lambda count=count: Request([3], logprobs=count), ConfigError, "logprobs must be")
        for count in (-1, 21, True, 2.0)
    ),
    (lambda: engine_of(classes=()), ConfigError, "classes"),
    (lambda: RowClass(3, 0), ConfigError, r"row_class\.room"),
    (lambda: engine_of(classes=(RowClass(500, 13),)), CapacityError, "context=512"),
    (lambda: Limits(waiting=0), ConfigError, r"limits\.waiting"),
    (lambda: Limits(rows=0), ConfigError, r"limits\.rows"),
    (lambda: engine_of(policy=Full(), fitted={"x": 1}), ConfigError, "fitted"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED, ids=[match for *_, match in REFUSED])
def test_what_cannot_be_answered_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_full_queue_and_requests_of_which_one_is_bad_are_refused_as_a_whole():
    full = engine_of(limits=Limits(waiting=2))
    for _ in range(2):
        full.submit(ONE)
    with pytest.raises(errors.QueueFull, match=r"limits\.waiting=2"):
        full.submit(ONE)
    run(full)
    for refused, kind in (([ONE, ONE, ONE], ConfigError), ([ONE, Request([], 1)], PromptError)):
        with pytest.raises(kind):
            full.submit_all(refused)
        assert full.report().waiting == 0
        assert not full.run_once()


def test_a_failure_of_the_loop_ends_all_answers(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("INTERNAL: the device is lost")

    monkeypatch.setattr(engine._loop.programs, "step", fail)
    answers = [engine.submit(Request(prompt_of(5, seed), 4)) for seed in range(3)]
    run(engine)
    for call in (*(lambda answer=answer: answer.result(0) for answer in answers), lambda: engine.submit(ONE)):
        with pytest.raises(ServingError, match="the device is lost"):
            call()
    assert "the device is lost" in str(engine.failure)


def test_an_engine_closed_at_once_ends_its_answers():
    closed = engine_of(threaded=True)
    answers = [closed.submit(Request(prompt_of(100, seed), 16)) for seed in range(4)]
    closed.close(drain=False)
    with pytest.raises(ServingError, match="closed before the answer"):
        answers[3].result(0)


# Answers while they arrive


def test_stop_strings_and_pieces_of_text(engine):
    free = offline(Request(prompt_of(70, 4), 16, WARM))
    stop = free.text[3:5]
    request = Request(prompt_of(70, 4), 16, WARM, stop=stop)
    answer, heard = engine.submit(request), []
    answer.listen(lambda: heard.append((len(answer.since(0)[0]), answer.complete)))
    busy = engine.report().counts.busy_seconds
    run(engine)
    got, want = answer.result(0), offline(request)
    assert (got.tokens, got.text, got.report.finish) == (want.tokens, want.text, "stop")
    count = got.report.generated_tokens
    assert heard == [(place, False) for place in range(1, count + 1)] + [(count, True)]
    assert answer.since(count - 1) == (list(answer)[-1:], True)
    assert engine.report().counts.busy_seconds > busy
    assert engine.failure is None
    assert "".join(piece.text for piece in answer) == got.text == free.text[: free.text.index(stop)]
    end = Request(prompt_of(70, 4), 16, WARM, stop=free.tokens[2])
    assert answers_of(engine, [end])[0].tokens == offline(end).tokens


def test_threads_submit_and_read_at_once(engine):
    """The engine runs in its own thread. Four others submit and stream."""
    requests, got = random_requests(12, seed=2), {}
    with engine_of(threaded=True) as threaded:

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
    assert got == {place: answers_of(engine, [request])[0].tokens for place, request in enumerate(requests)}
    with pytest.raises(ServingError, match="closed"):
        threaded.submit(ONE)
    with pytest.raises(ConfigError, match=r"options\.threaded"):
        threaded.run_once()


def test_requests_with_one_prompt_read_it_once(engine):
    prompt = prompt_of(70, 4)
    settings = [RowSettings(WARM.sampler, seed) for seed in range(5)]
    requests = [Request(prompt, new, one) for new, one in zip((25, 19, 1, 25, 18), settings, strict=True)]
    requests += [Request(prompt, 28, settings[1]), Request(prompt_of(70, 5), 5)]
    got = answers_of(engine, requests)
    assert [one.tokens for one in got] == [offline(request).tokens for request in requests]
    units = engine.report().counts.units
    answers_of(engine, [Request(prompt, 1)])
    # Four rows are enough for five answers: that of one token is complete at once. The longer one reads for itself.
    assert units == 3 * (engine.report().counts.units - units)


def test_no_more_requests_have_a_row_than_may(engine):
    """Also of those with one prompt, and after a request was cancelled."""
    capped = engine_of(limits=Limits(rows=3))
    requests = [Request(prompt_of(length), new) for length, new in UNEQUAL]
    requests += [Request(prompt_of(70, 4), 9, RowSettings(WARM.sampler, seed)) for seed in range(5)]
    answers, most = capped.submit_all(requests), 0
    capped.cancel(answers[1])
    while capped.run_once():
        most = max(most, capped.report().rows_in_use)
    assert most == 3
    with pytest.raises(errors.RequestCancelled):
        answers.pop(1).result(0)
    want = answers_of(engine, [request for index, request in enumerate(requests) if index != 1])
    assert [answer.result(0).tokens for answer in answers] == [result.tokens for result in want]


# Settings, grammars and log-probabilities of a row


def even_then_odd_words(tokens):
    """The bit masks of `even_then_odd`, with bits set past the vocabulary."""
    words = pack_mask(even_then_odd(tokens))
    words[-1] |= np.uint32(0xFFFFFFFF << VOCABULARY % 32 & 0xFFFFFFFF)
    return words


def steps(request):
    """The tokens of one row of the short class, and the logits [V] of single steps from which each is drawn."""
    row = row_of(request.settings, OPTIONS.parts(PARAMS), prompt=request.prompt)
    padded = np.pad([request.prompt], ((0, 0), (0, CLASSES[0].prompt - len(request.prompt))))
    logits, state = prefill(PARAMS, padded, [len(request.prompt)], Full(), capacity=CLASSES[0].capacity)
    tokens = []
    while True:
        if request.allowed is not None:
            mask = request.allowed(tokens)
            row = row.replace(allowed=jax.device_put((pack_mask(mask) if mask.dtype == bool else mask)[None]))
        token, row = draw(*jax.device_put((row, logits), jax.devices()[0]))
        tokens.append(int(np.asarray(token)[0]))
        yield tokens[-1], np.asarray(logits)[0]
        if len(tokens) == request.max_new_tokens or tokens[-1] in PARAMS.config.eos_ids:
            return
        logits, state = decode_step(PARAMS, token, state)


def step_by_step(request):
    return [token for token, _ in steps(request)]


DRAW = Sampler(1.1)
REQUESTS = [
    Request(prompt_of(20), 12, RowSettings(**settings), allowed=allowed)
    for settings, allowed in (
        ({}, None),
        ({"presence_penalty": 2.0, "frequency_penalty": 1.0, "logit_bias": {7: 4.0, 9: 3.0}}, None),
        ({"sampler": DRAW, "seed": 5, "repetition_penalty": 1.7}, None),
        ({"logit_bias": {7: 100.0, 9: 99.9}, "frequency_penalty": 0.5}, None),
        ({"sampler": DRAW, "seed": 6}, even_then_odd),
        ({}, even_then_odd_words),
    )
]


def test_each_row_has_its_own_settings(engine):
    wanted = [step_by_step(request) for request in REQUESTS]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)  # so each setting has an effect
    assert [answer.tokens for answer in answers_of(engine, REQUESTS)] == wanted
    [again] = answers_of(engine, REQUESTS[:1])  # in a row that had a grammar
    assert again.tokens == wanted[0]


@pytest.mark.parametrize(
    ("allowed", "match"),
    [
        (lambda tokens: np.ones(3, bool), r"got bool \[3\]"),
        (lambda tokens: np.arange(VOCABULARY) >= 0 if not tokens else np.zeros(VOCABULARY, bool), "with 0"),
        (lambda tokens: np.ones(3, np.uint32), r"or uint32 \[9\] with at least one token, got uint32 \[3\]"),
        (lambda tokens: np.array([0] * 8 + [2], np.uint32), "with 0 that are not zero"),  # token 257 of 257
        (lambda tokens: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_bad_grammar_fails_its_own_request(engine, allowed, match):
    bad, good = engine.submit(Request(prompt_of(20), 5, allowed=allowed)), engine.submit(REQUESTS[0])
    run(engine)
    with pytest.raises(ConfigError, match=match):
        bad.result(0)
    assert good.result(0).tokens == step_by_step(good.request)
    assert engine.report().rows_in_use == 0


def test_logprobs_are_those_of_the_unchanged_logits(engine):
    warm = Request(prompt_of(20), 12, RowSettings(DRAW, 5, logit_bias={7: 4.0}, repetition_penalty=1.7), logprobs=3)
    requests = [warm, REQUESTS[0], dataclasses.replace(REQUESTS[-1], logprobs=20), Request([3, 4], 1, logprobs=0)]
    answers = [engine.submit(request) for request in requests]
    run(engine)
    for answer in answers:
        count = answer.request.logprobs
        for piece, (token, logits) in zip(answer, steps(answer.request), strict=True):
            assert piece.token == token
            assert (piece.logprobs is None) == (count is None)
            if count is not None:
                wide = logits.astype(np.float64)
                expected = wide - np.log(np.exp(wide).sum())
                np.testing.assert_allclose(piece.logprobs.chosen, expected[token], atol=1e-5)
                ids = [token for token, _ in piece.logprobs.top]
                assert ids == np.argsort(-wide, kind="stable")[:count].tolist()
                np.testing.assert_allclose([value for _, value in piece.logprobs.top], expected[ids], atol=1e-5)


@pytest.mark.slow
def test_a_policy_with_learned_arrays():
    policy, settings = Loki(budget=16, columns=6, calibration="offline"), {"capacity": CLASSES[1].capacity}
    fitted = policy.fit(PARAMS, np.asarray(prompt_of(90, 1)))
    engine = engine_of(policy=policy, classes=CLASSES[1:], fitted=fitted)
    assert engine.plans[0].fallback is None
    requests = [Request(prompt_of(length, 3), 10) for length in (100, 70, 80)]
    for request, answer in zip(requests, answers_of(engine, requests), strict=True):
        want = jshadow.generate(PARAMS, request.prompt, policy, max_new_tokens=10, fitted=fitted, **settings)
        assert answer.tokens == want.tokens
