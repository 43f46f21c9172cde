"""An engine with speculation draws the tokens of one without it, and of `generate`."""

import dataclasses
import itertools

import numpy as np
import pytest
from byte_models import SHADOW
from serving_cases import CLASSES, PARAMS, answers_of, engine_of, finish, offline, prompt_of, random_requests

import jshadow
from jshadow.engine.report import CompileClock
from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.engine.speculation import CompressedDraft, DraftModel, PromptLookup, SelfDraft
from jshadow.engine.speculation.drafter import Pace
from jshadow.errors import ConfigError
from jshadow.policies import H2O, Full, Quest
from jshadow.serving import Request, RowClass

LOOKUP = PromptLookup(tokens=4, ngram=1)
LONG = CLASSES[1:]
GREEDY, DRAWN = RowSettings(), RowSettings(Sampler(0.5), seed=4)


@pytest.fixture(autouse=True)
def no_times(monkeypatch):
    """The widths of steps depend on what was accepted alone."""
    monkeypatch.setattr(Pace, "timed", lambda pace, width, seconds: None)


def looping(length, period=7, seed=0):
    """A prompt that repeats itself, so that prompt lookup proposes tokens."""
    return (prompt_of(period, seed) * length)[:length]


def speculating(**options):
    return engine_of(**{"speculate": LOOKUP, "classes": LONG} | options)


def kept(results):
    return sum(one.report.accepted_tokens for one in results)


def pieces_of(engine, requests):
    answers = [engine.submit(request) for request in requests]
    finish(engine)
    return [list(answer) for answer in answers]


def test_unequal_requests_are_answered_as_generate_does():
    """Rows of one group accept unequal numbers of tokens, greedy or not."""
    sizes = [(100, 40), (70, 63), (112, 12), (90, 2), (81, 33), (66, 1)]
    requests = [
        Request(looping(length, seed=place), new, (GREEDY, DRAWN)[place % 2])
        for place, (length, new) in enumerate(sizes)
    ]
    engine = speculating()
    results = answers_of(engine, requests)
    assert [one.tokens for one in results] == [offline(request).tokens for request in requests]
    counts, accepted = engine.report().counts, [one.report.accepted_tokens for one in results]
    assert 0 < sum(accepted) == counts.accepted <= counts.proposed
    assert not any(one.report.proposed_tokens for one in results if len(one.tokens) < 3)


def test_every_setting_of_a_row_holds_inside_a_cycle():
    """Penalties, biases, seeds, stops and log-probabilities are those of an engine that draws one token a step."""
    penalties = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {9: 2.0}}
    settings = [GREEDY, RowSettings(Sampler(0.3, top_k=9), 3, **penalties), RowSettings(**penalties)]
    requests = [Request(looping(80, seed=place), 24, row, logprobs=3) for place, row in enumerate(settings)]
    [first, *_] = pieces_of(engine_of(classes=LONG), requests[:1])
    for place in (9, 10, 12):  # inside a cycle and at its ends
        requests.append(dataclasses.replace(requests[0], stop=first[place].token))
    engine = speculating()
    plain, guessed = pieces_of(engine_of(classes=LONG), requests), pieces_of(engine, requests)
    assert engine.report().counts.accepted > 10
    for want, got in zip(plain, guessed, strict=True):
        assert [(one.token, one.text) for one in got] == [(one.token, one.text) for one in want]
        np.testing.assert_allclose([one.logprobs.chosen for one in got], [one.logprobs.chosen for one in want], 1e-3)
        assert [[token for token, _ in one.logprobs.top[:1]] for one in got] == [
            [token for token, _ in one.logprobs.top[:1]] for one in want
        ]


def test_guesses_behind_the_end_of_an_answer_do_not_count():
    engine, request = speculating(), Request(looping(90), 40)
    [whole] = answers_of(engine, [request])
    stops = [dataclasses.replace(request, stop=whole.tokens[place]) for place in range(12)]
    results = answers_of(engine, stops)
    assert all(one.report.accepted_tokens < one.report.generated_tokens for one in results)
    assert {one.report.finish for one in results} == {"stop"}
    counts = engine.report().counts
    assert counts.accepted == kept([whole, *results]) > 0


def test_a_request_that_cannot_be_guessed_says_why():
    allowed = np.ones(PARAMS.config.vocab_size, bool)
    request = Request(looping(90), 12, allowed=lambda tokens: allowed)
    engine = speculating()
    grammar, free = answers_of(engine, [request, dataclasses.replace(request, allowed=None)])
    assert grammar.tokens == free.tokens
    assert (grammar.report.proposed_tokens, grammar.report.plain.split()[1]) == (0, "grammar")
    assert free.report.plain is None
    assert free.report.accepted_tokens > 0
    [one] = answers_of(engine_of(classes=LONG), [Request(looping(90), 3)])
    assert (one.report.proposed_tokens, one.report.plain) == (None, None)


