"""chunk_scores and level_scores at their edges, and the fixed point of packed landmarks."""

import dataclasses

import jax
import kernel_calls
import kernel_truth
import numpy as np
import pytest
from few import one_of
from kernel_calls import chunk_scores, level_scores
from kernel_cases import PACKED_SCORES, SCORES, TOLERANCE, Heads, name, score_inputs
from level_cases import LEVELS, level_inputs, level_truth

from pallas_kernels import TwoLevels, landmark_products
from pallas_kernels.chunk_scores import kernel, packed
from pallas_kernels.products import gathered_products

KINDS = ("xla", "interpret")


def without_chunks(inputs, *names):
    return inputs | {key: np.asarray(inputs[key])[:, :, :0] for key in names}


STEP = "landmark_scale"
EDGES = {  # the op, its arguments, its definition, a large scale, and what is wild where there is no candidate
    "landmarks": ("chunk_scores", lambda: score_inputs(SCORES[0]), kernel_truth.chunk_scores, 1e4, ["landmarks"]),
    "packed": (
        "chunk_scores",
        lambda: score_inputs(PACKED_SCORES[1]),
        kernel_truth.chunk_scores,
        30,
        ["landmark_scale"],
    ),
    "levels": ("level_scores", lambda: level_inputs(LEVELS[4]), level_truth, 1e4, ["means", "details", "spread"]),
}


@pytest.mark.parametrize("case", EDGES)
def test_scores_of_large_logits_are_finite_and_do_not_depend_on_what_is_no_candidate(case):
    op, made, truth, scale, wild = EDGES[case]
    inputs = made() | {"scale": float(scale)}
    there = np.asarray(inputs["candidates"] if op == "chunk_scores" else (np.asarray(inputs["scores"]) >= 0).any(2))
    other = {}
    for key in wild:
        rows = np.asarray(inputs[key])
        known = there.repeat(rows.shape[2] // there.shape[2], axis=2)[..., None]
        other[key] = np.where(known, rows, rows.dtype.type(1e4))
    want = jax.tree.leaves(truth(**inputs))[0]
    for kind in KINDS:
        both = (getattr(kernel_calls, op)(**inputs | new, implementation=kind) for new in ({}, other))
        mine, same = map(jax.tree.leaves, both)
        np.testing.assert_allclose(mine[0], want, rtol=2e-2, atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, mine, same)


def test_no_chunks_at_all():
    inputs = score_inputs(dataclasses.replace(SCORES[0], rows=(1,)))
    assert chunk_scores(**without_chunks(inputs, "landmarks", "candidates")).shape == (2, 2, 1, 0)
    inputs = without_chunks(level_inputs(LEVELS[1]), "means", "details", "mean_scale", "detail_scale")
    got = level_scores(**inputs | {"scores": np.asarray(inputs["scores"])[..., :0]})
    assert got.scores.shape == got.ids.shape == (2, 2, 1, 0)


# Two levels


def test_equal_groups_are_chosen_in_turn():
    """Of five groups with equal scores the first three are chosen. A score of 0 counts as a candidate."""
    inputs = level_inputs(LEVELS[1]) | {"scores": np.zeros((2, 2, 1, 27), np.float32), "count": 3}
    for kind in KINDS:
        got = level_scores(**inputs, implementation=kind)
        assert (np.asarray(got.ids) == np.arange(12)).all()
        assert (np.asarray(got.scores) >= 0).all()


def test_a_gpu_s_products_are_those_of_all_machines():
    """The reference multiplies gathered landmarks in another way on a GPU."""
    rng, operands = np.random.default_rng(0), {}
    for dtype in ("float32", "bfloat16"):
        rows = rng.standard_normal((2, 3, 5, 16)).astype(dtype)
        operands[dtype] = (rows, rng.standard_normal((2, 3, 11, 16)).astype(dtype), None)
        for bits in (8, 4):
            codes, steps = rng.integers(0, 256, (2, 3, 11, 2 * bits)).astype(np.uint8), rng.random((2, 3, 11, 1))
            operands[f"{dtype}, {bits} bits"] = (rows, codes, steps.astype(np.float32))
    both = jax.jit(lambda every: {key: (gathered_products(*x), landmark_products(*x)) for key, x in every.items()})
    for key, (got, want) in both(operands).items():
        assert got.dtype == want.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=key)


