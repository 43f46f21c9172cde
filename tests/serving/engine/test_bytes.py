"""The bytes of the plan are those of the engine's own arrays, and many requests leave no bytes behind."""

import dataclasses
import gc

import jax
import numpy as np
import pytest
from serving_cases import CLASSES, END, PARAMS, SHADOW, SYNC, engine_of, prompt_of, run

import jshadow
from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.library.tiers import DEVICE, HOST, TierLimits
from jshadow.planner.sessions import MemoryLimits, SessionClass, session_plan
from jshadow.serving import Engine, Limits, Request, RowClass
from jshadow.serving.admission import held_bytes, needed_bytes

FETCH = "device_put"  # both memories are used
ONE = RowClass(104, 24, 10)
DOCUMENT = prompt_of(90, 5)
OPTIONS = dataclasses.replace(SYNC, fetch=FETCH)
MEMORIES = ("device", "pinned_host")


def by_memory(arrays):
    """The bytes of arrays in each memory. Two arrays may be views of one buffer, which counts once."""
    sizes = {(a.sharding.memory_kind, a.unsafe_buffer_pointer(), a.nbytes) for a in arrays}
    return tuple(sum(size for memory, _, size in sizes if memory == kind) for kind in MEMORIES)


def live():
    """All arrays that are alive. The list keeps them, because the memory of a freed array may be used again."""
    gc.collect()
    return [array for array in jax.live_arrays() if not array.is_deleted()]


def planned(documents):
    sizes = SessionClass(ONE.prompt, ONE.room, ONE.rows, groups=1, documents=documents)
    plan = session_plan(PARAMS.config, SHADOW, [sizes], MemoryLimits(), dtype="float32", fetch=FETCH, backend="cpu")
    return plan.classes[0]


def all_read(engine, prompts):
    """Read ten prompts into rows, and return the group and the arrays that were made for it."""
    before = live()
    known = {array.unsafe_buffer_pointer() for array in before}
    answers = [engine.submit(Request(prompt, 12)) for prompt in prompts]
    while not answers[-1]._pieces:
        assert engine.run_once()
    [group] = engine._loop.groups
    return group, [array for array in live() if array.unsafe_buffer_pointer() not in known], answers


@pytest.mark.slow
def test_rows_of_their_own():
    engine = Engine(PARAMS, SHADOW, classes=[ONE], options=OPTIONS)
    group, fresh, answers = all_read(engine, [prompt_of(60 + row, row) for row in range(10)])
    settings = sum(leaf.nbytes for leaf in jax.tree.leaves(group.pool.rows))
    device, host = planned(0).group_bytes
    assert by_memory(fresh) == (device + settings, host) == (group.plan.bytes.device, group.plan.bytes.host)
    assert host > 0
    run(engine)
    assert all(answer.done for answer in answers)


@pytest.fixture
def library(tmp_path):
    with jshadow.Library(tmp_path, PARAMS, SHADOW, capacity=ONE.capacity, fetch=FETCH) as library:
        yield library


@pytest.mark.slow
def test_ten_sessions_hold_the_prompt_half_of_their_document_once(library):
    before = live()
    known = {array.unsafe_buffer_pointer() for array in before}
    library.add(DOCUMENT)
    stored = [array for array in live() if array.unsafe_buffer_pointer() not in known]
    plan = planned(1)
    assert by_memory(stored) == plan.documents_bytes
    engine = Engine(PARAMS, SHADOW, classes=[ONE], library=library, options=OPTIONS)
    group, fresh, answers = all_read(engine, [[*DOCUMENT, *prompt_of(3, row)] for row in range(10)])
    settings = sum(leaf.nbytes for leaf in jax.tree.leaves(group.pool.rows))
    device, host = plan.group_bytes
    assert by_memory(fresh) == (device + settings, host)  # nothing of the prompt half
    sizes = group.plan.bytes
    assert (sizes.device, sizes.host) == (device + settings, host)
    prompt = by_memory(jax.tree.leaves(library.load(library.longest(DOCUMENT).key).reads()))
    assert (sizes.shared_device, sizes.shared_host) == prompt
    assert min(sizes.step, sizes.reading, *prompt) > 0
    more = engine.submit(Request([*DOCUMENT, 4], 5))  # it takes a second group, which shares the half too
    while not more._pieces:
        assert engine.run_once()
    groups = engine._loop.groups
    assert len(groups) == 2
    assert held_bytes(one.plan for one in groups) == (2 * sizes.device + prompt[0], 2 * sizes.host + prompt[1])
    halves = [jax.tree.leaves(one.pool.state.reads()) for one in groups]
    assert all(one is two for one, two in zip(*halves, strict=True))
    run(engine)
    assert all(answer.done for answer in answers)


