"""chunk_scores: the reference is compared with NumPy, and the kernel with both."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_truth
import numpy as np
import pytest
from few import one_of
from kernel_calls import chunk_scores
from kernel_cases import SCORES, TOLERANCE, name, score_inputs
from kernel_refs import watched  # noqa: F401, a fixture


@pytest.mark.parametrize("case", one_of(4, SCORES), ids=name)
def test_scores(case):
    inputs = score_inputs(case)
    want = kernel_truth.chunk_scores(**inputs)
    plain = chunk_scores(**inputs, implementation="xla")
    interpreted = chunk_scores(**inputs, implementation="interpret")
    assert plain.dtype == interpreted.dtype == jnp.float32
    for got in (plain, interpreted):
        np.testing.assert_allclose(got, want, **TOLERANCE["float32"])
    assert (want[-1, -1] == -1).all() == (case.batch * case.kv_heads > 1)


def test_scores_do_not_depend_on_what_is_no_candidate():
    inputs = score_inputs(SCORES[1])
    landmarks = np.asarray(inputs["landmarks"])
    wild = np.where(np.asarray(inputs["candidates"])[..., None], landmarks, landmarks.dtype.type(1e4))
    for implementation in ("xla", "interpret"):
        np.testing.assert_array_equal(
            chunk_scores(**inputs | {"landmarks": wild}, implementation=implementation),
            chunk_scores(**inputs, implementation=implementation),
        )


def test_scores_of_large_logits_are_finite():
    inputs = score_inputs(SCORES[0]) | {"scale": 1e4}
    for implementation in ("xla", "interpret"):
        got = chunk_scores(**inputs, implementation=implementation)
        np.testing.assert_allclose(got, kernel_truth.chunk_scores(**inputs), rtol=2e-2, atol=1e-5)


def test_no_chunks_at_all():
    inputs = score_inputs(dataclasses.replace(SCORES[0], rows=(1,)))
    none = inputs | {key: np.asarray(inputs[key])[:, :, :0] for key in ("landmarks", "candidates")}
    assert chunk_scores(**none).shape == (2, 2, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [SCORES[2], SCORES[5]], ids=name)
def test_the_kernel_reads_each_landmark_once_and_nothing_beyond(case, watched):  # noqa: F811
    inputs = score_inputs(case)
    got = chunk_scores(**inputs, implementation="interpret")
    np.testing.assert_allclose(got, kernel_truth.chunk_scores(**inputs), **TOLERANCE["float32"])
    (queries, chunks), _ = watched
    blocks = -(-case.queries * case.group // (16 if case.dtype == "float32" else 64))
    assert (chunks.landmarks.reads == blocks).all()
    assert (chunks.candidates.reads == blocks).all()
    assert (queries.reads == queries.reads[0, 0, 0, 0]).all()


def test_scores_inside_jit_with_a_mask_that_is_traced():
    inputs = score_inputs(SCORES[0])
    scale = inputs.pop("scale")
    got = jax.jit(lambda **x: chunk_scores(**x, scale=scale))(**inputs)
    np.testing.assert_array_equal(
        got, jax.jit(lambda **x: chunk_scores(**x, scale=scale, implementation="xla"))(**inputs)
    )
