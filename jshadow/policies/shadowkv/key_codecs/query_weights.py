"""Weights of the numbers of a key, by the queries that the key will meet.

A code of the keys has an error in each of their numbers, and attention sees the product of that error with a query.
RoPE turns a query and a key against each other by their distance, in pairs of numbers. Over many distances, an error in
either number of a pair costs the mean square of the queries in that pair, and pairs do not mix. So a code that works on
keys times the root of that mean square loses the least of the products, not of the keys. KQ-SVD (Lesens et al. 2025,
arXiv 2512.05916) weighs keys by what queries are like without RoPE, where whole matrices can be taken.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jshadow.ops.attention import group_queries

TAIL = 64  # the prompt's last queries, which the weights are computed from
LEAST = 0.01  # part of the mean square that every weight has: later queries may use directions that these do not


def query_weights(
    q_tail: Float[Array, "B w h_q d"], lengths: Int[Array, " B"], kv_heads: int, rotated: int
) -> Float[Array, "B {kv_heads} d"]:
    """What a code multiplies the numbers of a key with before it loses some of them.

    Args:
        q_tail: queries after RoPE of each row's last w tokens [B, w, h_q, d]. Rows shorter than w are padded in front.
        lengths: tokens of each row, int32 [B].
        kv_heads: KV heads.
        rotated: how many of the d numbers RoPE turns; it turns number i with number i + rotated / 2.

    Returns:
        float32 [B, h_kv, d], equal within a pair, with a mean square near 1 over a row's heads.
    """
    count = q_tail.shape[1]
    real = jnp.arange(count) >= count - lengths[:, None]
    queries = group_queries(jnp.where(real[..., None, None], q_tail, 0), kv_heads).astype(jnp.float32)
    energy = (queries**2).sum(axis=(2, 3))
    turned, half = energy[..., :rotated], rotated // 2
    pairs = (turned[..., :half] + turned[..., half:]) / 2
    energy = jnp.concatenate([pairs, pairs, energy[..., rotated:]], axis=-1)
    mean = energy.mean(axis=(1, 2), keepdims=True)
    return jnp.sqrt(energy / jnp.where(mean > 0, mean, 1) + LEAST)
