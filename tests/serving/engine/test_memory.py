"""Memory under many requests: nothing of a request stays, and the tiers keep their limits."""

import gc

import jax
import numpy as np
import pytest
from serving_cases import CLASSES, PARAMS, SHADOW, engine_of, prompt_of, run

import jshadow
from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.library.tiers import DEVICE, HOST
from jshadow.serving import Request

DOCUMENTS = [prompt_of(length, length) for length in range(100, 108)]


def held():
    """Bytes of all live arrays."""
    gc.collect()
    # Two arrays may be views of one buffer.
    arrays = [leaf for leaf in jax.live_arrays() if not leaf.is_deleted()]
    return sum(size for _, size in {(leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in arrays})


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
    limits = jshadow.library.tiers.TierLimits(device=3 * size, host=2 * size, disk=40 * size)
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
