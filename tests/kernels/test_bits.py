"""The layout of packed numbers: packing and unpacking are inverse, in XLA and with the functions of kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from jshadow.ops import packing
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
    """A row has codes first, then scales. The records of the library have the same bytes."""
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(0, 256, (2, 5, 3, 8 * bits // 8), np.uint8))
    scale = jnp.asarray(0.5 + rng.random((2, 5, 3, 1)), layout.scale_dtype(dtype))
    joined = layout.join_rows(codes, scale)
    assert joined.shape == (2, 5, layout.row_bytes(3, 8, bits, dtype))
    np.testing.assert_array_equal(joined, packing.join_rows(packing.Scaled(codes, scale)))
    np.testing.assert_array_equal(joined[..., : 3 * bits], codes.reshape(2, 5, -1))
    for got, want in zip(layout.split_rows(joined, 3, dtype), (codes, scale), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
