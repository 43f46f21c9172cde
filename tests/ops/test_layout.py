"""Chunks, gathers, writes and the order of ties, compared with plain NumPy."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from random_arrays import normal

from jshadow.ops import layout as chunking


@settings(max_examples=25)  # every example has a different shape, and so needs a compilation
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 8))
def test_chunks_hold_the_tokens_in_order(length, size, count):
    x = np.arange(2 * length * 3 * 2, dtype=np.float32).reshape(2, length, 3, 2)
    chunks = np.asarray(chunking.to_chunks(jnp.asarray(x), count, size))
    assert chunks.shape == (2, 3, count, size, 2)
    for token in range(count * size):
        want = x[:, token] if token < length else np.zeros((2, 3, 2))
        np.testing.assert_array_equal(chunks[:, :, token // size, token % size], want)


def test_gathers_and_writes():
    x = normal(2, 12, 3, 4)
    ids = jnp.array([[[2, 0], [1, 1], [0, 2]], [[0, 0], [2, 1], [1, 0]]])
    there = jnp.array([[[True, True]], [[True, False]]])
    picked = chunking.take_chunks(x, ids, there, 4)
    for b, h in np.ndindex(2, 3):
        own = np.asarray(ids[b, h])[np.asarray(there[b, 0])]
        np.testing.assert_array_equal(picked[b, h, : 4 * len(own)], x[b, oracle.tokens_of(own, 4), h])
        assert not np.asarray(picked[b, h, 4 * len(own) :]).any()
    span = chunking.take_span(x, jnp.array([3, 10]), 5)
    np.testing.assert_array_equal(span[0].transpose(1, 0, 2), x[0, 3:8])
    np.testing.assert_array_equal(span[1, :, :2].transpose(1, 0, 2), x[1, 10:])
    assert not np.asarray(span[1, :, 2:]).any()
    buffer = jnp.zeros((2, 3, 5, 4))
    valid = jnp.array([[True, False], [True, True]])
    written = chunking.write_rows(buffer, x[:, :2], jnp.array([[4, 1], [0, 7]]), valid)
    np.testing.assert_array_equal(written[0, :, 4], x[0, 0])
    np.testing.assert_array_equal(written[1, :, 0], x[1, 0])
    # the invalid row and the row past the end are not written
    assert np.count_nonzero(np.asarray(written).any(axis=(1, 3))) == 2


def test_ties_go_to_the_lower_index():
    scores = jnp.array([[1.0, 3.0, 3.0, -1.0, 3.0, 1.0], [-jnp.inf] * 6])
    assert chunking.top_k(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert chunking.top_k(scores, 0).shape == (2, 0)


def test_shapes_are_checked():
    """The import hook of the tests checks annotations, so a wrong rank is refused before JAX sees it."""
    with pytest.raises(TypeCheckError):
        chunking.to_chunks(jnp.zeros((2, 3)), 1, 1)
