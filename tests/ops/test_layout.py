"""Chunks, gathers, writes and the order of ties, compared with plain NumPy."""

import jax
import numpy as np
import oracle
import pytest
from jaxtyping import TypeCheckError
from random_arrays import normal

from jshadow.ops import layout as chunking

# Each has another shape, and so needs a compilation.
CHUNKED = [(1, 1, 0), (1, 9, 1), (7, 3, 2), (8, 4, 2), (9, 4, 2), (23, 5, 8), (40, 9, 3), (40, 1, 8)]


@pytest.mark.parametrize(("length", "size", "count"), CHUNKED)
def test_chunks_hold_the_tokens_in_order(length, size, count):
    x = np.arange(2 * length * 3 * 2, dtype=np.float32).reshape(2, length, 3, 2)
    chunks = np.asarray(jax.jit(chunking.to_chunks, static_argnums=(1, 2))(x, count, size))
    assert chunks.shape == (2, 3, count, size, 2)
    for token in range(count * size):
        want = x[:, token] if token < length else np.zeros((2, 3, 2))
        np.testing.assert_array_equal(chunks[:, :, token // size, token % size], want)


def test_gathers_and_writes():
    x = np.asarray(normal(2, 12, 3, 4))
    ids = np.array([[[2, 0], [1, 1], [0, 2]], [[0, 0], [2, 1], [1, 0]]])
    there = np.array([[[True, True]], [[True, False]]])
    picked = np.asarray(jax.jit(chunking.take_chunks, static_argnums=3)(x, ids, there, 4))
    for b, h in np.ndindex(2, 3):
        own = ids[b, h][there[b, 0]]
        np.testing.assert_array_equal(picked[b, h, : 4 * len(own)], x[b, oracle.tokens_of(own, 4), h])
        assert not picked[b, h, 4 * len(own) :].any()
    span = np.asarray(jax.jit(chunking.take_span, static_argnums=2)(x, np.array([3, 10]), 5))
    np.testing.assert_array_equal(span[0].transpose(1, 0, 2), x[0, 3:8])
    np.testing.assert_array_equal(span[1, :, :2].transpose(1, 0, 2), x[1, 10:])
    assert not span[1, :, 2:].any()
    buffer, valid = np.zeros((2, 3, 5, 4), np.float32), np.array([[True, False], [True, True]])
    written = np.asarray(jax.jit(chunking.write_rows)(buffer, x[:, :2], np.array([[4, 1], [0, 7]]), valid))
    np.testing.assert_array_equal(written[0, :, 4], x[0, 0])
    np.testing.assert_array_equal(written[1, :, 0], x[1, 0])
    # the invalid row and the row past the end are not written
    assert np.count_nonzero(written.any(axis=(1, 3))) == 2


def test_ties_go_to_the_lower_index():
    scores = np.float32([[1.0, 3.0, 3.0, -1.0, 3.0, 1.0], [-np.inf] * 6])
    assert jax.jit(chunking.top_k, static_argnums=1)(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert jax.eval_shape(lambda scores: chunking.top_k(scores, 0), scores).shape == (2, 0)


def test_shapes_are_checked():
    """The import hook of the tests checks annotations, so a wrong rank is refused before JAX sees it."""
    with pytest.raises(TypeCheckError):
        jax.eval_shape(lambda x: chunking.to_chunks(x, 1, 1), np.zeros((2, 3), np.float32))
