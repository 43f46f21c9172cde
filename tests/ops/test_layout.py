"""Chunks, gathers, writes and the order of ties, compared with plain NumPy."""

import jax
import numpy as np
import oracle_maths as oracle
import pytest
from jaxtyping import TypeCheckError
from random_arrays import normal

from jshadow.ops import layout as chunking

CHUNKED = [(1, 1, 0), (1, 9, 1), (7, 3, 2), (8, 4, 2), (9, 4, 2), (23, 5, 8), (40, 9, 3), (40, 1, 8)]


def test_chunks_hold_the_tokens_in_order():
    tokens = [np.arange(2 * length * 3 * 2, dtype=np.float32).reshape(2, length, 3, 2) for length, _, _ in CHUNKED]
    every = jax.jit(lambda xs: [chunking.to_chunks(x, n, size) for x, (_, size, n) in zip(xs, CHUNKED, strict=True)])
    for x, chunks, (length, size, count) in zip(tokens, map(np.asarray, every(tokens)), CHUNKED, strict=True):
        assert chunks.shape == (2, 3, count, size, 2)
        for token in range(count * size):
            want = x[:, token] if token < length else np.zeros((2, 3, 2))
            np.testing.assert_array_equal(chunks[:, :, token // size, token % size], want)


def test_gathers_and_writes():
    x = np.asarray(normal(2, 12, 3, 4))
    ids = np.array([[[2, 0], [1, 1], [0, 2]], [[0, 0], [2, 1], [1, 0]]])
    there = np.array([[[True, True]], [[True, False]]])
    buffer, valid = np.zeros((2, 3, 5, 4), np.float32), np.array([[True, False], [True, True]])

    @jax.jit
    def all_of(x, ids, there, starts, buffer, slots, valid):
        picked, span = chunking.take_chunks(x, ids, there, 4), chunking.take_span(x, starts, 5)
        return picked, span, chunking.write_rows(buffer, x[:, :2], slots, valid)

    made = all_of(x, ids, there, np.array([3, 10]), buffer, np.array([[4, 1], [0, 7]]), valid)
    picked, span, written = map(np.asarray, made)
    for b, h in np.ndindex(2, 3):
        own = ids[b, h][there[b, 0]]
        np.testing.assert_array_equal(picked[b, h, : 4 * len(own)], x[b, oracle.tokens_of(own, 4), h])
        assert not picked[b, h, 4 * len(own) :].any()
    np.testing.assert_array_equal(span[0].transpose(1, 0, 2), x[0, 3:8])
    np.testing.assert_array_equal(span[1, :, :2].transpose(1, 0, 2), x[1, 10:])
    assert not span[1, :, 2:].any()
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