def test_a_policy_that_gives_no_tokens_back_is_drawn_plainly():
    [plan] = speculating(policy=H2O(heavy=48, recent=16)).plans
    assert plan.drafter is None
    assert "give tokens back" in plan.drafting.plain


def test_a_drafter_that_no_engine_can_use_is_refused():
    for drafter, text in ((CompressedDraft(), "'compressed'"), ("prompt_lookup", "must be a drafter")):
        with pytest.raises(ConfigError, match=text):
            speculating(speculate=drafter)


def test_the_bytes_of_a_step_and_of_the_memory_are_planned():
    plain, [guessing] = engine_of(classes=LONG).plans[0].bytes, speculating().plans
    rows, capacity = LONG[0].rows, LONG[0].capacity
    assert guessing.bytes.rows.device - plain.rows.device == rows * 4 * (capacity + LOOKUP.tokens + 4)
    assert guessing.bytes.step > plain.step + 4 * rows * LOOKUP.tokens * PARAMS.config.vocab_size


SELF = SelfDraft(tokens=4, policy=Quest(budget=32, unit=8, recent=16, dense_layers=0))
SAME = DraftModel(PARAMS, tokens=4)  # it guesses right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "drafter"),
    [(SHADOW, LOOKUP), (Full(), SELF), (SHADOW, SAME)],
    ids=["prompt_lookup", "self", "draft_model"],
)
def test_after_warm_up_random_requests_compile_nothing(policy, drafter):
    engine = engine_of(policy=policy, speculate=drafter)
    engine.warm()
    compiled, requests = CompileClock.programs, random_requests(32, seed=9)
    results = answers_of(engine, requests)
    assert CompileClock.programs == compiled
    plain = answers_of(engine_of(policy=policy), requests)
    assert [one.tokens for one in results] == [one.tokens for one in plain]
    assert engine.report().counts.accepted > 0


@pytest.mark.slow
def test_a_draft_model_reads_the_tokens_of_steps_without_proposals(monkeypatch):
    """It is the model itself, so it guesses all tokens as long as it has read those before them."""
    widths = itertools.cycle([0, 0, 4, 0, 1])
    monkeypatch.setattr(Pace, "choose", lambda pace, ready, active: next(widths) if ready[active].any() else 0)
    requests = [Request(prompt_of(70 + place, place), 30) for place in range(4)]
    requests.insert(0, dataclasses.replace(requests[0], allowed=lambda tokens: np.ones(PARAMS.config.vocab_size, bool)))
    results = answers_of(speculating(policy=Full(), speculate=SAME), requests)
    plain = answers_of(engine_of(policy=Full(), classes=LONG), requests)
    assert [one.tokens for one in results] == [one.tokens for one in plain]
    whole = [one.report for one in results if one.report.finish == "length"]
    assert sum(report.accepted_tokens for report in whole) == sum(report.proposed_tokens for report in whole) > 20
    assert [one.report.plain is None for one in results] == [
        False,
        False,
        True,
        True,
        True,
    ]  # a twin shares its reading
    assert "has not read the prompt" in results[1].report.plain


@pytest.mark.slow
def test_a_class_with_little_room_compiles_nothing_after_warm_up():
    engine = speculating(classes=[RowClass(32, 2, 2), RowClass(40, 3, 2)])
    engine.warm()
    compiled = CompileClock.programs
    answers_of(engine, [Request(looping(30), 2), Request(looping(31), 3), Request(looping(29), 1)])
    assert CompileClock.programs == compiled


@pytest.mark.slow
def test_rows_on_a_document_speculate_and_their_states_are_stored(tmp_path):
    """The tokens of the document are searched too. A stored answer ends where the answer does."""
    document = prompt_of(96, 5)
    with jshadow.Library(tmp_path, PARAMS, SHADOW, capacity=LONG[0].capacity) as library:
        library.add(document)
        engine, plain = speculating(library=library), engine_of(classes=LONG, library=library)
        engine.warm()
        compiled = CompileClock.programs
        requests = [
            Request([*document, *looping(5 + seed, 2, seed)], 30, (GREEDY, DRAWN)[seed % 2]) for seed in range(5)
        ]
        answers = [engine.submit(request) for request in requests]
        finish(engine)
        assert CompileClock.programs == compiled
        others = [plain.submit(request) for request in requests]
        finish(plain)
        assert [one.result(0).tokens for one in answers] == [one.result(0).tokens for one in others]
        assert engine.report().counts.accepted > 0
        stop = answers[0].result(0).tokens[7]
        asked = Request(looping(90), 30, store=True, stop=stop)
        stored = engine.submit(asked)
        finish(engine)
        result = stored.result(0)
        state = library.load(result.report.stored.result())
        assert int(state.lengths[0]) == 90 + len(result.tokens)
        again = Request([*asked.prompt, *result.tokens, 7, 8], 12)
        got, want = (pieces_of(one, [again])[0] for one in (engine, engine_of(classes=LONG)))
        assert [one.token for one in got] == [one.token for one in want]
