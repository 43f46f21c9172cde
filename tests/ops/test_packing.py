"""Packed codes: packing and unpacking are inverse, and the error of a quantized number is bounded."""

import jax.numpy as jnp
import numpy as np
import pytest

from jshadow.ops.packing import dequantize, pack, quantize, unpack, words_of


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [4, 32, 33])
def test_codes_survive_packing(bits, group):
    codes = jnp.asarray(np.random.default_rng(bits).integers(0, 2**bits, (3, 5, group)), jnp.uint32)
    words = pack(codes, bits)
    assert words.shape == (3, 5, words_of(group, bits))
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(unpack(words, group, bits), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_error_of_a_number_is_half_a_step(bits, dtype):
    """With one bit it is a quarter of the range, because the codes stand for the middles of its halves."""
    x = jnp.asarray(np.random.default_rng(bits).standard_normal((50, 32)) * 3, dtype)
    packed = quantize(x, bits)
    wide = np.asarray(x, np.float32)
    span = wide.max(axis=1) - wide.min(axis=1)
    step = span / 4 if bits == 1 else span / (2**bits - 1) / 2
    error = np.abs(np.asarray(dequantize(packed, 32, bits)) - wide).max(axis=1)
    # float16 scales and zeros are rounded too
    rounding = 0 if dtype == jnp.float32 else 2**-10 * np.abs(wide).max(axis=1) * 2
    assert (error <= step * (1 + 1e-3) + rounding + 1e-6).all()
    assert packed.scale.dtype == (jnp.float32 if dtype == jnp.float32 else jnp.float16)


def test_a_group_of_equal_numbers_is_exact():
    x = jnp.full((3, 8), 1.5)
    for bits in (1, 2, 4, 8):
        np.testing.assert_array_equal(dequantize(quantize(x, bits), 8, bits), x)
