"""Packed codes: packing and unpacking are inverse, and the error of a quantized number is bounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshadow.ops.packing import dequantize, pack, quantize, unpack, words_of


@functools.partial(jax.jit, static_argnums=(1, 2))
def there_and_back(codes, group, bits):
    """The words, and the codes that are unpacked from them."""
    words = pack(codes, bits)
    return words, unpack(words, group, bits)


@functools.partial(jax.jit, static_argnums=1)
def quantized(x, bits):
    """The packed numbers, and the numbers that they stand for."""
    packed = quantize(x, bits)
    return packed, dequantize(packed, x.shape[-1], bits)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [4, 32, 33])
def test_codes_survive_packing(bits, group):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 5, group)).astype(np.uint32)
    words, back = there_and_back(codes, group, bits)
    assert words.shape == (3, 5, words_of(group, bits))
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_error_of_a_number_is_half_a_step(bits, dtype):
    """With one bit it is a quarter of the range, because the codes stand for the middles of its halves."""
    x = (np.random.default_rng(bits).standard_normal((50, 32)) * 3).astype(dtype)
    packed, back = quantized(x, bits)
    wide = np.asarray(x, np.float32)
    span = wide.max(axis=1) - wide.min(axis=1)
    step = span / 4 if bits == 1 else span / (2**bits - 1) / 2
    error = np.abs(np.asarray(back) - wide).max(axis=1)
    # float16 scales and zeros are rounded too
    rounding = 0 if dtype == jnp.float32 else 2**-10 * np.abs(wide).max(axis=1) * 2
    assert (error <= step * (1 + 1e-3) + rounding + 1e-6).all()
    assert packed.scale.dtype == (jnp.float32 if dtype == jnp.float32 else jnp.float16)


def test_a_group_of_equal_numbers_is_exact():
    x = np.full((50, 32), 1.5, np.float32)
    for bits in (1, 2, 4, 8):
        np.testing.assert_array_equal(quantized(x, bits)[1], x)
