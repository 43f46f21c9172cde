"""Rotary position embedding: frequencies, angles and the rotation, in the half-split layout of Hugging Face."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jshadow.config import RopeConfig


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


def split_constant(value: float, parts: int, bits: int) -> list[float]:
    """value as a sum of `parts` numbers of that many bits, and a float32 for the rest."""
    numbers = []
    for _ in range(parts):
        unit = 2.0 ** (math.frexp(value)[1] - bits)
        numbers.append(round(value / unit) * unit)
        value -= numbers[-1]
    return [*numbers, value]


# Of six bits each, so that their products with the number of turns (18 bits: angles to 1.6 million) are exact.
TURN = split_constant(2 * math.pi, 3, 6)
QUARTER = split_constant(math.pi / 2, 1, 24)


def cos_sin_of(
    angle: Float[Array, "*N half"],
) -> tuple[Float[Array, "*N half"], Float[Array, "*N half"]]:
    """Cosine and sine of float32 angles in [0, 1.6e6], to 2e-7.

    Of additions and products alone: XLA's own take ten times as long on a CPU, because they also reduce angles that no
    position has. A decode step rotates all keys that it rebuilds.
    """
    turns = jnp.round(angle * np.float32(0.5 / math.pi))
    for part in TURN:
        angle = angle - turns * np.float32(part)
    quarter = jnp.round(angle * np.float32(2 / math.pi))  # -2 .. 2
    for part in QUARTER:
        angle = angle - quarter * np.float32(part)
    square = angle * angle
    # minimax polynomials on [-pi / 4, pi / 4], fitted to within 2e-9
    sin = angle + angle * square * horner(square, -1.666665077e-01, 8.331978694e-03, -1.949563448e-04)
    cos = 1 - 0.5 * square + square * square * horner(square, 4.166664556e-02, -1.388736768e-03, 2.443845005e-05)
    odd, half = jnp.abs(quarter) == 1, jnp.abs(quarter) == 2
    first, second = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    return jnp.where(half | (quarter == 1), -first, first), jnp.where(half | (quarter == -1), -second, second)


def horner(x: Float[Array, "*N"], *coefficients: float) -> Float[Array, "*N"]:
    """The polynomial with these coefficients, lowest first."""
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + np.float32(coefficient)
    return total


def rotate(
    x: Float[Array, "*N d"], cos: Float[Array, "*#N half"], sin: Float[Array, "*#N half"]
) -> Float[Array, "*N d"]:
    """Rotate x [..., d] by angles [..., d / 2] (broadcast); computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
