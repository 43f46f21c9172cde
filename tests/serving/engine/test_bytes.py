"""The bytes of the plan are those of the engine's own arrays, and many requests leave no bytes behind."""

import gc

import jax
import numpy as np
import pytest
from few import slow
from serving_cases import CLASSES, END, PARAMS, SHADOW, engine_of, prompt_of, run

import jshadow
from jshadow.cache.accounting import total
from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.library.tiers import DEVICE, HOST, TierLimits
from jshadow.planner.limits import MemoryLimits
from jshadow.planner.sessions import SessionClass, session_plan
from jshadow.serving import Limits, Request, RowClass
from jshadow.serving.admission import held_bytes, needed_bytes

FETCH = "device_put"  # both memories are used
ONE = RowClass(104, 24, 10)
DOCUMENT = prompt_of(90, 5)
BOTH = {"classes": [ONE], "fetch": FETCH}


def live():
    """All arrays that are alive. The list keeps them, because the memory of a freed array may be used again."""
    gc.collect()
    return [array for array in jax.live_arrays() if not array.is_deleted()]


def by_memory(arrays):
    """The bytes of arrays in each memory. Two arrays may be views of one buffer, which counts once."""
    sizes = {(a.sharding.memory_kind, a.unsafe_buffer_pointer(), a.nbytes) for a in arrays}
    return tuple(sum(size for memory, _, size in sizes if memory == kind) for kind in ("device", "pinned_host"))


def made_by(call):
    """The arrays that a call makes and keeps, and its result."""
    before = live()
    known, result = {array.unsafe_buffer_pointer() for array in before}, call()
    return [array for array in live() if array.unsafe_buffer_pointer() not in known], result


def planned(documents):
    sizes = SessionClass(ONE.prompt, ONE.room, ONE.rows, groups=1, documents=documents)
    plan = session_plan(PARAMS.config, SHADOW, [sizes], MemoryLimits(), dtype="float32", fetch=FETCH, backend="cpu")
    return plan.classes[0]


def all_read(engine, prompts):
    """Read prompts into the rows of one group. Returns the group, its arrays, and the bytes of the rows' settings."""

    def read():
        answers = [engine.submit(Request(prompt, 12)) for prompt in prompts]
        run(engine, answers[-1])
        return engine._loop.groups

    arrays, [group] = made_by(read)
    return group, arrays, sum(leaf.nbytes for leaf in jax.tree.leaves(group.pool.rows))


@pytest.mark.slow
def test_rows_of_their_own():
    engine = engine_of(**BOTH)
    group, arrays, settings = all_read(engine, [prompt_of(60 + row, row) for row in range(10)])
    device, host = planned(0).group_bytes
    assert by_memory(arrays) == (device + settings, host) == group.plan.bytes.rows
    assert host > 0
    run(engine)
    assert engine.report().counts.finished == 10


@pytest.mark.slow
def test_ten_sessions_hold_the_prompt_half_of_their_document_once(tmp_path):
    with jshadow.Library(tmp_path, PARAMS, SHADOW, capacity=ONE.capacity, fetch=FETCH) as library:
        stored, _ = made_by(lambda: library.add(DOCUMENT))
        plan = planned(1)
        assert by_memory(stored) == plan.documents_bytes
        engine = engine_of(library=library, **BOTH)
        group, arrays, settings = all_read(engine, [[*DOCUMENT, *prompt_of(3, row)] for row in range(10)])
        device, host = plan.group_bytes
        sizes = group.plan.bytes
        assert by_memory(arrays) == (device + settings, host) == sizes.rows  # not of the prompt half
        prompt = by_memory(jax.tree.leaves(library.load(library.longest(DOCUMENT).key).reads()))
        assert sizes.shared == prompt
        assert min(sizes.step, sizes.reading.device, *prompt) > 0
        more = engine.submit(Request([*DOCUMENT, 4], 5))  # it takes a second group, which shares the half too
        run(engine, more)
        one, two = groups = engine._loop.groups
        assert held_bytes(each.plan for each in groups) == total([sizes.rows, sizes.rows, prompt])
        halves = [jax.tree.leaves(each.pool.state.reads()) for each in (one, two)]
        assert all(leaf is same for leaf, same in zip(*halves, strict=True))
        run(engine)
        assert engine.report().counts.finished == 11


