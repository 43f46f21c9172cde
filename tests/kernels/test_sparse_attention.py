"""sparse_attention: the reference is compared with NumPy, and the kernel with both."""

import jax.numpy as jnp
import kernel_truth
import numpy as np
import pytest
from few import one_of
from kernel_calls import sparse_attention
from kernel_cases import ATTENTION, TOLERANCE, Heads, attention_inputs, name, normal
from kernel_refs import watched  # noqa: F401, a fixture
from random_arrays import array

from pallas_kernels.sparse_attention import kernel


@pytest.mark.parametrize("case", one_of(4, ATTENTION), ids=name)
def test_attention(case):
    inputs = attention_inputs(case)
    want = kernel_truth.sparse_attention(**inputs)
    for implementation in ("xla", "interpret"):
        got = sparse_attention(**inputs, implementation=implementation)
        assert got.dtype == inputs["q"].dtype
        np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE[case.dtype])
        if case.queries > 1:
            assert not np.asarray(got)[:, -1].any()  # the query that sees nothing


def test_rows_of_each_querys_own():
    """5-D and 4-D pieces together: "auto" uses the reference, and the kernel refuses them."""
    rng = np.random.default_rng(0)
    inputs = attention_inputs(Heads((27,), 64, group=2, queries=3, kv_heads=2))
    for dtype in ("float32", "bfloat16"):
        k, v = (normal(rng, 1, 2, 3, 5, 64, dtype=dtype) for _ in range(2))
        kind = jnp.dtype(dtype)
        pieces = [tuple(np.asarray(x).astype(kind) for x in inputs["pieces"][0][:2]) + inputs["pieces"][0][2:]]
        pieces.append((k, v, array(rng.random((1, 2, 3, 5)) < 0.6)))
        both = {"q": np.asarray(inputs["q"]).astype(kind), "pieces": pieces, "scale": 0.125}
        got = sparse_attention(**both)
        np.testing.assert_allclose(kernel_truth.wide(got), kernel_truth.sparse_attention(**both), **TOLERANCE[dtype])
        with pytest.raises(NotImplementedError, match="separate rows for each query"):
            sparse_attention(**both, implementation="pallas")


def test_a_mask_over_queries_only():
    """`valid` may have size 1 along the rows too."""
    inputs = attention_inputs(Heads((27,), 64, group=2, queries=3))
    k, v, _ = inputs["pieces"][0]
    valid = np.array([True, False, True]).reshape(1, 1, 3, 1)
    for implementation in ("xla", "interpret"):
        got = sparse_attention(inputs["q"], [(k, v, valid)], scale=0.1, implementation=implementation)
        want = kernel_truth.sparse_attention(inputs["q"], [(k, v, valid)], 0.1)
        np.testing.assert_allclose(got, want, **TOLERANCE["float32"])
        assert not np.asarray(got)[:, 1].any()


@pytest.mark.parametrize("dtype", one_of(2, ["float32", "bfloat16"]))
def test_flags_for_chunks_and_counts_of_rows(dtype):
    """`valid` may have a flag for every eight rows, or the number of rows that each query sees."""
    case, rng = Heads((72, 50, 61), 80, group=3, queries=3, kv_heads=2, batch=2, dtype=dtype), np.random.default_rng(0)
    inputs = attention_inputs(case)
    valid = [rng.random((2, 2, 3, 9)) < 0.5, rng.integers(0, 52, (2, 1, 3, 1), np.int32), np.full((1, 2, 1, 1), 7)]
    masks = [np.repeat(valid[0], 8, axis=3), np.arange(50) < valid[1], np.arange(61) < valid[2]]
    whole = [(k, v, array(mask)) for (k, v, _), mask in zip(inputs["pieces"], masks, strict=True)]
    inputs["pieces"] = [
        (k, v, array(x, None if x.dtype == bool else np.int32))
        for (k, v, _), x in zip(inputs["pieces"], valid, strict=True)
    ]
    want = kernel_truth.sparse_attention(inputs["q"], whole, inputs["scale"])
    np.testing.assert_array_equal(kernel_truth.sparse_attention(**inputs), want)
    for implementation in ("xla", "interpret"):
        got = sparse_attention(**inputs, implementation=implementation)
        np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE[dtype])


