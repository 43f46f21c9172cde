"""Every op equals its definition in NumPy, element by element: the reference in XLA, and the kernel."""

import jax
import kernel_calls
import kernel_truth
import numpy as np
import pytest
from few import quick
from gpu.kernels import OPS, Op
from kernel_cases import ATTENDED, CHUNKS, TOLERANCE, attend_inputs, factor_inputs, name
from prefill_cases import PROMPTS, prefill_inputs, prefill_truth

from pallas_kernels import in_host_memory

MORE = {
    "attend_chunks": Op(ATTENDED, (), attend_inputs, kernel_calls.attend_chunks, kernel_truth.attend_chunks),
    "sparse_prefill": Op(PROMPTS, (), prefill_inputs, kernel_calls.sparse_prefill, prefill_truth),
}
# append_rows has a test of its own, which also compares bits. These cases of the others are quick.
EVERY = {key: op for key, op in (OPS | MORE).items() if key != "append_rows"}
QUICK = {"chunk_scores": (0, 4), "sparse_attention": (0, 4), "sparse_prefill": (0, 3), "attend_chunks": (0, 15)}
QUICK |= {"reconstruct_keys": (0, 3, 6), "fetch_reconstruct": (0, 6), "select_chunks": (4,), "level_scores": (0, 6)}
QUICK |= {"packed landmarks": (0, 6), "packed keys": (0, 6, 12), "packed fetch": (0, 6, 12)}
CASES = [(key, case) for key, op in EVERY.items() for case in op.cases]
CHOSEN = [(key, EVERY[key].cases[index]) for key, indices in QUICK.items() for index in indices]


def compare(got, want, *, dtype, exact=False, of_weights=False):
    """Compare with the tolerance of a dtype. Whole numbers, 0 and -1 (no candidate) must be exact."""
    assert got.dtype == dtype
    got, want = kernel_truth.wide(got), kernel_truth.wide(want)
    near = TOLERANCE.get(dtype, {"rtol": 0, "atol": 0})
    if of_weights:  # weights are rounded too
        near = 1e-5 if dtype == "float32" else 2e-2
        near = {"rtol": near, "atol": near * np.abs(want).max()}
    np.testing.assert_allclose(got, want, **{"rtol": 0, "atol": 0} if exact else near)
    fixed = (want == 0) | (want == -1)
    np.testing.assert_array_equal(got[fixed], want[fixed])


@pytest.mark.parametrize(("key", "case"), quick(CHOSEN, CASES), ids=name)
def test_an_op_is_its_definition(key, case):
    op, inputs = EVERY[key], EVERY[key].inputs(case)
    want = jax.tree.leaves(op.truth(**inputs))
    for implementation in ("xla", "interpret"):
        got = jax.tree.leaves(op.call(**inputs, implementation=implementation))
        for index, (mine, right) in enumerate(zip(got, want, strict=True)):
            whole = np.issubdtype(right.dtype, np.integer)
            dtype = "int32" if whole else "float32" if op.scores else case.dtype
            moved = op.moved and index == 1  # values are copies
            compare(mine, right, dtype=dtype, exact=moved, of_weights=key == "attend_chunks")
            assert not in_host_memory(mine)
    if op.scores:  # a row and head without candidates is among the cases
        assert (want[0][-1, -1] == -1).all() == (case.batch * case.kv_heads > 1)


def test_factors_of_two_dtypes():
    """The basis may be float32 while the rows are bfloat16. It is not rounded."""
    inputs = factor_inputs(CHUNKS[5])
    inputs |= {key: np.asarray(inputs[key]).astype("bfloat16") for key in ("left", "tail")}
    for implementation in ("xla", "interpret"):
        got = kernel_calls.reconstruct_keys(**inputs, implementation=implementation)
        compare(got, kernel_truth.reconstruct_keys(**inputs), dtype="bfloat16")
