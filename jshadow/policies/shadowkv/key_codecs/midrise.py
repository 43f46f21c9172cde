"""A uniform mid-rise quantizer (no level at zero) that clips large values. Codes are packed in bytes.

The range of a column is a multiple of its standard deviation, which is best for a Gaussian column. If most tokens are
alike, the deviation is small, and the few different tokens are many deviations away. Then the range is a share of the
largest magnitude. As a consequence, one key that is a hundred times as long as all others makes the others imprecise,
even if that key itself is stored exactly.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from pallas_kernels.bits import Profile as Profile
from pallas_kernels.bits import dequantize as dequantize
from pallas_kernels.bits import pack_codes
from pallas_kernels.bits import packed_width as packed_width

# The range for each number of bits is the larger of LOAD standard deviations and REACH times the largest magnitude.
# Both were chosen on SmolLM2-135M: LOAD by the error of its keys, and REACH by the divergence from full attention on
# plain text and by needles in repetitive text.
LOAD = {8: 8.0, 4: 3.2, 2: 1.9}
REACH = {8: 1.0, 4: 0.7, 2: 0.5}
# A column whose deviation is below this share of the largest one contains only float32 rounding error.
NOTHING = 1e-5


def profile_bits(profile: Profile) -> np.ndarray:
    """Return the number of bits of each coded column, int [n8 + n4 + n2]: first 8, then 4, then 2."""
    return np.repeat((8, 4, 2), profile)


def steps(sigma: Float[Array, "*n r"], largest: Float[Array, "*n r"], profile: Profile) -> Float[Array, "*n r"]:
    """Return the quantizer's step for each column [..., r]. It is 0 for a constant column, whose codes stand for 0.

    Args:
        sigma: standard deviations of the columns [..., r].
        largest: largest magnitudes of the columns [..., r].
        profile: numbers of columns with 8, 4 and 2 bits.
    """
    bits = profile_bits(profile)
    load, reach = (np.array([of[bit] for bit in bits], np.float32) for of in (LOAD, REACH))
    half = np.float32(2.0) ** (bits - 1)
    floor = NOTHING * sigma.max(axis=-1, keepdims=True, initial=0.0)
    return jnp.where(sigma > floor, jnp.maximum(sigma * load, largest * reach) / half, 0.0)


def quantize(x: Float[Array, "*n r"], step: Float[Array, "*n r"], profile: Profile) -> UInt8[Array, "*n w"]:
    """Quantize columns and pack their codes. The code q stands for (q + 1 / 2 - 2**(bits - 1)) * step."""
    half = jnp.asarray(2.0 ** (profile_bits(profile) - 1), jnp.float32)
    codes = jnp.clip(jnp.floor(x / jnp.where(step > 0, step, 1)) + half, 0, 2 * half - 1)
    codes = jnp.where(step > 0, codes, 0).astype(jnp.uint8)
    first, second = profile[0], profile[0] + profile[1]
    parts = (codes[..., :first], 8), (codes[..., first:second], 4), (codes[..., second:], 2)
    return jnp.concatenate([pack_codes(part, bits) for part, bits in parts], axis=-1)
