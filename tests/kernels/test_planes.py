"""The bits of 32 numbers as planes, compared with the bits of Python's integers."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.select_chunks.planes import SIDE, WORD, bit_planes, bits_of, first_bits, reach

EDGES = (0, -1, 1, -(2**31), 2**31 - 1, 0x55555555, -0x55555556)


def random_words(seed, *shape):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, shape).astype(np.int32)


def bits(word):
    return [int(word) >> place & 1 for place in range(WORD)]


def test_planes_are_the_transposed_bits():
    tiles = random_words(0, WORD // SIDE, 3, SIDE)
    tiles[:, 1] = -1
    planes = bit_planes([jnp.asarray(tile) for tile in tiles])
    for lane in range(3):
        rows = [bits(key) for key in tiles[:, lane].reshape(-1)]
        assert [bits(plane[lane]) for plane in planes] == np.transpose(rows).tolist()


def test_the_first_bits_of_a_word():
    words = np.concatenate([np.array(EDGES, np.int32), random_words(1, 5)]).repeat(36)
    most = np.tile(np.arange(-1, 35, dtype=np.int32), len(words) // 36)
    kept, size = first_bits(jnp.asarray(words), jnp.asarray(most)), reach(jnp.asarray(words), jnp.asarray(most))
    for word, number, got, low in zip(words, most, np.asarray(kept), np.asarray(size), strict=True):
        places = [place for place in range(WORD) if bits(word)[place]]
        assert [place for place in range(WORD) if bits(got)[place]] == places[: max(number, 0)]
        if 0 <= number < len(places):
            assert low == places[number]


def test_bits_are_counted():
    words = np.array([*EDGES, 7], np.int32)
    assert np.asarray(bits_of(jnp.asarray(words))).tolist() == [sum(bits(word)) for word in words]
