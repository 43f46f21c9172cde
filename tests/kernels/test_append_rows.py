"""append_rows: the reference is compared with NumPy, and the kernel with both."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from append_cases import APPENDS, OTHER_DTYPES, append_call, append_inputs, append_truth
from few import one_of
from kernel_cases import TOLERANCE, name
from kernel_lowering import device_named
from kernel_refs import watched  # noqa: F401, a fixture

from pallas_kernels import NewTokens, append_rows

LIMITS = TOLERANCE | {"float16": {"rtol": 1e-3, "atol": 1e-3}}


def written(inputs):
    """Which slots of the buffer are written, bool [B, W]."""
    slots, valid = np.asarray(inputs["slots"]), np.asarray(inputs["valid"])
    batch, _, count, _ = inputs["k"].shape
    return np.stack([np.isin(np.arange(count), slots[b][valid[b]]) for b in range(batch)])


@pytest.mark.parametrize("case", one_of(4, APPENDS + OTHER_DTYPES), ids=name)
def test_appended_tokens(case):
    inputs = append_inputs(case)
    want, kept = append_truth(**inputs), ~written(inputs)
    made = {kind: append_call(**inputs, implementation=kind) for kind in ("xla", "interpret")}
    for kind, got in made.items():
        for mine, right, dtype in zip(got, want, (case.dtype, *[case.buffer or case.dtype] * 2), strict=True):
            assert mine.dtype == dtype
            np.testing.assert_allclose(np.asarray(mine, np.float64), right, **LIMITS[dtype], err_msg=kind)
        for mine, old in zip(got[1:], (inputs["k"], inputs["v"]), strict=True):
            mine, old = np.asarray(mine), np.asarray(old)
            for b, rows in enumerate(kept):  # all other slots have the same bits
                np.testing.assert_array_equal(mine[b][:, rows], old[b][:, rows], kind)
    # Values are copies, so both implementations write the same bits.
    np.testing.assert_array_equal(made["xla"][2], made["interpret"][2])


@pytest.mark.parametrize("case", one_of(2, APPENDS[:2]), ids=name)
def test_slots_that_are_counted_from_a_first_one(case):
    """Slots that are too large by `first` units give the same result."""
    inputs, first = append_inputs(case), np.arange(3, 3 + case.batch, dtype=np.int32)
    shifted = inputs | {"slots": np.asarray(inputs["slots"]) + 8 * first[:, None], "first": first, "unit": 8}
    for kind in ("xla", "interpret"):
        for got, want in zip(*(append_call(**x, implementation=kind) for x in (shifted, inputs)), strict=True):
            np.testing.assert_array_equal(got, want, kind)


def test_the_cases_skip_tokens_in_both_ways():
    """Some tokens are not valid, and the slots of some valid tokens are past the end."""
    every = [append_inputs(case) for case in APPENDS]
    assert any(not np.asarray(x["valid"]).all() for x in every)
    assert any((np.asarray(x["valid"]) & (np.asarray(x["slots"]) >= x["k"].shape[2])).any() for x in every)


@pytest.mark.parametrize("case", one_of(3, [APPENDS[i] for i in (0, 1, 4)]), ids=name)
def test_the_kernel_touches_only_what_it_needs(case, watched):  # noqa: F811
    inputs = append_inputs(case)
    append_call(**inputs, implementation="interpret")
    [(k, v, new)] = watched
    rows = written(inputs)[:, None, :, None]
    for buffer in (k, v):
        assert not buffer.reads.any()
        np.testing.assert_array_equal(buffer.writes, np.broadcast_to(rows, buffer.shape))
    slots, valid = np.asarray(inputs["slots"]), np.asarray(inputs["valid"])
    needed = np.ones(new.heads.shape, bool)  # all queries, and the keys and values of tokens that are written
    needed[:, :, case.kv_heads * case.group :] = (valid & (slots < case.slots))[..., None, None]
    np.testing.assert_array_equal(new.heads.reads, needed)


def test_donated_buffers_are_changed_in_place():
    inputs = append_inputs(APPENDS[0])
    fixed = {key: inputs.pop(key) for key in ("factor",)}
    for kind in ("xla", "auto"):
        step = jax.jit(
            lambda k, v, rest, kind=kind: append_call(k, v, **rest, **fixed, implementation=kind)[1:],
            donate_argnums=(0, 1),
        )
        k, v = (jnp.array(inputs[key]) for key in ("k", "v"))
        rest = {key: x for key, x in inputs.items() if key not in ("k", "v")}
        places = {x.unsafe_buffer_pointer() for x in (k, v)}
        assert {x.unsafe_buffer_pointer() for x in step(k, v, rest)} == places


def test_on_cuda_auto_is_the_kernel():
    inputs = append_inputs(APPENDS[0])
    fixed = {key: inputs.pop(key) for key in ("factor",)}
    with device_named("NVIDIA H200"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        traced = jax.jit(lambda x: append_call(**x, **fixed)).trace(inputs)
        assert "append_rows" in traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def small(**change):
    """Arguments of the op for one row and one head of 4 columns, with some fields of `new` changed."""
    row, table = zeros(1, 1, 1, 4), zeros(1, 1, 2)
    new = {"q": row, "k": row, "v": row, "cos": table, "sin": table}
    new |= {"slots": zeros(1, 1, dtype=np.int32), "valid": np.ones((1, 1), bool)}
    buffers = {"k": change.pop("buffer_k", row), "v": change.pop("buffer_v", row)}
    return {**buffers, "new": NewTokens(**new | change)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_k": zeros(1, 1, 4)}, r"k must have shape \[B, h_kv, W, d\]"),
        ({"buffer_v": zeros(1, 1, 2, 4)}, r"v must have shape \[1, 1, 1, 4\]"),
        ({"buffer_v": zeros(1, 1, 1, 4, dtype=jnp.bfloat16)}, "v must be float32"),
        ({"q": zeros(2, 1, 1, 4)}, r"new.q must have shape \[1, T, h_q, 4\]"),
        ({"buffer_k": zeros(1, 2, 1, 4), "buffer_v": zeros(1, 2, 1, 4)}, "multiple of the 2 KV heads"),
        ({"k": zeros(1, 2, 1, 4)}, r"new.k must have shape \[1, 1, 1, 4\]"),
        ({"v": zeros(1, 1, 1, 4, dtype=jnp.bfloat16)}, "new.v must be float32"),
        ({"sin": zeros(1, 1, 1)}, r"new.sin must have shape \[1, 1, 2\]"),
        ({"cos": zeros(1, 1, 2, dtype=jnp.bfloat16)}, "new.cos must be float32"),
        ({"cos": zeros(1, 1, 3), "sin": zeros(1, 1, 3)}, "new.cos must have at most 2 columns"),
        ({"slots": zeros(1, 2, dtype=np.int32)}, r"new.slots must have shape \[1, 1\]"),
        ({"valid": zeros(1, 1, dtype=np.int32)}, "new.valid must be bool"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        append_rows(**small(**change))


def test_what_the_kernel_refuses():
    with pytest.raises(ValueError, match="implementation must be one of"):
        append_rows(**small(), implementation="cuda")
    wide, row = zeros(1, 1, 1, 320), zeros(1, 1, 0, 4)
    with pytest.raises(NotImplementedError, match="up to 256 wide"):
        append_rows(**small(buffer_k=wide, buffer_v=wide, q=wide, k=wide, v=wide), implementation="pallas")
    with pytest.raises(NotImplementedError, match="empty"):
        append_rows(**small(buffer_k=row, buffer_v=row), implementation="pallas")
    queries, k, v = jax.jit(append_rows)(**small(buffer_k=row, buffer_v=row))
    assert k.shape == v.shape == row.shape
    assert queries.shape == (1, 1, 1, 4)
