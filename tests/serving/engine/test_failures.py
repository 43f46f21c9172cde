"""Errors in the work for one request: it fails alone, frees what it held, and the engine goes on."""

import contextlib
import gc
import itertools
import weakref
from unittest import mock

import jax
import numpy as np
import pytest
from serving_cases import CLASSES, PARAMS, SHADOW, engine_of, finish, offline, prompt_of, run

import jshadow
from jshadow.errors import HostMemoryError, JshadowError, OutOfMemory, ServingError
from jshadow.library import state_store
from jshadow.serving import Request, documents
from jshadow.serving.jobs import Job

DOCUMENT = prompt_of(96, 5)


def full():
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes")


ERRORS = {
    "device": (full, OutOfMemory),
    "memory": (MemoryError, OutOfMemory),
    "host": (lambda: HostMemoryError("host_bytes must be at most 0"), HostMemoryError),
    "unknown": (lambda: RuntimeError("secret"), ServingError),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    limits = jshadow.library.TierLimits(device=0, host=0)
    folder = tmp_path_factory.mktemp("library")
    with jshadow.Library(folder, PARAMS, SHADOW, capacity=CLASSES[1].capacity, limits=limits) as library:
        library.add(DOCUMENT)
        yield library


@pytest.fixture
def engine(library):
    return engine_of(library=library)


@contextlib.contextmanager
def failing(owner, name, error, when=lambda *_: True, call=1):
    """Of the calls that `when` picks, one raises an error while it holds an array. That is freed until the end."""
    real, left, held = getattr(owner, name), itertools.count(1), []

    def run(*args, **options):
        if when(*args) and next(left) == call:
            array = np.zeros(4)
            held.append(weakref.ref(array))
            raise error()
        return real(*args, **options)

    with mock.patch.object(owner, name, run):
        yield
    gc.collect()
    assert [one() for one in held] == [None], "the function must fail, and its array must be freed"


PLAIN, ASKED = Request(prompt_of(80, 8), 6), Request([*DOCUMENT, 5], 6)
WORDS = Request(PLAIN.prompt, 6, allowed=lambda tokens: np.ones(PARAMS.config.vocab_size, bool))
PLACES = {
    "begin": PLAIN,
    "advance": PLAIN,
    "finish": PLAIN,
    "row": PLAIN,
    "draw": PLAIN,
    "pool": PLAIN,
    "insert": PLAIN,
    "push": PLAIN,
    "masked": WORDS,
    "place_state": ASKED,
    "commit": ASKED,
    "plan_rows": ASKED,
    "begin_on": ASKED,
    "extend": ASKED,
}


CASES = [("device", name) for name in PLACES] + [(error, name) for error in ERRORS for name in ("commit", "finish")]


@pytest.mark.parametrize(("error", "name"), dict.fromkeys(CASES))
def test_a_request_fails_alone(engine, name, error, caplog):
    owner = {"place_state": state_store, "plan_rows": documents, "commit": documents, "push": Job}.get(name)
    when = {
        "draw": lambda _, rows, active=None: active is None,  # not that of a step
        "push": lambda job, _: job.request is PLACES[name],
    }
    running, (make, kind) = Request(prompt_of(9, 2), 12), ERRORS[error]
    answer = engine.submit(running)
    run(engine, answer, 2)
    call = 2 if name == "push" else 1
    with failing(owner or engine._loop.programs, name, make, when.get(name, lambda *_: True), call):
        victim = engine.submit(PLACES[name])
        finish(engine)
        with pytest.raises(JshadowError) as caught:
            victim.result(0)
        kind_of_it, text = type(caught.value), str(caught.value)
        del caught
    assert kind_of_it is kind
    assert "secret" not in text
    assert sum(record.exc_info is not None for record in caplog.records) == (error != "host")
    assert answer.result(0).tokens == offline(running).tokens
    report = engine.report()
    assert (report.counts.failed, report.rows_in_use, report.waiting, engine.failure) == (1, 0, 0, None)
    again = engine.submit(PLACES[name])
    finish(engine)
    assert len(again.result(0).tokens) == 6


@pytest.mark.parametrize("name", ["taken", "fed", "start_store"])
def test_a_state_that_cannot_be_made_is_not_stored_and_the_answer_goes_on(engine, library, name):
    owner = library if name == "start_store" else engine._loop.programs
    request = Request(prompt_of(80, 9), 1 if name == "fed" else 3, store=True)
    with failing(owner, name, full):
        answer = engine.submit(request)
        finish(engine)
    result = answer.result(0)
    assert len(result.tokens) == request.max_new_tokens
    assert "the memory for this request" in result.report.not_stored
    assert engine.report().counts.finished == 1


def test_rows_that_are_lost_with_another_one_end_the_engine_loudly(engine, caplog):
    """An insert has consumed the rows of the group before it failed."""
    programs, real = engine._loop.programs, engine._loop.programs.insert
    first = engine.submit(Request(prompt_of(80, 8), 12))
    run(engine, first, 2)

    def insert(*args):
        real(*args)
        raise full()

    with mock.patch.object(programs, "insert", insert), contextlib.suppress(JshadowError):
        second = engine.submit(Request(prompt_of(80, 9), 12))
        run(engine)
    for answer in (first, second):
        with pytest.raises(ServingError):
            answer.result(0)
    assert engine.failure is not None
    assert "the engine's loop has failed" in caplog.text
