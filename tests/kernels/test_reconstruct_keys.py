"""reconstruct_keys: the reference is compared with NumPy, and the kernel with both."""

import jax.numpy as jnp
import kernel_truth
import numpy as np
import pytest
from few import one_of
from kernel_calls import reconstruct_keys
from kernel_cases import CHUNKS, TOLERANCE, factor_inputs, name
from kernel_refs import watched  # noqa: F401, a fixture

from pallas_kernels.tiles import spans


@pytest.mark.parametrize("case", one_of(3, CHUNKS), ids=name)
def test_keys(case):
    inputs = factor_inputs(case)
    want = kernel_truth.reconstruct_keys(**inputs)
    for implementation in ("xla", "interpret"):
        got = reconstruct_keys(**inputs, implementation=implementation)
        assert got.dtype == inputs["left"].dtype
        np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE[case.dtype])


def test_factors_of_two_dtypes():
    """The basis may be float32 while the rows are bfloat16. It is not rounded."""
    inputs = factor_inputs(CHUNKS[5])
    inputs |= {key: np.asarray(inputs[key]).astype(jnp.bfloat16) for key in ("left", "tail")}
    for implementation in ("xla", "interpret"):
        got = reconstruct_keys(**inputs, implementation=implementation)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            kernel_truth.wide(got), kernel_truth.reconstruct_keys(**inputs), **TOLERANCE["bfloat16"]
        )


def test_everything_in_the_tail():
    """No chunk of a short prompt is compressed. The kernel refuses this case, and "auto" uses the reference."""
    inputs = factor_inputs(CHUNKS[2])
    ids = np.arange(28, dtype=np.int32).reshape(2, 2, 7) % 2
    inputs |= {"left": np.asarray(inputs["left"])[:, :0], "ids": ids}
    np.testing.assert_allclose(
        reconstruct_keys(**inputs), kernel_truth.reconstruct_keys(**inputs), **TOLERANCE["float32"]
    )
    with pytest.raises(NotImplementedError, match="empty"):
        reconstruct_keys(**inputs, implementation="pallas")


def test_no_ids_no_keys():
    inputs = factor_inputs(CHUNKS[1])
    assert reconstruct_keys(**inputs | {"ids": np.asarray(inputs["ids"])[:, :, :0]}).shape == (2, 1, 0, 64)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CHUNKS[i] for i in (2, 3)], ids=name)
def test_the_kernel_touches_nothing_beyond_its_arrays(case, watched):  # noqa: F811
    inputs = factor_inputs(case)
    got = reconstruct_keys(**inputs, implementation="interpret")
    np.testing.assert_allclose(kernel_truth.wide(got), kernel_truth.reconstruct_keys(**inputs), **TOLERANCE[case.dtype])
    [(keys,)] = watched
    ids = np.clip(inputs["ids"], 0, case.units + case.tail - 1)
    for b in range(case.batch):
        read = set(np.flatnonzero(keys.left.reads[b].any(axis=1)))
        assert read == {i for i in ids[b].ravel() if i < case.units}


@pytest.mark.parametrize("size", [1, 16, 20, 24, 40, 48, 64, 80, 96, 100, 120, 128, 160, 176, 192, 256])
def test_spans_hold_an_axis_without_much_waste(size):
    cut = spans(size)
    assert [start for start, _ in cut] == list(np.cumsum([0, *[width for _, width in cut]])[:-1])
    assert all(width in (16, 32, 64, 128) for _, width in cut)
    whole = sum(width for _, width in cut)
    assert size <= whole < max(size + 16, 1.25 * size)
