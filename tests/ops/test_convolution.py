"""The short convolution and its ring of raw inputs, compared with a loop in NumPy."""

import jax
import ml_dtypes
import numpy as np
import pytest
from random_arrays import wide

from jshadow.errors import ConfigError
from jshadow.ops.convolution import convolve, ring_inputs, ring_write

ROWS, CHANNELS, TAPS, SLOTS = 3, 5, 4, (3, 7, 19)


CUTS = (5, 40, 1, 2, 5, 1, 1)  # the most tokens of each piece


@jax.jit
def in_pieces(rings, starts, pieces, counts, kernel, bias):
    """Convolve pieces [B, width, C] that begin at starts [B], of which each row takes counts [B], over each ring."""
    made = []
    for ring, begins in zip(rings, starts, strict=True):
        for start, x, count in zip(begins, pieces, counts, strict=True):
            out = convolve(x, ring_inputs(ring, start, len(kernel)), kernel, bias)
            ring = ring_write(ring, x, start, np.arange(x.shape[1]) < count[:, None])
            made.append((out, ring))
    return made


def schedule(rng, slots, counts):
    """Where the pieces of a row begin: mostly at its end, else some tokens before it, as far as the ring allows."""
    starts, end, newest = [], 0, 0
    for count in counts:
        if rng.random() < 0.4:
            end = rng.integers(max(0, newest - (slots - TAPS + 1)), end + 1)
        starts.append(end)
        end += count
        newest = max(newest, end)
    return starts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_pieces_and_rewinds_equal_the_whole(dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    rng = np.random.default_rng(1)
    tolerance = 2**-8 if dtype == "bfloat16" else 1e-5
    for case in range(20):
        kernel, bias = (rng.standard_normal(shape).astype(kind) for shape in ((TAPS, CHANNELS), CHANNELS))
        pieces = [rng.standard_normal((ROWS, width, CHANNELS)).astype(kind) for width in CUTS]
        rings = [rng.standard_normal((ROWS, slots, CHANNELS)).astype(kind) for slots in SLOTS]
        counts = np.array([rng.integers(0, width + 1, ROWS) if case else [width] * ROWS for width in CUTS], np.int32)
        starts = [np.array([schedule(rng, slots, row) for row in counts.T], np.int32).T for slots in SLOTS]
        made = iter(jax.tree.map(np.asarray, in_pieces(rings, starts, pieces, counts, kernel, bias)))
        for ring, begins in zip(rings, starts, strict=True):
            ring, inputs = ring.copy(), [np.zeros((TAPS - 1, CHANNELS), kind)] * ROWS
            for x, count, start, (out, after) in zip(pieces, counts, begins, made, strict=False):
                assert out.dtype == kind
                for b in range(ROWS):
                    inputs[b] = np.concatenate([inputs[b][: TAPS - 1 + start[b]], x[b, : count[b]]])
                    for t in range(count[b]):
                        position = start[b] + t
                        want = (wide(inputs[b][position : position + TAPS]) * wide(kernel)).sum(axis=0) + wide(bias)
                        np.testing.assert_allclose(wide(out[b, t]), want, rtol=tolerance, atol=1e-5)
                        ring[b, position % ring.shape[1]] = x[b, t]
                assert (
                    np.asarray(after).tobytes() == ring.tobytes()
                )  # slots that nothing was written to keep their bits


def test_without_bias_and_before_the_first_token():
    x = np.arange(1, 7, dtype=np.float32).reshape(1, 3, 2)
    before = jax.jit(ring_inputs, static_argnums=2)(np.full((1, 3, 2), 9, np.float32), np.array([1]), 3)
    np.testing.assert_array_equal(before, [[[0, 0], [9, 9]]])
    kernel = np.float32([[100, 1000], [10, 1], [1, 0]])
    np.testing.assert_array_equal(
        jax.jit(convolve)(x, before, kernel), [[[91, 9], [3 + 10 + 900, 2 + 9000], [5 + 30 + 100, 4 + 2000]]]
    )


def test_wrong_sizes_are_named():
    ring, x = np.zeros((2, 3, 4), np.float32), np.zeros((2, 1, 4), np.float32)
    with pytest.raises(ConfigError, match=r"ring must have at least kernel_width - 1 = 4 slots, got 3"):
        ring_inputs(ring, np.zeros(2, np.int32), 5)
    with pytest.raises(ConfigError, match=r"before must have K - 1 = 3 tokens for kernel \[4, C\], got 2"):
        convolve(x, ring[:, :2], np.zeros((4, 4), np.float32))
