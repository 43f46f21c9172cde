"""Samplers: frozen settings, and one pure function from logits to token ids."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jshadow.errors import ConfigError
from jshadow.models.config import check_positive

COLDEST = 1e-30  # lower temperatures are raised to this one, at which only a token with the largest logit is drawn

NO_TOKEN = -1  # the token of a row in which none could be drawn


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn. The default is greedy: the most likely token, the lower id in a tie.

    The logits are divided by the temperature. Then the filters apply in the order below. A filter that is None is off.
    The most likely token is always kept.

    Attributes:
        temperature: divisor of the logits. 0 means greedy.
        top_k: keep the k most likely tokens.
        top_p: keep the fewest tokens whose probabilities sum to at least p.
        min_p: keep tokens whose probability is at least min_p times that of the most likely token.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < math.inf):
            raise ConfigError(f"sampler.temperature must be at least 0 and finite, got {self.temperature!r}")
        if self.top_k is not None:
            check_positive("sampler", top_k=self.top_k)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value <= 1):
                raise ConfigError(f"sampler.{name} must lie in (0, 1], got {value!r}")


def seed_key(seed: int) -> Key[Array, ""]:
    """Return the PRNG key for a 64-bit seed.

    Unless x64 is enabled, jax.random.key reads only the low 32 bits of a seed. So the high 32 bits are folded into the
    key if they are not 0. A seed from 0 to 2**32 - 1 has the same key as with jax.random.key.
    """
    low, high = np.uint32(int(seed) & 0xFFFFFFFF), np.uint32(int(seed) >> 32 & 0xFFFFFFFF)
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key


def sample(sampler: Sampler, logits: Float[Array, "B V"], key: Key[Array, ""]) -> Int[Array, " B"]:
    """Draw a token for each row.

    Args:
        sampler: static settings.
        logits: float32 [B, V].
        key: PRNG key. Row b draws with fold_in(key, b), so a row does not depend on its neighbors.

    Returns:
        The drawn token ids, int32 [B].
    """
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    return _sample_rows(sampler, logits, keys)


def _sample_rows(sampler: Sampler, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
    """Draw a token for each row with a PRNG key for each row. Greedy sampling does not use the keys."""
    if sampler.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Subtract the largest logit, so that all are at most 0 and no temperature makes two of them infinite.
    cooled = (logits - logits.max(axis=-1, keepdims=True)) / max(sampler.temperature, COLDEST)
    filtered = filter_logits(sampler, cooled)
    return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)


def sample_checked(sampler: Sampler, logits: Float[Array, "B V"], key: Key[Array, ""]) -> Int[Array, " B"]:
    """Draw a token for each row as `sample` does, int32 [B]. A row whose logits contain a NaN gets NO_TOKEN.

    Without this check, argmax would return the index of the NaN.
    """
    return jnp.where(jnp.isnan(logits).any(axis=-1), NO_TOKEN, sample(sampler, logits, key))


def sample_numbered(
    sampler: Sampler, logits: Float[Array, "B T V"], key: Key[Array, ""], first: Int[Array, " B"]
) -> Int[Array, "B T"]:
    """Draw T consecutive tokens of each row, int32 [B, T]. A place whose logits contain a NaN gets NO_TOKEN.

    Token t of row b is draw number first[b] + t. It is the token that `sample_checked` draws in that row with
    fold_in(key, first[b] + t), so a draw does not depend on how many tokens are drawn at once.
    """
    rows, count = jnp.arange(logits.shape[0]), logits.shape[1]
    numbers = first[:, None] + jnp.arange(count)

    def key_of(number: Array, row: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, number), row)

    keys = jax.vmap(jax.vmap(key_of, (0, None)))(numbers, rows)
    flat = logits.reshape(-1, logits.shape[2])
    drawn = jnp.where(jnp.isnan(flat).any(axis=-1), NO_TOKEN, _sample_rows(sampler, flat, keys.reshape(-1)))
    return drawn.reshape(-1, count)


def filter_logits(sampler: Sampler, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Return the logits [B, V] with -inf for the tokens that a filter of the sampler drops."""
    if sampler.top_k is not None and sampler.top_k < logits.shape[-1]:
        # By rank and not by value: with a tie at the cut, the lower ids and exactly k tokens are kept.
        chosen = jax.lax.top_k(logits, sampler.top_k)[1]
        rows = jnp.arange(logits.shape[0])[:, None]
        mask = jnp.zeros(logits.shape, bool).at[rows, chosen].set(True)
        logits = jnp.where(mask, logits, -jnp.inf)
    if sampler.top_p is not None and sampler.top_p < 1:
        order = jnp.argsort(-logits, axis=-1, stable=True)
        probs = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        keep = jnp.take_along_axis(before < sampler.top_p, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(keep, logits, -jnp.inf)
    if sampler.min_p is not None:
        probs = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(probs >= sampler.min_p * probs.max(axis=-1, keepdims=True), logits, -jnp.inf)
    return logits
