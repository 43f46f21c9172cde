"""Cosines and sines of RoPE angles, and the rotation of queries and keys.

The cosines and sines use only additions, products and floor, so the same code runs in XLA and inside a kernel.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def split_constant(value: float, parts: int, bits: int) -> list[float]:
    """Split value into a sum: `parts` numbers with `bits` significant bits each, and the remainder."""
    numbers = []
    for _ in range(parts):
        unit = 2.0 ** (math.frexp(value)[1] - bits)
        numbers.append(round(value / unit) * unit)
        value -= numbers[-1]
    return [*numbers, value]


# The parts have six bits each. Angles up to 1.6e6 are at most 18 bits of turns, so the products with them are exact.
TURN = split_constant(2 * math.pi, 3, 6)
QUARTER = split_constant(math.pi / 2, 1, 24)
# Minimax polynomials in the square of an angle in [-pi / 4, pi / 4], lowest coefficient first. Their error is 2e-9.
SIN = (-1.666665077e-01, 8.331978694e-03, -1.949563448e-04)
COS = (4.166664556e-02, -1.388736768e-03, 2.443845005e-05)


def cos_sin_of(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the cosine and sine of float32 angles in [0, 1.6e6] with an error of at most 2e-7.

    XLA's own functions take ten times as long on a CPU, because they also support far larger angles. The time matters
    because a decode step rotates every key that it rebuilds.
    """
    turns = jnp.floor(angle * np.float32(0.5 / math.pi) + 0.5)
    for part in TURN:
        angle = angle - turns * np.float32(part)
    quarter = jnp.floor(angle * np.float32(2 / math.pi) + 0.5)  # -2 .. 2
    for part in QUARTER:
        angle = angle - quarter * np.float32(part)
    square = angle * angle
    sin = angle + angle * square * horner(square, *SIN)
    cos = 1 - 0.5 * square + square * square * horner(square, *COS)
    odd, half = jnp.abs(quarter) == 1, jnp.abs(quarter) == 2
    first, second = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    return jnp.where(half | (quarter == 1), -first, first), jnp.where(half | (quarter == -1), -second, second)


def horner(x: jax.Array, *coefficients: float) -> jax.Array:
    """Evaluate the polynomial with these coefficients, lowest first, at x."""
    total = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + np.float32(coefficient)
    return total


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, factor: float = 1.0) -> jax.Array:
    """Rotate the first rotary_dim columns of x [..., d] and multiply them by factor. Other columns are unchanged.

    cos and sin are float32 [..., rotary_dim / 2] and are broadcast. The rotation is computed in float32 and returned in
    x's dtype. The pairs are in Hugging Face's half-split layout: column j belongs to column j + rotary_dim / 2.
    """
    half = cos.shape[-1]
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    first, second = (x[..., a : a + half].astype(jnp.float32) for a in (0, half))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if x.shape[-1] == 2 * half else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
