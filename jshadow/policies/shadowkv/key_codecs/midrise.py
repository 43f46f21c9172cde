"""A uniform quantiser without a zero (mid-rise) that clips outliers, in packed bytes.

The range of a column is a multiple of its standard deviation, the best choice for a column like a Gaussian one. Where
most tokens are alike, deviations are small and the few different tokens lie many deviations away; then the range is a
share of the largest magnitude. So one key that is a hundred times as long as all others makes the others imprecise,
even where that key itself is stored exactly.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from pallas_kernels.bits import Profile as Profile
from pallas_kernels.bits import dequantise as dequantise
from pallas_kernels.bits import pack_bytes
from pallas_kernels.bits import packed_width as packed_width

# The range by bits: at least LOAD standard deviations, and at least REACH times the largest magnitude. Both were chosen
# on SmolLM2-135M: LOAD by the error of its keys, REACH by divergence on plain text and by needles in repetitive text.
LOAD = {8: 8.0, 4: 3.2, 2: 1.9}
REACH = {8: 1.0, 4: 0.7, 2: 0.5}
# A column whose deviation is smaller than this part of the largest one holds nothing but float32's rounding.
NOTHING = 1e-5


def profile_bits(profile: Profile) -> np.ndarray:
    """Bits of each coded column, int [n8 + n4 + n2]: eight first, then four, then two."""
    return np.repeat((8, 4, 2), profile)


def steps(sigma: Float[Array, "*n r"], largest: Float[Array, "*n r"], profile: Profile) -> Float[Array, "*n r"]:
    """Step of each column; 0, which decodes to 0, for a column that is constant.

    Args:
        sigma: standard deviations [..., r].
        largest: magnitudes [..., r].
        profile: columns by bits.
    """
    bits = profile_bits(profile)
    load, reach = (np.array([of[bit] for bit in bits], np.float32) for of in (LOAD, REACH))
    half = np.float32(2.0) ** (bits - 1)
    floor = NOTHING * sigma.max(axis=-1, keepdims=True, initial=0.0)
    return jnp.where(sigma > floor, jnp.maximum(sigma * load, largest * reach) / half, 0.0)


def quantise(x: Float[Array, "*n r"], step: Float[Array, "*n r"], profile: Profile) -> UInt8[Array, "*n w"]:
    """Pack columns as codes. The code q stands for (q + 1 / 2 - 2**(bits - 1)) * step."""
    half = jnp.asarray(2.0 ** (profile_bits(profile) - 1), jnp.float32)
    codes = jnp.clip(jnp.floor(x / jnp.where(step > 0, step, 1)) + half, 0, 2 * half - 1)
    codes = jnp.where(step > 0, codes, 0).astype(jnp.uint8)
    first, second = profile[0], profile[0] + profile[1]
    parts = (codes[..., :first], 8), (codes[..., first:second], 4), (codes[..., second:], 2)
    return jnp.concatenate([pack_bytes(part, bits) for part, bits in parts], axis=-1)
