"""Filters for a batch whose rows have settings of their own: which tokens each row keeps.

B is the number of rows, and V is the size of the vocabulary. Nothing is sorted. The last token that a filter keeps is
found by a search over the bits of the logits. All sums are sums of integers, so their order does not matter. Maxima
are exact too, and everything else is elementwise. So a row keeps the same tokens in every batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

EVERY = 2**32 - 1  # a limit that no sum reaches: all tokens are kept
WHOLE = 2.0**31  # the sum of the shares of a row, apart from rounding
DISTANCE_BITS = 32  # bits of a float32
BITS = 2  # bits of the cut that each round of the search finds


def keep_likely(
    logits: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> Bool[Array, "B V"]:
    """Return which tokens the filters of each row keep. They apply in the order top_k, top_p, min_p, as in `Sampler`.

    Args:
        logits: float32 [B, V], divided by the temperature, minus the largest logit of the row. So the largest is 0.
        top_k: int32 [B]. Keep the k most likely tokens, the lower ids in a tie. 0 is off.
        top_p: float32 [B] in (0, 1]. Keep the fewest tokens whose probabilities sum to at least p. 1 is off.
        min_p: float32 [B] in [0, 1]. Keep tokens whose probability is at least min_p times the largest. 0 is off.

    Returns:
        bool [B, V]. A token with the logit -inf is dropped. The most likely token is kept.
    """
    weights = jnp.exp(logits)
    keep = logits > -jnp.inf

    def first_k(keep: Array) -> Array:
        limits = jnp.where(top_k > 0, top_k.astype(jnp.uint32), jnp.uint32(EVERY))
        return keep & keep_first(logits, jnp.ones(logits.shape, jnp.uint32), limits)

    def first_p(keep: Array) -> Array:
        parts = shares(jnp.where(keep, weights, 0.0))
        limits = jnp.ceil(top_p * parts.sum(axis=-1, dtype=jnp.uint32).astype(jnp.float32)).astype(jnp.uint32)
        limits = jnp.where(top_p < 1, jnp.maximum(limits, 1), jnp.uint32(EVERY))
        return keep & keep_first(logits, parts, limits)

    # A program for all settings, which does the work of a filter only if a row has this filter.
    keep = jax.lax.cond((top_k > 0).any(), first_k, lambda keep: keep, keep)
    keep = jax.lax.cond((top_p < 1).any(), first_p, lambda keep: keep, keep)
    return keep & (weights >= min_p[:, None])


def keep_first(
    logits: Float[Array, "B V"], weights: UInt[Array, "B V"], limits: UInt[Array, " B"]
) -> Bool[Array, "B V"]:
    """Return which tokens come before the limit, if the tokens are ordered from the largest logit to the smallest.

    A token is kept if the weights of all tokens before it in this order sum to less than the limit of its row. In a
    tie, the lower id comes first.

    Args:
        logits: float32 [B, V], at most 0.
        weights: uint32 [B, V]. The sum of a row is below 2**32.
        limits: uint32 [B], at least 1.

    Returns:
        bool [B, V].
    """
    distances = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.uint32)  # in the order of the absolute values

    def closer(cut: Array) -> Array:
        return jnp.where(distances < cut[:, None], weights, 0).sum(axis=-1, dtype=jnp.uint32)

    def next_bits(index: Array, cut: Array) -> Array:
        step = jnp.uint32(1) << (DISTANCE_BITS - BITS * (index + 1)).astype(jnp.uint32)
        below = [closer(cut + times * step) < limits for times in range(1, 2**BITS)]
        return cut + step * sum(below[1:], below[0].astype(jnp.uint32))

    # The largest distance before which the weights sum to less than the limit. Only the tokens at it may be cut.
    cut = jax.lax.fori_loop(0, DISTANCE_BITS // BITS, next_bits, jnp.zeros(limits.shape, jnp.uint32))
    tied = distances == cut[:, None]
    ties = jnp.where(tied, weights, 0)
    before = closer(cut)[:, None] + jnp.cumsum(ties, axis=-1, dtype=jnp.uint32) - ties
    return (distances < cut[:, None]) | (tied & (before < limits[:, None]))


def shares(weights: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Return the weights of each row as integers that sum to about 2**31.

    Args:
        weights: float32 [B, V] in [0, 1], with at least one 1 in each row.

    Returns:
        uint32 [B, V]. A row sums to at most 2**31 + V, apart from the rounding of float32. A part of this sum, divided
        by the sum, is wrong by at most V / 2**31.
    """
    scale = jnp.full((len(weights), 1), WHOLE / weights.shape[-1], jnp.float32)
    for _ in range(2):  # the first scale is for equal weights; the second round makes up for what rounding up added
        parts = jnp.ceil(weights * scale).astype(jnp.uint32)
        scale = scale * (WHOLE / parts.sum(axis=-1, keepdims=True, dtype=jnp.uint32).astype(jnp.float32))
    return jnp.round(weights * scale).astype(jnp.uint32)