@pytest.mark.parametrize(
    ("one", "fetch"),
    [(CLASSES[1], "resident"), pytest.param(ONE, FETCH, marks=pytest.mark.slow)],
    ids=["resident", FETCH],
)
def test_the_bytes_of_a_document_are_admitted(tmp_path, one, fetch):
    """A third group, for which the bytes do not suffice, waits."""
    with jshadow.Library(tmp_path, PARAMS, SHADOW, capacity=one.capacity, fetch=fetch) as library:
        library.add(DOCUMENT)
        settings = {"classes": [one], "library": library, "options": dataclasses.replace(SYNC, fetch=fetch)}
        probe = Engine(PARAMS, SHADOW, **settings)
        group, _, _ = all_read(probe, [[*DOCUMENT, row] for row in range(3, 3 + one.rows)])
        assert (group.plan.bytes.shared_host > 0) == (fetch == FETCH)
        engine = Engine(PARAMS, SHADOW, **settings)
        endless = RowSettings(logit_bias={END: -100.0})
        answers = [
            engine.submit(Request([*DOCUMENT, row], one.room - 1, endless)) for row in range(3, 5 + 2 * one.rows)
        ]
        device, host = needed_bytes([group.plan] * 2)
        engine.admission.limits = Limits(device, host or None)  # a row that reads its document needs more
        seen = set()
        while engine.run_once():
            seen.add(len(engine._loop.groups))
        assert max(seen) == 2
        assert [len(answer.result(0).tokens) for answer in answers] == [one.room - 1] * len(answers)


# Memory under many requests

DOCUMENTS = [prompt_of(length, length) for length in range(100, 108)]


def held():
    """Bytes of all live arrays. Two arrays may be views of one buffer, which counts once."""
    return sum(size for _, size in {(leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in live()})


def serve(engine, count, rng, check):
    for start in range(0, count, 50):
        for index in range(start, min(start + 50, count)):
            settings = RowSettings(Sampler(float(rng.uniform(0, 2))), seed=index)
            prompt = prompt_of(int(rng.integers(1, 12)), index)
            document, store = [], False
            if engine._loop.library is not None:
                document = DOCUMENTS[int(rng.integers(len(DOCUMENTS)))] if rng.random() < 0.5 else []
                store = bool(rng.random() < 0.1)
            engine.submit(Request([*document, *prompt], int(rng.integers(1, 5)), settings, store=store))
        while engine.run_once() or engine.report().waiting:
            check()
    run(engine)


def test_memory_is_flat():
    """`test_load` looks at all memory of the process, too, after many more requests."""
    count = 60
    engine, rng = engine_of(), np.random.default_rng(1)
    serve(engine, count // 6, rng, lambda: None)
    arrays = held()
    serve(engine, count - count // 6, rng, lambda: None)
    assert held() == arrays
    report = engine.report()
    assert (report.counts.finished, report.rows_in_use, report.waiting) == (count, 0, 0)


@pytest.mark.slow
def test_memory_is_flat_with_a_library_whose_tiers_are_full(tmp_path):
    count = 120
    with jshadow.Library(tmp_path / "size", PARAMS, SHADOW, capacity=CLASSES[1].capacity) as library:
        library.add(DOCUMENTS[0])
        size = library.tiers.used(DEVICE)
    limits = TierLimits(device=3 * size, host=2 * size, disk=40 * size)
    capacity = CLASSES[1].capacity
    with jshadow.Library(tmp_path / "all", PARAMS, SHADOW, capacity=capacity, limits=limits) as library:
        for document in DOCUMENTS:
            library.add(document)

        def check():
            assert library.tiers.used(DEVICE) <= limits.device
            assert library.tiers.used(HOST) <= limits.host

        engine, rng = engine_of(library=library), np.random.default_rng(1)
        serve(engine, count // 6, rng, check)
        arrays = held() - engine.report().device_bytes
        serve(engine, count - count // 6, rng, check)
        assert held() - engine.report().device_bytes <= 1.05 * arrays  # empty groups are kept
        files = sum(path.stat().st_size for path in (tmp_path / "all").rglob("*") if path.is_file())
        assert files <= limits.disk
        report = engine.report()
        assert (report.counts.finished, report.rows_in_use, report.waiting) == (count, 0, 0)