def test_levels_are_a_pytree_of_their_arrays():
    levels = TwoLevels(*(np.zeros((1, 1, 2, width), np.float32) for width in (8, 24)))
    assert len(jax.tree.leaves(levels)) == 2
    assert levels.parts(8) == 4


# Packed landmarks: queries in fixed point, and programs that walk over several tiles of chunks


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("height", [4, 16])
def test_products_with_digits_are_exact(width, height):
    """Each digit is a byte, and each lane has the digits of its rows: 2, and 2 more after 8 columns."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-(2**30), 2**30, (height, width), np.int32, endpoint=True)
    numbers[0, :2], numbers[1, :4] = (2**30, -(2**30)), (127, 128, -128, -129)
    codes = rng.integers(-128, 127, (4, 4, 8, 4, width // 4), np.int8, endpoint=True)
    left, right = jax.jit(lambda codes, numbers: (packed.operand(codes), packed.digits_of(numbers)))(codes, numbers)
    assert left.dtype == right.dtype == np.int8
    got = np.asarray(left, np.int64) @ np.asarray(right, np.int64).T
    # Rows: [chunk / 2, warp, chunk % 2, group]. Columns: [rows / 4, upper or lower digits, 4 rows, 2 digits].
    got = got.reshape(2, 4, 2, 8, height // 4, 2, 4, 2)
    joined = np.einsum("cwagihjl,hl->cawgij", got, [[1, 256], [65536, 16777216]]).reshape(4, 4, 8, height)
    np.testing.assert_array_equal(joined, codes.reshape(4, 4, 8, width).astype(np.int64) @ numbers.astype(np.int64).T)


@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_queries_of_any_size(size):
    """A row's own largest number is the measure, so that a row of small numbers loses nothing beside a large one."""
    inputs = score_inputs(Heads((61,), 64, group=4, dtype="float32", bits=4))
    q, scale = np.asarray(inputs["q"]) * np.float32([1.0, 1e-3, 1e3, 1.0])[:, None], inputs["scale"]
    want = kernel_truth.chunk_scores(**inputs | {"q": q})
    got = chunk_scores(**inputs | {"q": q * np.float32(size), "scale": scale / size}, implementation="interpret")
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


def test_a_query_of_zeros_gives_all_landmarks_the_same_share():
    inputs = score_inputs(Heads((61,), 64, bits=8, dtype="bfloat16"))
    inputs |= {"q": np.zeros_like(inputs["q"]), "candidates": np.ones((1, 1, 61), bool)}
    np.testing.assert_allclose(chunk_scores(**inputs, implementation="interpret"), 1 / 61, rtol=1e-6)


WALKS = (
    Heads((300,), 64, group=4, kv_heads=2, dtype="bfloat16", bits=4, spread=True),
    Heads((515,), 32, group=5, queries=2, bits=8, parts=2),
)


@pytest.mark.parametrize("case", one_of(2, WALKS), ids=name)
def test_a_program_walks_over_tiles(case, monkeypatch):
    """Two programs walk over up to three tiles each. The last tiles lie partly or wholly past the last chunk."""
    monkeypatch.setattr(packed, "PROGRAMS", 1)
    monkeypatch.setattr(packed, "STEPS", 3)
    inputs = score_inputs(case)
    try:
        kernel.chunk_scores.clear_cache()
        got = chunk_scores(**inputs, implementation="interpret")
    finally:
        chunk_scores.clear_cache()
        kernel.chunk_scores.clear_cache()
    np.testing.assert_allclose(got, kernel_truth.chunk_scores(**inputs), **TOLERANCE["float32"])


def test_sizes_of_a_program():
    """Many tiles have long walks, and few tiles have many programs."""
    one_row, many_rows = ((8 * batch, 4, 15_356) for batch in (1, 37))
    assert packed.tile_of(1.0, 4, one_row, False).steps == 1
    assert packed.tile_of(1.0, 4, many_rows, False).steps == packed.STEPS
    assert packed.tile_of(1.0, 4, (8 * 5, 4, 15_356), False).block == 2 * packed.BLOCK
    for rows, height in ((1, 4), (4, 4), (5, 8), (9, 16), (40, 16)):
        assert packed.tile_of(1.0, 8, (1, rows, 100), False).rows == height, rows


def test_scores_do_not_depend_on_64_bit_types():
    inputs = score_inputs(PACKED_SCORES[7])
    want = chunk_scores(**inputs, implementation="interpret")
    with jax.enable_x64(True):
        np.testing.assert_array_equal(chunk_scores(**inputs, implementation="interpret"), want)
