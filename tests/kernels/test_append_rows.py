"""append_rows: the reference is compared with NumPy, and the kernel with both."""

import jax
import numpy as np
import pytest
from append_cases import APPENDS, OTHER_DTYPES, Appends, append_inputs, append_truth, written
from few import one_of
from kernel_calls import append_rows
from kernel_cases import TOLERANCE, name

LIMITS = TOLERANCE | {"float16": {"rtol": 1e-3, "atol": 1e-3}}
KINDS = ("xla", "interpret")


@pytest.mark.parametrize("case", one_of(4, APPENDS + OTHER_DTYPES), ids=name)
def test_appended_tokens(case):
    """Slots that are too large by `first` units give the same result: this is tried with several tokens."""
    inputs, first = append_inputs(case), np.arange(3, 3 + case.batch, dtype=np.int32)
    shifted = inputs | {"slots": np.asarray(inputs["slots"]) + 8 * first[:, None], "first": first, "unit": 8}
    want, kept, moved = append_truth(**inputs), ~written(inputs), case.tokens > 2 and case.buffer is None
    made = {kind: append_rows(**inputs, implementation=kind) for kind in KINDS}
    for kind, got in made.items():
        for mine, right, dtype in zip(got, want, (case.dtype, *[case.buffer or case.dtype] * 2), strict=True):
            assert mine.dtype == dtype
            np.testing.assert_allclose(np.asarray(mine, np.float64), right, **LIMITS[dtype], err_msg=kind)
        for mine, old in zip(got[1:], (inputs["k"], inputs["v"]), strict=True):
            mine, old = (np.asarray(x).swapaxes(1, 2)[kept] for x in (mine, old))
            np.testing.assert_array_equal(mine, old, kind)  # all other slots have the same bits
        if moved:
            for mine, same in zip(got, append_rows(**shifted, implementation=kind), strict=True):
                np.testing.assert_array_equal(mine, same, kind)
    # Values are copies, so both implementations write the same bits.
    np.testing.assert_array_equal(made["xla"][2], made["interpret"][2])


def test_the_cases_skip_tokens_in_both_ways():
    """Some tokens are not valid, and the slots of some valid tokens are past the end."""
    every = [append_inputs(case) for case in APPENDS]
    assert any(not np.asarray(x["valid"]).all() for x in every)
    assert any((np.asarray(x["valid"]) & (np.asarray(x["slots"]) >= x["k"].shape[2])).any() for x in every)


def test_donated_buffers_are_changed_in_place():
    inputs = append_inputs(APPENDS[0])
    factor, k, v = inputs.pop("factor"), *(jax.device_put(inputs.pop(key), may_alias=False) for key in ("k", "v"))
    step = jax.jit(lambda k, v, rest: append_rows(k, v, **rest, factor=factor)[1:], donate_argnums=(0, 1))
    places = {x.unsafe_buffer_pointer() for x in (k, v)}
    assert {x.unsafe_buffer_pointer() for x in step(k, v, inputs)} == places


def test_a_buffer_without_slots_is_left_to_xla():
    inputs = append_inputs(Appends(1, 4))
    row = np.zeros((1, 1, 0, 4), np.float32)
    queries, k, v = append_rows(**inputs | {"k": row, "v": row})
    assert k.shape == v.shape == row.shape
    assert queries.shape == (1, 1, 1, 4)
