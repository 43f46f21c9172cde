"""Rotary position embedding (RoPE): frequencies, angles and the rotation, in Hugging Face's half-split layout."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jshadow.ops.rope_config import RopeConfig
from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.rotation import rotate as rotate


def inverse_frequencies(rope: RopeConfig, head_dim: int, tokens: int = 0) -> np.ndarray:
    """Return the rotation angle per position of each rotated pair of columns, in radians.

    Args:
        rope: the RoPE settings.
        head_dim: width of a head.
        tokens: maximum number of tokens that a sequence can hold. "dynamic" and "longrope" change their frequencies if
            it exceeds the original context. All keys of a state use the same frequencies, so a key is rotated only
            once.

    Returns:
        float32 [rotary_dim / 2]. Zeros for "none".
    """
    width = rope.rotary_dim(head_dim)
    if rope.kind == "none":
        return np.zeros(width // 2, np.float32)
    theta, exponent = rope.theta, np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    if rope.kind == "dynamic":
        longest = max(tokens, rope.original_context)
        grown = rope.factor * longest / rope.original_context - (rope.factor - 1)
        theta *= grown ** (width / (width - 2))
    inverse = (1.0 / np.float32(theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor)
    if rope.kind == "longrope":
        divisors = rope.long_factors if tokens > rope.original_context else rope.short_factors
        return inverse / np.asarray(divisors, np.float32)
    if rope.kind in ("llama3", "yarn"):
        keep = _kept_by_wavelength(rope, inverse) if rope.kind == "llama3" else _kept_by_turns(rope, width)
        return (keep * inverse + (1 - keep) * inverse / rope.factor).astype(np.float32)
    return inverse


def _kept_by_wavelength(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """For "llama3", return how much of each frequency is not scaled: 1 for short wavelengths, 0 for long ones."""
    wavelength = 2 * np.pi / inverse
    turns, low, high = rope.original_context / wavelength, rope.low_freq_factor, rope.high_freq_factor
    return (turns >= low).astype(np.float32) if low == high else np.clip((turns - low) / (high - low), 0.0, 1.0)


def _kept_by_turns(rope: RopeConfig, width: int) -> np.ndarray:
    """For "yarn", return how much of each frequency is not scaled.

    It is 1 for frequencies with more than beta_fast turns in the original context, and 0 for those with less than
    beta_slow turns. Between them it falls linearly.
    """

    def index_of(turns: float) -> float:
        return width * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (np.arange(width // 2, dtype=np.float32) - first) / max(last - first, 0.001)
    return 1 - np.clip(ramp, 0.0, 1.0)


def cos_sin(
    positions: Int[Array, "*N"], inverse: Float[Array, " half"]
) -> tuple[Float[Array, "*N half"], Float[Array, "*N half"]]:
    """Compute the cosine and sine of the rotation angles.

    Args:
        positions: int [...], absolute token positions.
        inverse: float32 [rotary_dim / 2], from `inverse_frequencies`.

    Returns:
        Two float32 arrays [..., rotary_dim / 2]. The angle is the float32 product of position and frequency, as in
        transformers, so that both libraries rotate keys alike.
    """
    return cos_sin_of(positions[..., None].astype(jnp.float32) * inverse)


class Rotation(NamedTuple):
    """The rotation of queries and keys at given positions.

    Attributes:
        inverse: float32 [rotary_dim / 2], the angle per position of each rotated pair.
        cos: float32 cosines of the angles, broadcastable to [B, T, h, rotary_dim / 2].
        sin: float32 sines of the angles, in the shape of cos.
        query_factor: rotated queries are multiplied by it. It is the product of the attention factors of queries and
            keys. Only the product of a query and a key matters, so keys are stored and rebuilt without a factor.
    """

    inverse: Array
    cos: Array
    sin: Array
    query_factor: float

    def queries(self, x: Float[Array, "B T h d"]) -> Float[Array, "B T h d"]:
        """Apply RoPE to queries [B, T, h_q, d], including the query factor."""
        return rotate(x, self.cos, self.sin, self.query_factor)

    def keys(self, x: Float[Array, "B T h d"]) -> Float[Array, "B T h d"]:
        """Apply RoPE to keys [B, T, h_kv, d]."""
        return rotate(x, self.cos, self.sin)


def query_factor(rope: RopeConfig) -> float:
    """Return the factor for rotated queries: the attention factor of the queries times that of the keys."""
    return rope.attention_factor**2


def rotation(rope: RopeConfig, inverse: Float[Array, " half"], positions: Int[Array, "#B T"]) -> Rotation:
    """Return the rotation at positions, int [B or 1, T]. `inverse` is from `inverse_frequencies`."""
    cos, sin = cos_sin(positions, inverse)
    return Rotation(inverse, cos[:, :, None], sin[:, :, None], query_factor(rope))
