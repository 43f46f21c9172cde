"""The layout of packed numbers: packing and unpacking are inverse, in XLA and with the functions of kernels."""

import functools
import math

import jax
import jax.numpy as jnp
import kernel_truth
import numpy as np
import pytest
from few import one_of

from jshadow.policies.shadowkv.key_codecs.transform import quantize
from pallas_kernels import bits as layout


@functools.partial(jax.jit, static_argnames=("bits", "profile"))
def all_ways(codes, step, packed, whole, *, bits, profile):
    """Each function of the layout, on its own input. One program."""
    wide = packed.astype(np.int32)
    return {
        "quantize": quantize(codes - 2.0 ** (bits - 1) + 0.5, step, profile),
        "pack_codes": layout.pack_codes(codes.astype(np.uint8), bits),
        "unpack_bytes": layout.unpack_bytes(packed, bits),
        "dequantize": layout.dequantize(packed, step, profile),
        "code_at": jnp.concatenate([layout.code_at(wide, place, bits) for place in range(8 // bits)], axis=-1),
        "unpack_signed": layout.unpack_signed(packed, bits),
        "signed": layout.signed(codes, bits),
        "pack_signed": layout.pack_signed(whole, bits),
    }


@pytest.mark.parametrize(("count", "bits"), [(1, 8), (6, 4), (8, 2)])
def test_bytes_are_taken_apart_as_they_were_packed(count, bits):
    profile = tuple(count if bits == one else 0 for one in layout.BITS)
    codes = np.arange(3 * count, dtype=np.int32).reshape(3, count) % 2**bits
    width, each = layout.packed_width(profile), 8 // bits
    # Byte j has the numbers j, j + w, ..., the first lowest.
    packed = sum(codes[:, i * width : (i + 1) * width] << bits * i for i in range(each)).astype(np.uint8)
    whole = np.where(codes < 2 ** (bits - 1), codes, codes - 2**bits).astype(np.int8)
    got = all_ways(codes, np.ones(count, np.float32), packed, whole, bits=bits, profile=profile)
    want = dict.fromkeys(("quantize", "pack_codes", "pack_signed"), packed)
    want |= dict.fromkeys(("unpack_bytes", "code_at"), codes) | dict.fromkeys(("unpack_signed", "signed"), whole)
    want["dequantize"] = codes - 2.0 ** (bits - 1) + 0.5
    assert got.keys() == want.keys()
    for name, right in want.items():
        np.testing.assert_array_equal(got[name], right, name)
    assert got["unpack_signed"].dtype == np.int8


@functools.partial(jax.jit, static_argnums=(2, 3))
def joined_rows(codes, scale, bits, dtype):
    """The rows, the values that they stand for, and what they are split into. One program."""
    joined = layout.join_rows(codes, scale, bits)
    sizes = (*codes.shape[-2:], bits, dtype)
    return joined, layout.row_values(joined, *sizes), *layout.split_rows(joined, *sizes)


@pytest.mark.parametrize(("bits", "dtype"), one_of(4, [(b, d) for b in (8, 4) for d in ("float32", "bfloat16")]))
def test_rows_with_scales_come_back(bits, dtype):
    """A row of words has codes first, then scales, then zeros, as NumPy finds them. Any width and no row will do."""
    rng, most = np.random.default_rng(0), 2 ** (bits - 1)
    for lead, tokens, dim in (((2, 5), 3, 8), ((4,), 8, 128), ((2,), 5, 66), ((3,), 1, 7), ((2, 0), 4, 80)):
        codes = rng.integers(-most, most, (*lead, tokens, dim), np.int8)
        scale = (0.5 + rng.random((*lead, tokens, 1))).astype(np.dtype(layout.scale_dtype(dtype)))
        joined, values, whole, scales = map(np.asarray, joined_rows(codes, scale, bits, dtype))
        words, sizes = layout.row_words(tokens, dim, bits, dtype), (tokens, dim, bits, dtype)
        assert (joined.dtype, joined.shape) == (np.uint16, (*lead, words))
        assert words % 16 == 0
        used = tokens * (math.ceil(dim * bits / 16) + scale.dtype.itemsize // 2)
        assert 0 <= words - used < 16
        assert not joined[..., used:].any()
        want = codes.astype(np.float32) * scale.astype(np.float32)
        np.testing.assert_array_equal(kernel_truth.unpacked_values(joined, *sizes), want)
        np.testing.assert_array_equal(values, want.astype(dtype))
        assert scales.dtype == scale.dtype
        np.testing.assert_array_equal(whole, codes)
        np.testing.assert_array_equal(scales, scale)
