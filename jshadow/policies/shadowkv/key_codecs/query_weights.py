"""Weights on the numbers of a key, estimated from the prompt's last queries.

A key code has an error in each number of a key, and attention is affected by the product of this error and a query.
RoPE rotates pairs of numbers by an angle that depends on the distance. Averaged over many distances, the squared error
of a product is the squared error of a pair times the mean square of the queries in that pair, summed over pairs. So a
code minimizes the error of the products if it codes keys times the root of that mean square. KQ-SVD (Lesens et al.
2025, arXiv 2512.05916) uses the queries in the same way for models without RoPE, with full matrices as weights.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jshadow.ops.attention import group_queries

TAIL = 64  # number of the prompt's last queries from which the weights are computed
LEAST = 0.01  # added to each relative mean square, because later queries may be larger in numbers that are small here


def query_weights(
    q_tail: Float[Array, "B w h_q d"], lengths: Int[Array, " B"], kv_heads: int, rotated: int, axis: str | None = None
) -> Float[Array, "B {kv_heads} d"]:
    """Return the factors by which a code multiplies the numbers of a key before it quantizes or truncates them.

    Args:
        q_tail: queries after RoPE of each row's last w tokens [B, w, h_q, d]. Rows shorter than w are padded in front.
        lengths: number of tokens in each row, int32 [B].
        kv_heads: number of KV heads.
        rotated: how many of the d numbers RoPE rotates. Number i is paired with number i + rotated / 2.
        axis: the axis of a mesh that splits the heads, inside shard_map, or None.

    Returns:
        float32 [B, h_kv, d], equal within a pair. The mean square over all heads of a row is near 1.
    """
    count = q_tail.shape[1]
    real = jnp.arange(count) >= count - lengths[:, None]
    queries = group_queries(jnp.where(real[..., None, None], q_tail, 0), kv_heads).astype(jnp.float32)
    energy = (queries**2).sum(axis=(2, 3))
    turned, half = energy[..., :rotated], rotated // 2
    pairs = (turned[..., :half] + turned[..., half:]) / 2
    energy = jnp.concatenate([pairs, pairs, energy[..., rotated:]], axis=-1)
    mean = energy.mean(axis=(1, 2), keepdims=True)
    mean = mean if axis is None else lax.pmean(mean, axis)
    return jnp.sqrt(energy / jnp.where(mean > 0, mean, 1) + LEAST)
