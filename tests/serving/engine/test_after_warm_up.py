"""After `warm`, no request compiles anything. This file comes first, because it forgets all compiled programs.

One worker runs its cases in their order. A case needs only the programs to be forgotten that earlier files compiled.
The earlier cases of this file compile nothing after their warm-up.
"""

import time

import jax
import numpy as np
import pytest
from serving_cases import CLASSES, PARAMS, SHADOW, answers_of, engine_of, prompt_of, random_requests

import jshadow
from jshadow.engine.report import CompileClock
from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.serving import Request

pytestmark = pytest.mark.xdist_group("warm")


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """The programs that earlier tests compiled."""
    jax.clear_caches()


# Over two seconds, because it compiles what the other tests of serving use.
@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_requests_compile_nothing(count):
    warm = engine_of()
    warm.warm()
    before = CompileClock.programs
    answers_of(warm, random_requests(count, seed=3))
    assert CompileClock.programs == before
    assert warm.report().counts.finished == count + 2


@pytest.mark.slow
def test_questions_on_any_document_compile_nothing(tmp_path):
    """On documents in memory, on disk, and on one that was added after the warm-up; in rows of both rooms."""
    count, lengths = 150, (5, 30, 61, 100)
    settings = {"params": PARAMS, "policy": SHADOW, "capacity": CLASSES[1].capacity}
    documents = [prompt_of(length, length) for length in lengths]
    with jshadow.Library(tmp_path, **settings) as before:
        for document in documents[:3]:
            before.add(document)
    with jshadow.Library(tmp_path, **settings) as library:
        library.load(library.longest(documents[0]).key)
        library.add(documents[3])
        engine = engine_of(library=library)
        engine.warm()
        compiled, rng, answers = CompileClock.programs, np.random.default_rng(count), []
        for index in range(count):
            question = int(rng.integers(1, 20))
            new, ids = int(rng.integers(1, (25 if index % 2 else 65) - question)), prompt_of(question, index)
            settings = RowSettings(Sampler(float(rng.uniform(0.3, 2))), seed=int(rng.integers(-(1 << 40), 1 << 40)))
            document = [*documents, []][index % 5]
            answers.append(engine.submit(Request([*document, *ids], new, settings)))
            if index % 3 == 0:
                finish(engine)
        finish(engine)
        assert CompileClock.programs == compiled
        stored = {answer.result(0).report.stored_tokens for answer in answers}
        assert stored == {0, *lengths}


def finish(engine):
    """Run an engine to its end. A turn without work waits for the threads that read files."""
    while engine.run_once() or engine.report().waiting:
        time.sleep(0)
