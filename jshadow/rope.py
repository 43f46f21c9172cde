"""Rotary position embedding: frequencies, angles and the rotation, in the half-split layout of Hugging Face."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jshadow.config import RopeConfig
from pallas_kernels.rotation import cos_sin_of


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, float32 [head_dim // 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor)
    if rope.kind == "llama3":
        wavelength = 2 * np.pi / inverse
        ramp = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        keep = np.clip(ramp, 0.0, 1.0)  # 1: a short wavelength, kept; 0: a long one, fully scaled
        return (keep * inverse + (1 - keep) * inverse / rope.factor).astype(np.float32)
    return inverse


def cos_sin(
    positions: Int[Array, "*N"], inverse: Float[Array, "half"]
) -> tuple[Float[Array, "*N half"], Float[Array, "*N half"]]:
    """Cosine and sine of the rotation angles.

    Args:
        positions: int [...]; absolute token positions.
        inverse: float32 [d / 2].

    Returns:
        Two float32 arrays [..., d / 2]. The product is rounded in float32 as transformers does, so that keys
        rotated here equal keys rotated there.
    """
    return cos_sin_of(positions[..., None].astype(jnp.float32) * inverse)


def rotate(
    x: Float[Array, "*N d"], cos: Float[Array, "*#N half"], sin: Float[Array, "*#N half"]
) -> Float[Array, "*N d"]:
    """Rotate x [..., d] by angles [..., d / 2] (broadcast); computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
