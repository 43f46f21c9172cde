"""Memory under many requests, in a process of its own: nothing of a request stays."""

import gc
from pathlib import Path

import jax
import numpy as np
import pytest
from serving_cases import engine_of, prompt_of, run

from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.serving import Request


def held():
    """Bytes of all live arrays, and of the pages of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sum(leaf.nbytes for leaf in jax.live_arrays() if not leaf.is_deleted()), pages


def serve(engine, count, rng):
    for start in range(0, count, 50):
        for index in range(start, min(start + 50, count)):
            settings = RowSettings(Sampler(float(rng.uniform(0, 2))), seed=index)
            engine.submit(Request(prompt_of(int(rng.integers(1, 30)), index), int(rng.integers(1, 5)), settings))
        run(engine)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_memory_is_flat(count):
    engine, rng = engine_of(), np.random.default_rng(1)
    serve(engine, count // 6, rng)
    arrays, pages = held()
    serve(engine, count - count // 6, rng)
    later_arrays, later_pages = held()
    assert later_arrays == arrays
    assert later_pages <= 1.05 * pages or count < 3000
    report = engine.report()
    assert (report.counts.finished, report.rows_in_use, report.waiting) == (count, 0, 0)
