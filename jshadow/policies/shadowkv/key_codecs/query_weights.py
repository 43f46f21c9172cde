"""What an error in a key costs, by the queries that meet it.

A code of the keys loses something in each of their numbers; attention sees the product of that with a query. RoPE turns
query and key against each other by their distance, in pairs of numbers: over many distances an error in either number
of a pair costs the mean square of the queries there, and pairs do not mix. So the least is lost of the products, not of
the keys, where a code works on keys times the root of that. KQ-SVD (Lesens et al. 2025, arXiv 2512.05916) weighs by
what queries are like without RoPE, where whole matrices can be taken.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jshadow.ops.attention import group_queries

TAIL = 64  # queries of a prompt that are looked at, its last
LEAST = 0.01  # of the mean square: what no query of these asks for, a later one may


def query_weights(
    q_tail: Float[Array, "B w h_q d"], lengths: Int[Array, "B"], kv_heads: int, rotated: int
) -> Float[Array, "B {kv_heads} d"]:
    """What the numbers of a key are to be multiplied with before a code loses some of them.

    Args:
        q_tail: queries after RoPE of each row's last w tokens [B, w, h_q, d]; the first are none's in a shorter row.
        lengths: tokens of each row, int32 [B].
        kv_heads: KV heads.
        rotated: how many of the d numbers RoPE turns, number i with number i + rotated / 2.

    Returns:
        float32 [B, h_kv, d], equal in a pair; a mean square near 1 over a row's heads.
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