@pytest.mark.parametrize(("one", "other"), one_of(4, [(41, 7), (0, 61), (50, 0), (3, None), (None, 9)]))
def test_counts_that_are_single_numbers(one, other):
    """The kernel reads them from one array if there are several."""
    inputs = attention_inputs(Heads((50, 72, 61), 80, group=3, kv_heads=2))
    (first, flags, last), sizes, counts = inputs["pieces"], (50, 61), (one, other)
    first, last = (
        piece if count is None else (*piece[:2], np.full((1, 1, 1, 1), count, np.int32))
        for piece, count in zip((first, last), counts, strict=True)
    )
    masks = [
        piece[2] if count is None else (np.arange(size) < count)[None, None, None]
        for piece, count, size in zip((first, last), counts, sizes, strict=True)
    ]
    whole = [(*first[:2], masks[0]), flags, (*last[:2], masks[1])]
    want = kernel_truth.sparse_attention(inputs["q"], whole, inputs["scale"])
    inputs["pieces"] = [first, flags, last]
    for implementation in ("xla", "interpret"):
        got = sparse_attention(**inputs, implementation=implementation)
        np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE["float32"])


def test_pieces_without_rows_are_passed_over():
    inputs = attention_inputs(ATTENTION[0])
    k, v, valid = map(np.asarray, inputs["pieces"][0])
    none = (k[:, :, :0], v[:, :, :0], valid[..., :0])
    got = sparse_attention(inputs["q"], [none, (k, v, valid)], scale=0.1, implementation="interpret")
    np.testing.assert_array_equal(
        got, sparse_attention(inputs["q"], [(k, v, valid)], scale=0.1, implementation="interpret")
    )
    assert not np.asarray(sparse_attention(inputs["q"], [none], scale=0.1)).any()


def forget_programs():
    """Programs are compiled anew, with another constant of the kernel's file."""
    for cached in (kernel.sparse_attention, sparse_attention):
        cached.clear_cache()


def test_a_program_walks_several_blocks(monkeypatch):
    """With a large batch there are few splits. Each program loops over blocks, and the last one ends past the rows.

    With one program a head, no partial results are written. With five, the shorter piece ends before the last program.
    """
    inputs = attention_inputs(Heads((482, 61), 64, group=3))
    want = kernel_truth.sparse_attention(**inputs)
    for programs in (1, 2, 5):
        monkeypatch.setattr(kernel, "PROGRAMS", programs)
        forget_programs()
        got = sparse_attention(**inputs, implementation="interpret")
        np.testing.assert_allclose(got, want, **TOLERANCE["float32"])
    forget_programs()


@pytest.mark.slow
@pytest.mark.parametrize("case", [ATTENTION[2], ATTENTION[5]], ids=name)
def test_the_kernel_reads_each_row_once_and_nothing_beyond(case, watched):  # noqa: F811
    inputs = attention_inputs(case)
    got = sparse_attention(**inputs, implementation="interpret")
    np.testing.assert_allclose(kernel_truth.wide(got), kernel_truth.sparse_attention(**inputs), **TOLERANCE[case.dtype])
    blocks = -(-case.queries * case.group // (16 if case.dtype == "float32" else 64))
    q, pieces = watched[0]
    assert q.array.shape == inputs["q"].shape
    assert len(pieces) == len(case.rows)
    for piece in pieces:
        assert (piece.k.reads == blocks).all()
        assert (piece.v.reads == blocks).all()
    for partial in watched[1:]:  # the merge reads each partial result once, and the statistics once for each tile
        assert (partial[0].reads == 1).all()
