"""select_chunks: the reference is compared with plain Python, and the kernel with both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few import one_of, quick
from kernel_cases import name
from kernel_refs import watched  # noqa: F401, a fixture
from selection_cases import (
    SELECTIONS,
    Selections,
    calls_in_a_row,
    new_cache,
    selection_inputs,
    selection_truth,
)

from pallas_kernels import Chosen, select_chunks
from pallas_kernels.select_chunks.kernel import MOST

# Tiny caches, which the calls fill and then change often.
ROWS_OF_CALLS = (
    Selections(40, 6, batch=2),
    Selections(40, 6, 1.5, aged=True, batch=2, levels=6),
    Selections(40, 6, 2, aged=True, batch=2, heads=2, numbered=True),
    Selections(40, 6, 4, aged=True, batch=2),
    Selections(40, 6, 4, batch=2),  # more places than it uses
    Selections(40, 30, 1, aged=True, batch=2, absent=0.5),  # often fewer candidates than chunks to choose
)

choose = jax.jit(select_chunks, static_argnames=("count", "implementation"))  # one program, not one for each operation


def assert_same(got: Chosen, want: Chosen, told: object) -> None:
    """Compare all fields of two results. `told` describes the case in the message."""
    for field, mine, right in zip(Chosen._fields, got, want, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert mine.dtype == jnp.int32
            np.testing.assert_array_equal(mine, right, f"{field}, {told}")


@pytest.mark.parametrize("case", quick([SELECTIONS[4]], SELECTIONS), ids=name)
def test_chosen_chunks(case):
    inputs = selection_inputs(case)
    want = selection_truth(**inputs)
    for implementation in ("xla", "interpret"):
        assert_same(choose(**inputs, implementation=implementation), want, implementation)


@pytest.mark.parametrize("case", one_of(9, ROWS_OF_CALLS), ids=name)
def test_calls_in_a_row(case):
    """Each implementation gets the cache that its own last call returned."""
    caches = {implementation: new_cache(case) for implementation in ("xla", "interpret")}
    right = new_cache(case)
    for call, inputs in enumerate(calls_in_a_row(case, 12)):
        want = selection_truth(**inputs, **right)
        right = {"resident": want.held, "ages": want.ages}
        for implementation, cache in caches.items():
            got = choose(**inputs, **cache, implementation=implementation)
            assert_same(got, want, (call, implementation))
            cache |= {"resident": got.held, "ages": got.ages}


def test_a_chunk_that_is_not_chosen_for_long_keeps_the_largest_age():
    scores, asked = np.float32([[[0, -1]]]), np.ones(1, bool)
    for implementation in ("xla", "interpret"):
        cache = {"resident": np.int32([[[1, 0]]]), "ages": np.int32([[[253, 7]]])}
        for age in (254, 255, 255):
            chosen = choose(scores, asked, count=1, **cache, implementation=implementation)
            assert chosen.ages.tolist() == [[[age, 0]]]
            assert chosen.held.tolist() == [[[1, 0]]]
            cache = {"resident": chosen.held, "ages": chosen.ages}


@pytest.mark.slow
@pytest.mark.parametrize("case", [SELECTIONS[i] for i in (0, 4, 6)], ids=name)
def test_the_kernel_touches_nothing_beyond_its_arrays(case, watched):  # noqa: F811
    inputs = selection_inputs(case)
    assert_same(choose(**inputs, implementation="interpret"), selection_truth(**inputs), "watched")
    [(candidates,)] = watched
    # Each score is read once, if the row is asked.
    assert (candidates.scores.reads == np.asarray(inputs["asked"])[:, None, None]).all()


def test_scores_that_are_zero_are_candidates():
    """A softmax may underflow to 0. Such a chunk is chosen before one that may not be chosen."""
    scores = np.float32([[[0.0, -1.0, 0.0, 1e-45, -1.0]]] * 3)
    cache = np.full((3, 1, 9), -1, np.int32)
    for implementation in ("xla", "interpret"):
        got = choose(scores, np.ones(3, bool), cache, count=5, implementation=implementation)
        got = jax.tree.map(np.asarray, got)
        assert got.ids[:, 0].tolist() == [[0, 2, 3, 0, 0]] * 3
        assert got.places[:, 0].tolist() == [[0, 1, 2, 9, 9]] * 3
        assert (got.total.tolist(), got.hits.tolist()) == ([[3]] * 3, [[0]] * 3)


def test_what_the_kernel_refuses():
    few = {"asked": np.ones(1, bool), "resident": np.zeros((1, 1, 2), np.int32), "implementation": "pallas"}
    with pytest.raises(NotImplementedError, match=f"up to {MOST} candidates"):
        choose(np.zeros((1, 1, MOST + 1), np.float32), count=2, **few)
    with pytest.raises(NotImplementedError, match="empty"):
        choose(np.zeros((1, 1, 4), np.float32), count=0, **few)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": np.zeros((1, 1, 4), jnp.bfloat16)}, "scores must be float32"),
        ({"asked": np.ones(2, bool)}, r"asked must have shape \[1\]"),
        ({"resident": np.zeros((1, 2, 3), np.int32)}, r"resident must have shape \[1, 1, P\]"),
        ({"ages": np.zeros((1, 1, 4), np.int32)}, r"ages must have shape \[1, 1, 3\]"),
        ({"ages": np.zeros((1, 1, 3), np.float32)}, "ages must be int32"),
        ({"numbers": np.zeros((1, 1, 3), np.int32)}, r"numbers must have shape \[1, 1, 4\]"),
        ({"count": 4}, "count must be 0 to 3"),
        ({"implementation": "cuda"}, "implementation must be one of"),
    ],
)
def test_wrong_arguments(change, message):
    right = {"scores": np.zeros((1, 1, 4), np.float32), "asked": np.ones(1, bool)}
    right["resident"] = np.zeros((1, 1, 3), np.int32)
    with pytest.raises(ValueError, match=message):
        choose(**right | {"count": 2} | change)
