"""The engine against `generate`: the same tokens in every slot and group, and each failure stays in its request."""

import numpy as np
import pytest
from byte_models import PARAMS, SHADOW

import jshadow
from jshadow.serving import Engine, EngineOptions, Request, RowClass

CLASSES = (RowClass(12, 8, 3), RowClass(112, 16, 3))
SYNC = EngineOptions(threaded=False, prefill_chunk=32)


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(3, 256, length).tolist()


def run(engine):
    while engine.run_once():
        pass


def offline(request, **options):
    plan_capacity = next(
        one.capacity for one in CLASSES if one.prompt >= len(request.prompt) and one.room >= request.max_new_tokens
    )
    settings = request.settings
    return jshadow.generate(
        PARAMS,
        request.prompt,
        SHADOW,
        max_new_tokens=request.max_new_tokens,
        sampler=settings.sampler,
        seed=settings.seed,
        stop=request.stop,
        capacity=plan_capacity,
        **options,
    )


@pytest.fixture(scope="module")
def engine():
    engine = Engine(PARAMS, SHADOW, classes=CLASSES, options=SYNC)
    engine.warm()
    return engine


def test_unequal_requests_are_answered_as_generate_does(engine):
    requests = [
        Request(prompt_of(length), count) for length, count in [(100, 9), (3, 8), (60, 16), (12, 1), (112, 5), (90, 12)]
    ]
    answers = [engine.submit(request) for request in requests]
    run(engine)
    for request, answer in zip(requests, answers, strict=True):
        want, got = offline(request), answer.result(0)
        assert got.tokens == want.tokens
        assert got.text == want.text
        assert list(answer) == list(answer)
        assert [token for _, token in answer][: len(got.tokens)] == got.tokens
