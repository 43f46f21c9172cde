"""After `warm`, no request compiles anything. This file comes first, because it forgets all compiled programs.

One worker runs its cases in their order. A case needs only the programs to be forgotten that earlier files compiled.
The earlier cases of this file compile nothing after their warm-up.
"""

import jax
import numpy as np
import pytest
from serving_cases import CLASSES, PARAMS, SHADOW, answers_of, engine_of, finish, prompt_of, random_requests

import jshadow
from jshadow.engine.report import CompileClock
from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.serving import Request

pytestmark = pytest.mark.xdist_group("warm")


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """The programs that earlier tests compiled."""
    jax.clear_caches()


def test_requests_compile_nothing():
    """It takes over two seconds, because it compiles what the other tests of serving use."""
    warm = engine_of()
    warm.warm()
    before = CompileClock.programs
    answers_of(warm, random_requests(12, seed=3))
    assert CompileClock.programs == before
    assert warm.report().counts.finished == 14


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
        compiled, rng, answers, rooms = CompileClock.programs, np.random.default_rng(count), [], set()
        for index in range(count):
            question = int(rng.integers(1, 20))
            new, ids = int(rng.integers(1, (25 if index % 2 else 65) - question)), prompt_of(question, index)
            settings = RowSettings(Sampler(float(rng.uniform(0.3, 2))), seed=int(rng.integers(-(1 << 40), 1 << 40)))
            answers.append(engine.submit(Request([*[*documents, []][index % 5], *ids], new, settings)))
            while index % 3 == 0 and (engine.run_once() or engine.report().waiting):
                rooms |= {group.plan.row_class.room for group in engine._loop.groups if group.base is not None}
        finish(engine)
        assert CompileClock.programs == compiled
        assert {answer.result(0).report.stored_tokens for answer in answers} == {0, *lengths}
        assert rooms == {one.room for one in CLASSES}