@pytest.mark.parametrize(("one", "fetch"), [(CLASSES[1], "resident"), slow((ONE, FETCH))], ids=["resident", FETCH])
def test_the_bytes_of_a_document_are_admitted(tmp_path, one, fetch):
    """A third group, for which the bytes do not suffice, waits."""
    with jshadow.Library(tmp_path, PARAMS, SHADOW, capacity=one.capacity, fetch=fetch) as library:
        library.add(DOCUMENT)
        settings = {"classes": [one], "library": library, "fetch": fetch}
        plan = all_read(engine_of(**settings), [[*DOCUMENT, row] for row in range(3, 3 + one.rows)])[0].plan
        assert (plan.bytes.shared.host > 0) == (fetch == FETCH)
        device, host = needed_bytes([plan] * 2)  # a row that reads its document needs more
        engine, endless = engine_of(**settings), RowSettings(logit_bias={END: -100.0})
        prompts = [[*DOCUMENT, row] for row in range(3, 5 + 2 * one.rows)]
        answers = [engine.submit(Request(prompt, one.room - 1, endless)) for prompt in prompts]
        engine.admission.limits = Limits(device, host or None)
        seen = set()
        while engine.run_once():
            seen.add(len(engine._loop.groups))
        assert max(seen) == 2
        assert [len(answer.result(0).tokens) for answer in answers] == [one.room - 1] * len(answers)


DOCUMENTS = [prompt_of(length, length) for length in range(100, 108)]


def growth(engine, count, check=lambda: None):
    """Answer many requests, after a sixth of them as a warm-up. Returns the bytes of arrays before and after.

    Those of the groups do not count: empty ones are kept.
    """
    rng, sizes = np.random.default_rng(1), []
    for part in (count // 6, count - count // 6):
        for start in range(0, part, 50):
            for index in range(start, min(start + 50, part)):
                settings = RowSettings(Sampler(float(rng.uniform(0, 2))), seed=index)
                prompt = prompt_of(int(rng.integers(1, 12)), index)
                document, store = [], False
                if engine._loop.library is not None:
                    document = DOCUMENTS[int(rng.integers(len(DOCUMENTS)))] if rng.random() < 0.5 else []
                    store = bool(rng.random() < 0.1)
                engine.submit(Request([*document, *prompt], int(rng.integers(1, 5)), settings, store=store))
            while engine.run_once() or engine.report().waiting:
                check()
        sizes.append(sum(by_memory(live())) - engine.report().device_bytes)
    report = engine.report()
    assert (report.counts.finished, report.rows_in_use, report.waiting) == (count, 0, 0)
    return sizes


def test_memory_is_flat():
    """`test_load` looks at all memory of the process, too, after many more requests."""
    before, after = growth(engine_of(), 60)
    assert after == before > 0


@pytest.mark.slow
def test_memory_is_flat_with_a_library_whose_tiers_are_full(tmp_path):
    settings = {"params": PARAMS, "policy": SHADOW, "capacity": CLASSES[1].capacity}
    with jshadow.Library(tmp_path / "size", **settings) as library:
        library.add(DOCUMENTS[0])
        size = library.tiers.used(DEVICE)
    limits = TierLimits(device=3 * size, host=2 * size, disk=40 * size)
    with jshadow.Library(tmp_path / "all", **settings, limits=limits) as library:
        for document in DOCUMENTS:
            library.add(document)

        def check():
            assert library.tiers.used(DEVICE) <= limits.device
            assert library.tiers.used(HOST) <= limits.host

        engine = engine_of(library=library)
        before, after = growth(engine, 120, check)
        assert after <= 1.05 * before
        assert sum(path.stat().st_size for path in (tmp_path / "all").rglob("*") if path.is_file()) <= limits.disk
