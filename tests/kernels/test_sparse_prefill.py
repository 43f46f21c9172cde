"""sparse_prefill: the reference is compared with NumPy, and the kernel with both."""

import kernel_truth
import numpy as np
import pytest
from kernel_cases import TOLERANCE
from kernel_refs import watched  # noqa: F401, a fixture
from prefill_cases import Prompt, inputs_of, truth

from pallas_kernels import sparse_prefill

CASES = {
    "plain": Prompt(64),
    "padding": Prompt(80, 3, 1, 16, 5, 1, (23, 96), 96),
    "masks": Prompt(96, 4, 1, 16, 4, 0, (64, 50), 64, masks=True),
    "short_keys": Prompt(128, 1, 2, 32, 2, 1, (90,), 90, "bfloat16"),
    "wide": Prompt(256, 8, 1, 64, 1, 1, (100,), 128, "bfloat16", masks=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lists_of_keys(case):
    inputs = inputs_of(case)
    want = truth(**inputs)
    for implementation in ("xla", "interpret"):
        got = sparse_prefill(**inputs, implementation=implementation)
        assert got.dtype == inputs["q"].dtype
        np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE[case.dtype])
