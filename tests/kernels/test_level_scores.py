"""level_scores: the reference is compared with NumPy, and the kernel with both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few import one_of
from kernel_calls import level_scores
from kernel_cases import TOLERANCE, name
from kernel_refs import watched  # noqa: F401, a fixture
from level_cases import LEVELS, level_inputs, level_truth

from pallas_kernels import TwoLevels, landmark_products
from pallas_kernels.level_scores.kernel import MOST, MOST_PARTS
from pallas_kernels.products import gathered_products


def check(got, want):
    np.testing.assert_array_equal(got.ids, want[1])
    np.testing.assert_array_equal(np.asarray(got.scores) == -1, want[0] == -1)
    np.testing.assert_allclose(got.scores, want[0], **TOLERANCE["float32"])


@pytest.mark.parametrize("case", one_of(6, LEVELS), ids=name)
def test_scores(case):
    """The chosen chunks are equal, also where groups have equal scores, and where there are few candidates or none."""
    inputs = level_inputs(case)
    want = level_truth(**inputs)
    for implementation in ("xla", "interpret"):
        got = level_scores(**inputs, implementation=implementation)
        assert got.scores.dtype == jnp.float32
        assert got.ids.dtype == jnp.int32
        check(got, want)
    assert (want[0][-1, -1] == -1).all() == (case.batch * case.kv_heads > 1)


def test_scores_do_not_depend_on_what_is_no_candidate():
    inputs = level_inputs(LEVELS[4])
    there = (np.asarray(inputs["scores"]) >= 0).any(axis=2)[..., None]
    wild = {key: np.where(there, inputs[key], np.float32(1e4)) for key in ("means", "details", "spread")}
    for implementation in ("xla", "interpret"):
        mine, same = (level_scores(**inputs | new, implementation=implementation) for new in ({}, wild))
        np.testing.assert_array_equal(mine.ids, same.ids)
        np.testing.assert_array_equal(mine.scores, same.scores)


def test_scores_of_large_logits_are_finite():
    inputs = level_inputs(LEVELS[1]) | {"scale": 1e4}
    for implementation in ("xla", "interpret"):
        got = level_scores(**inputs, implementation=implementation)
        np.testing.assert_allclose(got.scores, level_truth(**inputs)[0], rtol=2e-2, atol=1e-5)


def test_no_chunks_at_all():
    inputs = level_inputs(LEVELS[1])
    none = {key: np.asarray(inputs[key])[:, :, :0] for key in ("means", "details", "mean_scale", "detail_scale")}
    got = level_scores(**inputs | none | {"scores": np.asarray(inputs["scores"])[..., :0]})
    assert got.scores.shape == got.ids.shape == (2, 2, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [LEVELS[1], LEVELS[4]], ids=name)
def test_the_kernel_reads_the_landmarks_of_chosen_chunks_once_and_nothing_beyond(case, watched):  # noqa: F811
    inputs = level_inputs(case)
    got = level_scores(**inputs, implementation="interpret")
    check(got, level_truth(**inputs))
    _, (operands, _), _ = watched  # the kernels that choose groups, score their chunks and complete the softmax
    _, scores, levels = operands
    times = np.zeros(scores.shape[:2] + scores.shape[3:], int)
    for b, h, t, place in np.argwhere(np.asarray(got.scores) >= 0):
        times[b, h, got.ids[b, h, t, place]] += 1
    for rows in (levels.means, levels.details):
        assert (rows.reads.reshape(*times.shape, -1) == times[..., None]).all()
    for numbers in (levels.mean_scale, levels.detail_scale, levels.spread):  # read by several lanes at once
        if numbers is not None:
            assert ((numbers.reads.reshape(*times.shape, -1) > 0) == (times > 0)[..., None]).all()


def test_equal_groups_are_chosen_in_turn():
    """Of five groups with equal scores the first three are chosen. A score of 0 counts as a candidate."""
    inputs = level_inputs(LEVELS[1]) | {"scores": np.zeros((2, 2, 1, 27), np.float32), "count": 3}
    for implementation in ("xla", "interpret"):
        got = level_scores(**inputs, implementation=implementation)
        assert (np.asarray(got.ids) == np.arange(12)).all()
        assert (np.asarray(got.scores) >= 0).all()


def test_what_the_kernel_refuses():
    inputs = level_inputs(LEVELS[4]) | {"implementation": "pallas"}
    many = {key: np.zeros((*x.shape[:2], MOST + 1, x.shape[3]), x.dtype) for key, x in inputs.items() if key in MARKS}
    with pytest.raises(NotImplementedError, match=f"up to {MOST} chunks"):
        level_scores(**inputs | many | {"scores": np.zeros((2, 1, 3, MOST + 1), np.float32)})
    parts = 2 * MOST_PARTS
    more = {"details": (2, 1, 33, 80 * (parts - 1)), "spread": (2, 1, 33, parts)}
    more = {key: np.zeros(shape, np.float32) for key, shape in more.items()}
    with pytest.raises(NotImplementedError, match=f"up to {MOST_PARTS} landmarks a chunk"):
        level_scores(**inputs | more)
    assert level_scores(**inputs | more | {"implementation": "auto"}).scores.shape == (2, 1, 3, 8)
    packed = level_inputs(LEVELS[-1]) | {"implementation": "pallas", "q": np.zeros((1, 1, 17, 64), np.float32)}
    with pytest.raises(NotImplementedError, match="up to 16 query heads a KV head, got 17"):
        level_scores(**packed)


MARKS = ("means", "details", "spread")
WRONG = [
    ("q", lambda x: x[0], r"q must have shape \[B, T, h_q, d\]"),
    ("scores", lambda x: x[:, :, 0], r"scores must have shape \[2, h_kv, 3, n\]"),
    ("scores", lambda x: x.astype(jnp.bfloat16), "scores must be float32"),
    ("means", lambda x: x[:, :, 1:], r"means must have shape \[2, 1, 33, w\]"),
    ("means", lambda x: x[..., 1:], "means must have whole rows of 80 numbers, got 79 columns"),
    ("means", lambda x: np.concatenate([x, x], axis=3), "means must have one row of 80 numbers"),
    ("means", lambda x: x.astype(int), "means must be floating"),
    ("details", lambda x: x[..., 1:], "details must have whole rows of 80 numbers, got 239 columns"),
    ("details", lambda x: x[..., 80:], "a power of two of landmarks, and at least 2, got 3"),
    ("mean_scale", lambda x: np.ones((2, 1, 33, 1), np.float32), "means must be uint8"),
    ("spread", lambda x: x[..., 1:], r"spread must have shape \[2, 1, 33, 4\]"),
    ("spread", lambda x: x.astype(int), "spread must be floating"),
    ("count", lambda x: 0, "count and size must be at least 1, got 0 and 4"),
]


@pytest.mark.parametrize(("argument", "change", "message"), WRONG)
def test_wrong_arguments(argument, change, message):
    inputs = level_inputs(LEVELS[4])
    given = inputs.get(argument)
    given = np.asarray(given) if isinstance(given, jax.Array) else given
    with pytest.raises(ValueError, match=message):
        level_scores(**inputs | {argument: change(given)})


def test_packed_rows_fit_their_scales():
    inputs = {key: np.asarray(x) if isinstance(x, jax.Array) else x for key, x in level_inputs(LEVELS[0]).items()}
    with pytest.raises(ValueError, match="details must have whole rows of 128 numbers, got 191 columns"):
        level_scores(**inputs | {"details": inputs["details"][..., 1:]})
    with pytest.raises(ValueError, match=r"the scale of details must have shape \[1, 2, 61, r\]"):
        level_scores(**inputs | {"detail_scale": inputs["detail_scale"][:, :, 1:]})
    with pytest.raises(ValueError, match="means and details must both have a scale, or neither"):
        level_scores(**inputs | {"details": np.zeros((1, 2, 61, 384), np.float32), "detail_scale": None})
    twice = np.repeat(inputs["mean_scale"], 2, axis=3)
    with pytest.raises(ValueError, match="means must have one scale for each chunk, got 2"):
        level_scores(**inputs | {"mean_scale": twice})


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_s_products_are_those_of_all_machines(bits, dtype):
    """The reference multiplies gathered landmarks in another way on a GPU."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 3, 5, 16)).astype(dtype)
    numbers, step = rng.standard_normal((2, 3, 11, 16)).astype(dtype), None
    if bits is not None:
        numbers = rng.integers(0, 256, (2, 3, 11, 2 * bits)).astype(np.uint8)
        step = rng.random((2, 3, 11, 1)).astype(np.float32)
    got, want = (jax.jit(function)(rows, numbers, step) for function in (gathered_products, landmark_products))
    assert got.dtype == want.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_levels_are_a_pytree_of_their_arrays():
    levels = TwoLevels(*(np.zeros((1, 1, 2, width), np.float32) for width in (8, 24)))
    assert len(jax.tree.leaves(levels)) == 2
    assert levels.parts(8) == 4
