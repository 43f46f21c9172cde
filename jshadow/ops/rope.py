"""Rotary position embedding (RoPE): frequencies, angles and the rotation, in Hugging Face's half-split layout."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jshadow.errors import ConfigError, check_one_of
from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.rotation import rotate as rotate

CONTEXT, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
TEMPERATURE = "llama_4_scaling_beta"  # read by the families that have it
# Variant -> (keys that `config.json` must have, keys that it may have), in addition to the base frequency.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor",), ("low_freq_factor", "high_freq_factor")),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "proportional": ((), ("factor",)),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
_COMMON = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    ORIGINAL,
    CONTEXT,
    "finetuned",
}
_OLDER_NAMES = {"su": "longrope"}  # used by the first Phi-3 checkpoints


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base frequencies and their scaling.

    The variants (`kind`) are:

    - "default": no scaling.
    - "linear": positions are divided by factor.
    - "dynamic": theta grows with the length of the sequence (NTK).
    - "llama3" (Llama 3.1, section 3 of its model card): low frequencies are divided by factor and high ones are kept,
      with a linear ramp between them. The ramp is a step if low_freq_factor and high_freq_factor are equal.
    - "yarn" (arXiv 2309.00071, section 3): like "llama3", but the ramp goes from beta_slow to beta_fast turns in the
      original context.
    - "proportional" (Gemma 4): as "linear". Only a share of the pairs is rotated, but a pair is half a head apart and
      the frequencies fall as if all pairs were rotated.
    - "longrope" (arXiv 2402.13753): each frequency is divided by a separate number. There is one list of divisors for
      short sequences and one for long ones.
    - "none": no rotation, so the layer's keys carry no position.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: the variant.
        factor: scaling factor of "linear", "proportional", "dynamic", "llama3" and "yarn".
        low_freq_factor: for "llama3". Wavelengths above original_context / low_freq_factor are fully scaled.
        high_freq_factor: for "llama3". Wavelengths below original_context / high_freq_factor are kept.
        original_context: for "dynamic", "llama3", "yarn", "longrope" and the temperature. Context length, in tokens, of
            the first training.
        rotary_share: share of each head that is rotated, counted from its first column. With "proportional", it is that
            of the pairs.
        attention_factor: for "yarn" and "longrope". The rotated columns of queries and keys are multiplied by it.
        beta_fast: for "yarn". Frequencies with more turns than this in the original context are kept.
        beta_slow: for "yarn". Frequencies with fewer turns than this are divided by factor.
        truncate: for "yarn". Whether the ends of the ramp are rounded to whole indices of frequencies.
        temperature: the queries at position p are multiplied by
            1 + temperature * ln(1 + floor(p / original_context)).
        short_factors: for "longrope". One divisor for each rotated pair, for sequences up to original_context tokens.
        long_factors: for "longrope". One divisor for each rotated pair, for longer sequences.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    rotary_share: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    temperature: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    KINDS = ("none", *_KEYS)

    def __post_init__(self) -> None:
        check_one_of("rope.kind", self.kind, self.KINDS)
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise ConfigError(f"rope.theta must be above 0, got {self.theta!r}")
        if not self.factor >= 1:
            raise ConfigError(f"rope.factor must be at least 1, got {self.factor!r}")
        if not 0 < self.rotary_share <= 1:
            raise ConfigError(f"rope.rotary_share must be above 0 and at most 1, got {self.rotary_share!r}")
        if not self.attention_factor > 0:
            raise ConfigError(f"rope.attention_factor must be above 0, got {self.attention_factor!r}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor <= self.high_freq_factor:
            raise ConfigError(
                "rope.low_freq_factor must be above 0 and at most rope.high_freq_factor, "
                f"got {self.low_freq_factor!r} and {self.high_freq_factor!r}"
            )
        if self.kind == "yarn" and not self.theta > 1:
            raise ConfigError(f"rope.theta must be above 1 for yarn, got {self.theta!r}")
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ConfigError(
                "rope.beta_slow must be above 0 and below rope.beta_fast, "
                f"got {self.beta_slow!r} and {self.beta_fast!r}"
            )
        if self.kind in ("dynamic", "llama3", "yarn", "longrope") and not self.original_context > 1:
            raise ConfigError(f"rope.original_context must be above 1 token, got {self.original_context!r}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"rope.temperature must be at least 0 and finite, got {self.temperature!r}")
        for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
            if not all(factor > 0 for factor in factors):
                raise ConfigError(f"rope.{name} must be above 0, got {min(factors)!r}")

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many columns of a head are rotated, with those that "proportional" rotates by an angle of 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.rotary_share)

    def check_width(self, head_dim: int) -> None:
        """Raise ConfigError unless the rotated columns of a head form whole pairs and every pair has its divisors."""
        rotated = self.rotary_dim(head_dim)
        if rotated < 2 or rotated % 2:
            raise ConfigError(
                f"config.head_dim must give an even rotated part (RoPE rotates pairs), got {rotated} of {head_dim}"
            )
        if self.kind == "dynamic" and rotated < 4:
            raise ConfigError(f"config.head_dim must give two rotated pairs for dynamic scaling, got {rotated} numbers")
        for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
            if self.kind == "longrope" and len(factors) != rotated // 2:
                raise ConfigError(f"rope.{name} must have {rotated // 2} numbers (rotated pairs), got {len(factors)}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_theta` and `rope_scaling` from config.json.

        Newer files have `rope_parameters` instead. If a file has both, `rope_scaling` is used.

        Raises:
            ConfigError: the variant is unknown, or a key of the variant is missing, unknown or out of range.
        """
        scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"rope_scaling must be an object, got {scaling!r}")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        kind = _OLDER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
        check_one_of("rope_scaling.rope_type", kind, tuple(_KEYS))
        needed, optional = _KEYS[kind]
        if lacking := [key for key in needed if scaling.get(key) is None]:
            raise ConfigError(f"rope_scaling of rope_type {kind!r} lacks {', '.join(lacking)}")
        if kind != "default" and (unknown := sorted(set(scaling) - _COMMON - {*needed, *optional})):
            raise ConfigError(f"rope_scaling of rope_type {kind!r} has the unknown keys {', '.join(unknown)}")
        newer = hf.get("rope_parameters") or {}
        share = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
        fields: dict[str, Any] = {
            "theta": float(scaling.get("rope_theta", hf.get("rope_theta", newer.get("rope_theta", 10000.0)))),
            "kind": kind,
            "rotary_share": 1.0 if share is None else float(share),
        }
        return cls(**fields, **_READERS[kind](scaling, hf)) if kind in _READERS else cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """Undo `from_hf`: return `rope_theta`, `rope_scaling` and `partial_rotary_factor` for config.json."""
        settings: dict[str, Any] = {"rope_type": self.kind}
        if self.kind in ("linear", "proportional", "dynamic", "llama3", "yarn"):
            settings["factor"] = self.factor
        if self.kind == "llama3":
            settings |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            settings |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
        if self.kind == "longrope":
            settings |= {"short_factor": list(self.short_factors), "long_factor": list(self.long_factors)}
        if self.kind in ("yarn", "longrope"):
            settings["attention_factor"] = self.attention_factor
        if self.temperature:
            settings[TEMPERATURE] = self.temperature
        if self.kind in ("llama3", "yarn", "longrope") or self.temperature:
            settings[ORIGINAL] = self.original_context
        share = {"partial_rotary_factor": self.rotary_share} if self.rotary_share != 1 else {}
        if self.kind == "proportional":
            settings, share = settings | share, {}
        return {"rope_theta": self.theta, "rope_scaling": settings if len(settings) > 1 else None, **share}


