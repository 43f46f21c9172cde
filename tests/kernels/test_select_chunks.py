"""select_chunks: the reference is compared with plain Python, and the kernel with both."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import name
from kernel_refs import watched  # noqa: F401, a fixture
from selection_cases import SELECTIONS, selection_inputs, selection_truth

from pallas_kernels import select_chunks
from pallas_kernels.select_chunks.kernel import MOST


@pytest.mark.parametrize("case", SELECTIONS, ids=name)
def test_chosen_chunks(case):
    inputs = selection_inputs(case)
    want = selection_truth(**inputs)
    for implementation in ("xla", "interpret"):
        got = select_chunks(**inputs, implementation=implementation)
        for mine, right in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, right, implementation)


@pytest.mark.parametrize("case", SELECTIONS[:4], ids=name)
def test_the_kernel_touches_nothing_beyond_its_arrays(case, watched):  # noqa: F811
    inputs = selection_inputs(case)
    got = select_chunks(**inputs, implementation="interpret")
    for mine, right in zip(got, selection_truth(**inputs), strict=True):
        np.testing.assert_array_equal(mine, right)
    [(candidates,)] = watched
    # Each score is read once, if the row is asked.
    assert (candidates.scores.reads == np.asarray(inputs["asked"])[:, None, None]).all()


def test_scores_that_are_zero_are_candidates():
    """A softmax may underflow to 0. Such a chunk is chosen before one that may not be chosen."""
    scores = jnp.asarray([[[0.0, -1.0, 0.0, 1e-45, -1.0]]] * 3, jnp.float32)
    for implementation in ("xla", "interpret"):
        got = select_chunks(
            scores, jnp.ones(3, bool), jnp.full((3, 1, 9), -1, jnp.int32), implementation=implementation
        )
        assert np.asarray(got.ids)[:, 0, :3].tolist() == [[0, 2, 3]] * 3
        assert np.asarray(got.valid)[:, 0].tolist() == [[True] * 3 + [False] * 6] * 3
        assert np.asarray(got.counts).tolist() == [[[3, 0]]] * 3


def test_what_the_kernel_refuses():
    few = {"asked": jnp.ones(1, bool), "resident": jnp.zeros((1, 1, 2), jnp.int32), "implementation": "pallas"}
    with pytest.raises(NotImplementedError, match=f"up to {MOST} candidates"):
        select_chunks(jnp.zeros((1, 1, MOST + 1)), **few)
    with pytest.raises(NotImplementedError, match="empty"):
        select_chunks(jnp.zeros((1, 1, 4)), few["asked"], jnp.zeros((1, 1, 0), jnp.int32), implementation="pallas")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": jnp.zeros((1, 1, 4), jnp.bfloat16)}, "scores must be float32"),
        ({"asked": jnp.ones(2, bool)}, r"asked must have shape \[1\]"),
        ({"resident": jnp.zeros((1, 2, 3), jnp.int32)}, r"resident must have shape \[1, 1, k\]"),
        ({"numbers": jnp.zeros((1, 1, 3), jnp.int32)}, r"numbers must have shape \[1, 1, 4\]"),
        ({"implementation": "cuda"}, "implementation must be one of"),
    ],
)
def test_wrong_arguments(change, message):
    right = {"scores": jnp.zeros((1, 1, 4)), "asked": jnp.ones(1, bool), "resident": jnp.zeros((1, 1, 3), jnp.int32)}
    with pytest.raises(ValueError, match=message):
        select_chunks(**right | change)
