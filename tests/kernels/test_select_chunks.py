"""select_chunks over several calls and at the edges, and the bits of its words as planes."""

import jax
import numpy as np
import pytest
from few import one_of
from kernel_calls import select_chunks
from kernel_cases import name
from selection_cases import SELECTIONS, Selections, calls_in_a_row, new_cache, selection_inputs, selection_truth

from pallas_kernels.select_chunks.planes import WORD, bit_planes, bits_of, reach

# Tiny caches, which the calls fill and then change often.
ROWS_OF_CALLS = (
    Selections(40, 6, batch=2),
    Selections(40, 6, 1.5, aged=True, batch=2, heads=2, levels=6, numbered=True),
    Selections(40, 6, 4, batch=2),  # more places than it uses
    Selections(40, 30, 1, aged=True, batch=2, absent=0.5),  # often fewer candidates than chunks to choose
)
KINDS = ("xla", "interpret")


@pytest.mark.parametrize("case", one_of(9, ROWS_OF_CALLS), ids=name)
def test_calls_in_a_row(case):
    """Each implementation gets the cache that its own last call returned."""
    caches, right = {kind: new_cache(case) for kind in KINDS}, new_cache(case)
    for call, inputs in enumerate(calls_in_a_row(case, 12)):
        want = selection_truth(**inputs, **right)
        right = {"resident": want.held, "ages": want.ages}
        for kind, cache in caches.items():
            got = select_chunks(**inputs, **cache, implementation=kind)
            for field, mine, wanted in zip(got._fields, got, want, strict=True):
                assert (mine is None) == (wanted is None)
                if mine is not None:
                    np.testing.assert_array_equal(mine, wanted, f"{field}, call {call}, {kind}")
            cache |= {"resident": got.held, "ages": got.ages}


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_is_not_chosen_for_long_keeps_the_largest_age(kind):
    """In the program of a case of test_definitions.py. Chunk 0 is the only candidate, and place 1 has it."""
    inputs = selection_inputs(SELECTIONS[4])
    scores, resident, ages = (np.array(inputs[key]) for key in ("scores", "resident", "ages"))
    scores[:], resident[:] = -1, -1
    scores[..., 0], resident[..., :2], ages[..., :2] = 0, (1, 0), (253, 7)
    numbers = np.broadcast_to(np.arange(scores.shape[2], dtype=np.int32), scores.shape)
    inputs |= {"scores": scores, "numbers": numbers, "resident": resident, "ages": ages, "asked": np.ones(1, bool)}
    for age in (254, 255, 255):
        chosen = select_chunks(**inputs, implementation=kind)
        assert chosen.ages[..., :2].tolist() == [[[age, 0]] * 2]
        assert chosen.held[..., :2].tolist() == [[[1, 0]] * 2]
        inputs |= {"resident": chosen.held, "ages": chosen.ages}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_are_zero_are_candidates(kind):
    """A softmax may underflow to 0. Such a chunk is chosen before one that may not be chosen."""
    scores = np.full((2, 1, 40), -1, np.float32)
    scores[:, 0, [0, 2, 3]] = 0, 0, 1e-45
    inputs = {"scores": scores, "asked": np.ones(2, bool), "count": 6, "numbers": None, **new_cache(ROWS_OF_CALLS[0])}
    got = jax.tree.map(np.asarray, select_chunks(**inputs, implementation=kind))
    assert got.ids[:, 0].tolist() == [[0, 2, 3, 0, 0, 0]] * 2
    assert got.places[:, 0].tolist() == [[0, 1, 2, 6, 6, 6]] * 2
    assert (got.total.tolist(), got.hits.tolist()) == ([[3]] * 2, [[0]] * 2)


# The bits of words, compared with the bits of Python's integers

EDGES = (0, -1, 1, -(2**31), 2**31 - 1, 0x55555555, -0x55555556)


def random_words(seed, *shape):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, shape).astype(np.int32)


def bits(word):
    return [int(word) >> place & 1 for place in range(WORD)]


def test_planes_are_the_transposed_bits():
    keys = random_words(0, WORD, 3)
    keys[:, 1] = -1
    planes = jax.jit(lambda keys: bit_planes(keys, interpret=True))(list(keys))
    planes = [np.asarray(plane) for plane in planes]
    for lane in range(3):
        rows = [bits(key) for key in keys[:, lane]]
        assert [bits(plane[lane]) for plane in planes] == np.transpose(rows).tolist()


def test_how_far_a_word_reaches_and_how_many_bits_it_has():
    words = np.concatenate([np.array([*EDGES, 7], np.int32), random_words(1, 5)]).repeat(32)
    most = np.tile(np.arange(32, dtype=np.int32), len(words) // 32)
    lows, counts = jax.jit(lambda words, most: (reach(words, most), bits_of(words)))(words, most)
    for word, number, low, count in zip(words, most, *map(np.asarray, (lows, counts)), strict=True):
        places = [place for place in range(WORD) if bits(word)[place]]
        assert low == (places[number] if number < len(places) else WORD - 1)
        assert count == len(places)
