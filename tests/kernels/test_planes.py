"""The bits of 32 numbers as planes, compared with the bits of Python's integers."""

import jax
import numpy as np

from pallas_kernels.select_chunks.planes import WORD, bit_planes, bits_of, reach

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


def test_how_far_a_word_reaches():
    words = np.concatenate([np.array(EDGES, np.int32), random_words(1, 5)]).repeat(32)
    most = np.tile(np.arange(32, dtype=np.int32), len(words) // 32)
    for word, number, low in zip(words, most, np.asarray(jax.jit(reach)(words, most)), strict=True):
        places = [place for place in range(WORD) if bits(word)[place]]
        assert low == (places[number] if number < len(places) else WORD - 1)


def test_bits_are_counted():
    words = np.array([*EDGES, 7], np.int32)
    assert np.asarray(jax.jit(bits_of)(words)).tolist() == [sum(bits(word)) for word in words]
