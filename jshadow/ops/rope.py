"""Rotary position embedding: frequencies, angles and the rotation, in the half-split layout of Hugging Face."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jshadow.ops.rope_config import RopeConfig
from pallas_kernels.rotation import cos_sin_of


def inverse_frequencies(rope: RopeConfig, head_dim: int, tokens: int = 0) -> np.ndarray:
    """Angle per position of each rotated pair.

    Args:
        rope: the variant.
        head_dim: width of a head.
        tokens: how many a sequence may ever hold. "dynamic" and "longrope" have other frequencies beyond the original
            context. All keys of a state have the same frequencies, so that no key is ever rotated again.

    Returns:
        float32 [rotary_dim / 2]; zeros for "none".
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
    """1 where a wavelength is short and kept, 0 where it is long and fully scaled."""
    wavelength = 2 * np.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return np.clip((rope.original_context / wavelength - low) / (high - low), 0.0, 1.0)


def _kept_by_turns(rope: RopeConfig, width: int) -> np.ndarray:
    """1 for frequencies that turn more than beta_fast times in the context, 0 below beta_slow times, a ramp between."""

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
    """Cosine and sine of the rotation angles.

    Args:
        positions: int [...]; absolute token positions.
        inverse: float32 [rotary_dim / 2].

    Returns:
        Two float32 arrays [..., rotary_dim / 2]. The product is rounded in float32 as transformers does, so that keys
        rotated here equal keys rotated there.
    """
    return cos_sin_of(positions[..., None].astype(jnp.float32) * inverse)


def rotate(
    x: Float[Array, "*N d"], cos: Float[Array, "*#N half"], sin: Float[Array, "*#N half"], factor: float = 1.0
) -> Float[Array, "*N d"]:
    """Rotate the front of x [..., d] by angles [..., rotary_dim / 2] (broadcast) and multiply it by factor.

    The rotation is computed in float32 and returned in x's dtype. The part of x behind the rotated one is unchanged.
    """
    half = cos.shape[-1]
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    first, second = (x[..., a : a + half].astype(jnp.float32) for a in (0, half))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if x.shape[-1] == 2 * half else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


class Rotation(NamedTuple):
    """The rotation of queries and keys at some positions.

    Attributes:
        inverse: angle per position of each rotated pair, float32 [rotary_dim / 2].
        cos, sin: float32, of the positions, broadcastable to [B, T, h, rotary_dim / 2].
        query_factor: the product of both attention factors of the variant. Queries carry that of the keys too, because
            only products of queries and keys matter; so keys are stored and rebuilt without a factor.
    """

    inverse: Array
    cos: Array
    sin: Array
    query_factor: float

    def queries(self, x: Float[Array, "B T h d"]) -> Float[Array, "B T h d"]:
        """Queries [B, T, h_q, d] after RoPE."""
        return rotate(x, self.cos, self.sin, self.query_factor)

    def keys(self, x: Float[Array, "B T h d"]) -> Float[Array, "B T h d"]:
        """Keys [B, T, h_kv, d] after RoPE."""
        return rotate(x, self.cos, self.sin)


def query_factor(rope: RopeConfig) -> float:
    """The factor on rotated queries."""
    return rope.attention_factor**2


def rotation(rope: RopeConfig, inverse: Float[Array, " half"], positions: Int[Array, "#B T"]) -> Rotation:
    """The rotation at positions [B or 1, T]."""
    cos, sin = cos_sin(positions, inverse)
    return Rotation(inverse, cos[:, :, None], sin[:, :, None], query_factor(rope))
