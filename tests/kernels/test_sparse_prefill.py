"""sparse_prefill: the reference is compared with NumPy, and the kernel with both."""

import kernel_truth
import numpy as np
import pytest
from few import one_of
from kernel_calls import sparse_prefill
from kernel_cases import TOLERANCE
from kernel_refs import watched  # noqa: F401, a fixture
from prefill_cases import Prompt, inputs_of, truth

CASES = {
    "plain": Prompt(64),
    "padding": Prompt(80, 3, 1, 16, 5, 1, (23, 96), 96),
    "masks": Prompt(96, 4, 1, 16, 4, 0, (64, 50), 64, masks=True),
    "short_keys": Prompt(128, 1, 2, 32, 2, 1, (90,), 90, "bfloat16"),
    "wide": Prompt(256, 8, 1, 64, 1, 1, (100,), 128, "bfloat16", masks=True),
}


@pytest.mark.parametrize("case", one_of(3, CASES.values()), ids=CASES)
def test_lists_of_keys(case):
    inputs = inputs_of(case)
    want = truth(**inputs)
    for implementation in ("xla", "interpret"):
        got = sparse_prefill(**inputs, implementation=implementation)
        assert got.dtype == inputs["q"].dtype
        np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE[case.dtype])


@pytest.mark.slow
def test_the_kernel_reads_what_the_lists_say_and_nothing_beyond(watched):  # noqa: F811
    """Each program reads the valid numbers of its lists, and the rows of these keys once."""
    case = Prompt(16, 3, 2, 32, 2, 1, (90, 32, 70), 90, "bfloat16")
    inputs = inputs_of(case)
    got = sparse_prefill(**inputs, implementation="interpret")
    np.testing.assert_allclose(kernel_truth.wide(got), truth(**inputs), **TOLERANCE["bfloat16"])
    _, keys, lists, _ = watched[0]
    want = np.zeros((3, 90, 2), int)
    for b, h, i in np.ndindex(3, 6, 2):
        begun = 32 * (1 + i) < case.lengths[b]
        counts = [int(x.array[b, h, i]) * begun for x in (lists.block_counts, lists.column_counts)]
        for ids, count in zip((lists.blocks, lists.columns), counts, strict=True):
            assert (ids.reads[b, h, i] == (np.arange(ids.shape[3]) < count)).all()
        for number in lists.blocks.array[b, h, i, : counts[0]]:
            want[b, 32 * number : 32 * (number + 1), h // 3] += 1
        np.add.at(want[b, :, h // 3], lists.columns.array[b, h, i, : counts[1]], 1)
    for rows in (keys.k, keys.v):
        np.testing.assert_array_equal(rows.reads, np.broadcast_to(want[..., None], rows.shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": np.zeros((1, 1, 3, 2), np.int32)}, "whole number of queries for each of the 3 query blocks"),
        ({"blocks": np.zeros((1, 1, 2, 2), np.float32)}, "blocks must be int32, got float32"),
        ({"columns": np.zeros((1, 2, 2, 2), np.int32)}, r"columns must have shape \[1, 1, 2, C\]"),
        ({"diagonals": np.ones((1, 1, 128), bool)}, "diagonals and in_column belong together"),
    ],
)
def test_wrong_lists_are_refused(change, message):
    inputs = inputs_of(CASES["plain"])
    with pytest.raises(ValueError, match=message):
        sparse_prefill(**inputs | {"lists": inputs["lists"]._replace(**change)})


def test_blocks_of_other_sizes_are_for_the_reference():
    inputs = inputs_of(Prompt(16, block=24, count=1, lengths=(24,), tokens=24))
    with pytest.raises(NotImplementedError, match="16, 32, 64 or 128 queries, got 24"):
        sparse_prefill(**inputs, implementation="interpret")
    np.testing.assert_allclose(sparse_prefill(**inputs), truth(**inputs), **TOLERANCE["float32"])