def _original(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Return the original context length. If `rope_scaling` and config.json lack it, return the context length."""
    return int(scaling.get(ORIGINAL) or hf.get(ORIGINAL) or hf.get(CONTEXT) or RopeConfig.original_context)


def _read_linear(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": float(scaling.get("factor", 1.0))}


def _read_dynamic(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    # For this variant the original context is always max_position_embeddings.
    return {"factor": float(scaling["factor"]), "original_context": int(hf[CONTEXT])}


def _read_llama3(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    given = {name: float(scaling[name]) for name in names if scaling.get(name) is not None}
    return given | {"original_context": _original(scaling, hf)}


def _read_yarn(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    original, factor = _original(scaling, hf), scaling.get("factor")
    if factor is None and not (scaling.get(ORIGINAL) or hf.get(ORIGINAL)):
        raise ConfigError(f"rope_scaling of rope_type 'yarn' lacks factor and {ORIGINAL}, from which it would follow")
    factor = float(hf[CONTEXT] / original if factor is None else factor)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor, over, under = (scaling.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention_factor is None:
        attention_factor = growth(over) / growth(under) if over and under else growth(1.0)
    fields = {"factor": factor, "attention_factor": float(attention_factor), "original_context": original}
    fields |= {name: float(scaling[name]) for name in ("beta_fast", "beta_slow") if scaling.get(name)}
    return fields | {"truncate": bool(scaling.get("truncate", True))}


def _read_longrope(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    original, attention_factor = _original(scaling, hf), scaling.get("attention_factor")
    for name in ("short_factor", "long_factor"):
        if not isinstance(scaling[name], list):
            raise ConfigError(f"rope_scaling.{name} must be a list of numbers, got {scaling[name]!r}")
    if original < 2:
        raise ConfigError(f"{ORIGINAL} must be at least 2, got {original}")
    if attention_factor is None:  # if the file has no factor, it is the ratio of the two contexts
        factor = float(scaling.get("factor") or hf[CONTEXT] / original)
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "attention_factor": float(attention_factor),
        "original_context": original,
        "short_factors": tuple(map(float, scaling["short_factor"])),
        "long_factors": tuple(map(float, scaling["long_factor"])),
    }


_READERS = {
    "linear": _read_linear,
    "proportional": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}


def inverse_frequencies(rope: RopeConfig, head_dim: int, tokens: int = 0) -> np.ndarray:
    """Return the rotation angle per position of each rotated pair of columns, in radians.

    Args:
        rope: the RoPE settings.
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
    if rope.kind == "proportional":
        inverse[int(rope.rotary_share * head_dim // 2) :] = 0
    if rope.kind in ("linear", "proportional"):
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
        temperature: queries are multiplied by it, float32 in the shape of [B, T, 1, 1]. None: by 1.
    """

    inverse: Array
    cos: Array
    sin: Array
    query_factor: float
    temperature: Array | None = None

    def tempered(self, x: Float[Array, "B T h d"]) -> Float[Array, "B T h d"]:
        """Multiply projected queries [B, T, h_q, d] by the temperature. What follows may rotate them in another way."""
        return x if self.temperature is None else (x.astype(jnp.float32) * self.temperature).astype(x.dtype)

    def queries(self, x: Float[Array, "B T h d"]) -> Float[Array, "B T h d"]:
        """Apply the temperature, RoPE and the query factor to queries [B, T, h_q, d]."""
        return rotate(self.tempered(x), self.cos, self.sin, self.query_factor)

    def keys(self, x: Float[Array, "B T h d"]) -> Float[Array, "B T h d"]:
        """Apply RoPE to keys [B, T, h_kv, d]."""
        return rotate(x, self.cos, self.sin)


def query_factor(rope: RopeConfig) -> float:
    """Return the factor for rotated queries: the attention factor of the queries times that of the keys."""
    return rope.attention_factor**2


def rotation(rope: RopeConfig, inverse: Float[Array, " half"], positions: Int[Array, "#B T"]) -> Rotation:
    """Return the rotation at positions, int [B or 1, T]. `inverse` is from `inverse_frequencies`."""
    cos, sin = cos_sin(positions, inverse)
    temperature = None
    if rope.temperature:
        turns = jnp.floor(positions / rope.original_context)[:, :, None, None]
        temperature = 1 + rope.temperature * jnp.log1p(turns)
    return Rotation(inverse, cos[:, :, None], sin[:, :, None], query_factor(rope), temperature)
