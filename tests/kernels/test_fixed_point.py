"""Scores by packed landmarks: queries in fixed point, and programs that walk over several tiles of chunks."""

import jax
import kernel_truth
import numpy as np
import pytest
from few import one_of
from kernel_calls import chunk_scores
from kernel_cases import PACKED_SCORES, TOLERANCE, Heads, name, score_inputs
from kernel_refs import watched  # noqa: F401, a fixture

from pallas_kernels.chunk_scores import kernel, packed

WALKS = (
    Heads((300,), 64, group=4, kv_heads=2, dtype="bfloat16", bits=4, spread=True),
    Heads((515,), 32, group=5, queries=2, bits=8, parts=2),
)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("height", [4, 16])
def test_products_with_digits_are_exact(width, height):
    """Each digit is a byte, and each lane has the digits of its rows: 2, and 2 more after 8 columns."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-(2**30), 2**30, (height, width), np.int32, endpoint=True)
    numbers[0, :2], numbers[1, :4] = (2**30, -(2**30)), (127, 128, -128, -129)
    codes = rng.integers(-128, 127, (4, 4, 8, 4, width // 4), np.int8, endpoint=True)
    left, right = (jax.jit(f)(x) for f, x in ((packed.operand, codes), (packed.digits_of, numbers)))
    assert left.dtype == right.dtype == np.int8
    got = np.asarray(left, np.int64) @ np.asarray(right, np.int64).T
    # Rows: [chunk / 2, warp, chunk % 2, group]. Columns: [rows / 4, upper or lower digits, 4 rows, 2 digits].
    got = got.reshape(2, 4, 2, 8, height // 4, 2, 4, 2)
    joined = np.einsum("cwagihjl,hl->cawgij", got, [[1, 256], [65536, 16777216]]).reshape(4, 4, 8, height)
    rows = codes.reshape(4, 4, 8, width).astype(np.int64)
    np.testing.assert_array_equal(joined, rows @ numbers.astype(np.int64).T)


@pytest.mark.parametrize("size", [1e-18, 1.0, 1e18])
def test_queries_of_any_size(size):
    """A row's own largest number is the measure, so that a row of small numbers loses nothing beside a large one."""
    inputs = score_inputs(Heads((61,), 64, group=4, dtype="float32", bits=4))
    q = np.asarray(inputs["q"]) * np.float32([1.0, 1e-3, 1e3, 1.0])[:, None]
    want = kernel_truth.chunk_scores(**inputs | {"q": q})
    got = chunk_scores(
        **inputs | {"q": q * np.float32(size), "scale": inputs["scale"] / size}, implementation="interpret"
    )
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


def test_a_query_of_zeros_gives_all_landmarks_the_same_share():
    inputs = score_inputs(Heads((61,), 64, bits=8, dtype="bfloat16"))
    inputs |= {"q": np.zeros_like(inputs["q"]), "candidates": np.ones((1, 1, 61), bool)}
    np.testing.assert_allclose(chunk_scores(**inputs, implementation="interpret"), 1 / 61, rtol=1e-6)


@pytest.fixture
def walking(monkeypatch):
    """Two programs, which walk over up to three tiles each."""
    caches = (chunk_scores, kernel.chunk_scores)
    monkeypatch.setattr(packed, "PROGRAMS", 1)
    monkeypatch.setattr(packed, "STEPS", 3)
    for cached in caches:
        cached.clear_cache()
    yield
    for cached in caches:
        cached.clear_cache()


@pytest.mark.usefixtures("walking")
@pytest.mark.parametrize("case", one_of(2, WALKS), ids=name)
def test_a_program_walks_over_tiles(case):
    """The last tiles lie partly or wholly past the last chunk."""
    inputs = score_inputs(case)
    got = chunk_scores(**inputs, implementation="interpret")
    np.testing.assert_allclose(got, kernel_truth.chunk_scores(**inputs), **TOLERANCE["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("case", WALKS[:1], ids=name)
def test_a_walk_reads_each_landmark_once(case, watched, monkeypatch):  # noqa: F811
    monkeypatch.setattr(packed, "PROGRAMS", 1)
    monkeypatch.setattr(packed, "STEPS", 3 if case.rows[0] > 384 else 2)
    inputs = score_inputs(case)
    got = chunk_scores(**inputs, implementation="interpret")
    np.testing.assert_allclose(got, kernel_truth.chunk_scores(**inputs), **TOLERANCE["float32"])
    (_, chunks), (partial, _) = watched
    assert partial[1].shape[2] == 2
    assert (chunks.landmarks.reads == 1).all()


def test_many_tiles_have_long_walks_and_few_tiles_have_many_programs():
    one_row, many_rows = ((8 * batch, 4, 15_356) for batch in (1, 37))
    assert packed.tile_of(1.0, 4, one_row, False).steps == 1
    assert packed.tile_of(1.0, 4, many_rows, False).steps == packed.STEPS
    assert packed.tile_of(1.0, 4, (8 * 5, 4, 15_356), False).block == 2 * packed.BLOCK


@pytest.mark.parametrize(("rows", "height"), [(1, 4), (4, 4), (5, 8), (9, 16), (40, 16)])
def test_query_rows_of_a_program(rows, height):
    assert packed.tile_of(1.0, 8, (1, rows, 100), False).rows == height


def test_scores_do_not_depend_on_64_bit_types():
    inputs = score_inputs(PACKED_SCORES[7])
    want = chunk_scores(**inputs, implementation="interpret")
    with jax.enable_x64(True):
        np.testing.assert_array_equal(chunk_scores(**inputs, implementation="interpret"), want)
