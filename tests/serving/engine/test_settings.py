"""Penalties, biases, grammars and learned arrays in the engine: the tokens of one row alone, drawn step by step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_cases import CLASSES, END, PARAMS, PLAIN, SYNC, engine_of, prompt_of, run

import jshadow
from jshadow.engine.decode import decode_step, prefill
from jshadow.engine.rows.sampling import draw, pack_mask, row_of
from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError
from jshadow.policies import Full, Loki
from jshadow.serving import Engine, Request

VOCABULARY = PARAMS.config.vocab_size
WARM = Sampler(1.1)


def even_then_odd(tokens):
    """Tokens of even and of odd ids in turn."""
    return np.arange(VOCABULARY) % 2 == len(tokens) % 2


def even_then_odd_words(tokens):
    """The same as bit masks, with bits set past the vocabulary."""
    words = pack_mask(even_then_odd(tokens))
    words[-1] |= np.uint32(0xFFFFFFFF << VOCABULARY % 32 & 0xFFFFFFFF)
    return words


def step_by_step(request):
    """The tokens of one row of the short class, which is dense, drawn from the logits of single steps."""
    return [token for token, _ in steps(request)]


def steps(request):
    """The tokens, and the logits [V] from which each was drawn."""
    parts = SYNC.parts(PARAMS)
    row = row_of(request.settings, parts, prompt=request.prompt)
    padded = np.pad([request.prompt], ((0, 0), (0, CLASSES[0].prompt - len(request.prompt))))
    logits, state = prefill(PARAMS, padded, [len(request.prompt)], Full(), capacity=CLASSES[0].capacity)
    tokens = []
    while True:
        if request.allowed is not None:
            mask = request.allowed(tokens)
            row = row.replace(allowed=jnp.asarray((pack_mask(mask) if mask.dtype == bool else mask)[None]))
        token, row = draw(*jax.device_put((row, logits), jax.devices()[0]))
        tokens.append(int(np.asarray(token)[0]))
        yield tokens[-1], np.asarray(logits[0])
        if len(tokens) == request.max_new_tokens or tokens[-1] == END:
            return
        logits, state = decode_step(PARAMS, token, state)


REQUESTS = [
    Request(prompt_of(20), 12),
    Request(prompt_of(20), 12, RowSettings(presence_penalty=2.0, frequency_penalty=1.0, logit_bias={7: 4.0, 9: 3.0})),
    Request(prompt_of(20), 12, RowSettings(WARM, 5, repetition_penalty=1.7)),
    Request(prompt_of(20), 12, RowSettings(logit_bias={7: 100.0, 9: 99.9}, frequency_penalty=0.5)),
    Request(prompt_of(20), 12, RowSettings(WARM, 6), allowed=even_then_odd),
    Request(prompt_of(20), 12, allowed=even_then_odd_words),
]


def test_each_row_has_its_own_settings():
    engine = engine_of()
    wanted = [step_by_step(request) for request in REQUESTS]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)  # so each setting has an effect
    answers = [engine.submit(request) for request in REQUESTS]
    run(engine)
    assert [answer.result(0).tokens for answer in answers] == wanted
    again = engine.submit(REQUESTS[0])  # in a row that had a grammar
    run(engine)
    assert again.result(0).tokens == wanted[0]


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
def test_a_bad_grammar_fails_its_own_request(allowed, match):
    engine = engine_of()
    bad, good = engine.submit(Request(prompt_of(20), 5, allowed=allowed)), engine.submit(Request(prompt_of(20), 12))
    run(engine)
    with pytest.raises(ConfigError, match=match):
        bad.result(0)
    assert good.result(0).tokens == step_by_step(good.request)
    assert engine.report().rows_in_use == 0


def test_a_grammar_needs_an_engine_with_masks():
    with pytest.raises(ConfigError, match=r"options\.grammar"):
        engine_of(options=PLAIN).submit(Request([3], 1, allowed=even_then_odd))
    with pytest.raises(ConfigError, match="allowed must be a function"):
        Request([3], allowed=[True])


def test_logprobs_are_those_of_the_unchanged_logits():
    engine = engine_of()
    warm = Request(prompt_of(20), 12, RowSettings(WARM, 5, logit_bias={7: 4.0}, repetition_penalty=1.7), logprobs=3)
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


@pytest.mark.parametrize("logprobs", [-1, 21, True, 2.0])
def test_the_number_of_logprobs_is_checked(logprobs):
    with pytest.raises(ConfigError, match="logprobs must be"):
        Request([3], logprobs=logprobs)


def test_logprobs_need_an_engine_with_them():
    with pytest.raises(ConfigError, match=r"options\.logprobs"):
        engine_of(options=PLAIN).submit(Request([3], 1, logprobs=0))


@pytest.mark.slow
def test_a_policy_with_learned_arrays():
    policy = Loki(budget=16, columns=6, calibration="offline")
    fitted = policy.fit(PARAMS, np.asarray(prompt_of(90, 1)))
    options = dataclasses.replace(SYNC, fitted=fitted)
    engine = Engine(PARAMS, policy, classes=CLASSES[1:], options=options)
    assert engine.plans[0].fallback is None
    requests = [Request(prompt_of(length, 3), 10) for length in (100, 70, 80)]
    answers = [engine.submit(request) for request in requests]
    run(engine)
    for request, answer in zip(requests, answers, strict=True):
        want = jshadow.generate(
            PARAMS, request.prompt, policy, max_new_tokens=10, capacity=CLASSES[1].capacity, fitted=fitted
        )
        assert answer.result(0).tokens == want.tokens


def test_arrays_of_another_policy_are_refused():
    options = dataclasses.replace(SYNC, fitted={"x": np.ones(2)})
    with pytest.raises(ConfigError, match="fitted"):
        Engine(PARAMS, Full(), classes=CLASSES[1:], options=options)
