"""The layout of packed numbers: packing and unpacking are inverse, in XLA and with the functions of kernels."""

import math

import jax.numpy as jnp
import kernel_truth
import numpy as np
import pytest

from jshadow.policies.shadowkv.key_codecs.midrise import quantize
from pallas_kernels import bits as layout


@pytest.mark.parametrize(("count", "bits"), [(1, 8), (6, 4), (8, 2)])
def test_bytes_are_taken_apart_as_they_were_packed(count, bits):
    profile = tuple(count if bits == one else 0 for one in layout.BITS)
    codes = np.arange(3 * count).reshape(3, count) % 2**bits
    step = jnp.ones(count)
    packed = quantize(jnp.asarray(codes - 2.0 ** (bits - 1) + 0.5), step, profile)
    np.testing.assert_array_equal(packed, layout.pack_codes(jnp.asarray(codes, jnp.uint8), bits))
    np.testing.assert_array_equal(layout.unpack_bytes(packed, bits), codes)
    np.testing.assert_array_equal(layout.dequantize(packed, step, profile), codes - 2.0 ** (bits - 1) + 0.5)
    assert layout.packed_width(profile) == packed.shape[-1]
    wide = packed.astype(jnp.int32)
    np.testing.assert_array_equal(
        np.concatenate([layout.code_at(wide, place, bits) for place in range(8 // bits)], axis=-1), codes
    )
    whole = layout.unpack_signed(packed, bits)
    assert whole.dtype == jnp.int8
    np.testing.assert_array_equal(whole, np.where(codes < 2 ** (bits - 1), codes, codes - 2**bits))
    np.testing.assert_array_equal(whole, layout.signed(jnp.asarray(codes, jnp.int32), bits))
    np.testing.assert_array_equal(layout.pack_signed(whole, bits), packed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_with_scales_come_back(bits, dtype):
    """A row of words has codes first, then scales, then zeros, as NumPy finds them. Any width and no row will do."""
    rng, most = np.random.default_rng(0), 2 ** (bits - 1)
    for lead, tokens, dim in (((2, 5), 3, 8), ((4,), 8, 128), ((2,), 5, 66), ((3,), 1, 7), ((2, 0), 4, 80)):
        codes = jnp.asarray(rng.integers(-most, most, (*lead, tokens, dim), np.int8))
        scale = jnp.asarray(0.5 + rng.random((*lead, tokens, 1)), layout.scale_dtype(dtype))
        joined = layout.join_rows(codes, scale, bits)
        words = layout.row_words(tokens, dim, bits, dtype)
        assert joined.dtype == jnp.uint16
        assert joined.shape == (*lead, words)
        assert words % 16 == 0
        used = tokens * (math.ceil(dim * bits / 16) + scale.dtype.itemsize // 2)
        assert 0 <= words - used < 16
        assert not joined[..., used:].any()
        sizes = (tokens, dim, bits, dtype)
        found = [kernel_truth.unpacked_values(row, *sizes) for row in np.asarray(joined).reshape(-1, words)]
        want = np.asarray(codes, np.float32) * np.asarray(scale, np.float32)
        np.testing.assert_array_equal(np.reshape(found, want.shape), want)
        np.testing.assert_array_equal(layout.row_values(joined, *sizes), want.astype(dtype))
        whole, scales = layout.split_rows(joined, *sizes)
        assert scales.dtype == scale.dtype
        np.testing.assert_array_equal(whole, codes)
        np.testing.assert_array_equal(scales, scale)
