"""Packed codes: packing and unpacking are inverse, and the error of a quantized number is bounded."""

import jax
import numpy as np

from jshadow.ops.packing import dequantize, pack, quantize, unpack, words_of

BITS = (1, 2, 4, 8)


def test_codes_survive_packing():
    rng, sizes = np.random.default_rng(0), [(group, bits) for group in (4, 32, 33) for bits in BITS]
    codes = {(group, bits): rng.integers(0, 2**bits, (3, 5, group)).astype(np.uint32) for group, bits in sizes}
    packed = jax.jit(lambda codes: {key: pack(x, key[1]) for key, x in codes.items()})(codes)
    back = jax.jit(lambda words: {key: unpack(x, *key) for key, x in words.items()})(packed)
    for key, words in packed.items():
        assert words.shape == (3, 5, words_of(*key))
        assert words.dtype == np.uint32
        np.testing.assert_array_equal(back[key], codes[key], str(key))


def test_the_error_of_a_number_is_half_a_step():
    """With one bit it is a quarter of the range, because the codes stand for the middles of its halves.

    A group of equal numbers is exact.
    """
    rng, dtypes = np.random.default_rng(1), ("float32", "bfloat16")
    inputs = {(bits, dtype): (rng.standard_normal((50, 32)) * 3).astype(dtype) for bits in BITS for dtype in dtypes}
    inputs |= {(bits, "equal"): np.full((50, 32), 1.5, np.float32) for bits in BITS}
    packed = jax.jit(lambda inputs: {key: quantize(x, key[0]) for key, x in inputs.items()})(inputs)
    back = jax.jit(lambda packed: {key: dequantize(x, 32, key[0]) for key, x in packed.items()})(packed)
    for (bits, dtype), x in inputs.items():
        wide, got = np.asarray(x, np.float32), np.asarray(back[bits, dtype])
        if dtype == "equal":
            np.testing.assert_array_equal(got, x)
            continue
        span = wide.max(axis=1) - wide.min(axis=1)
        step = span / 4 if bits == 1 else span / (2**bits - 1) / 2
        # float16 scales and zeros are rounded too
        rounding = 0 if dtype == "float32" else 2**-10 * np.abs(wide).max(axis=1) * 2
        assert (np.abs(got - wide).max(axis=1) <= step * (1 + 1e-3) + rounding + 1e-6).all(), (bits, dtype)
        assert packed[bits, dtype].scale.dtype == (np.float32 if dtype == "float32" else np.float16)
