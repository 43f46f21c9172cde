"""The largest attention that each key receives from any of many queries, and the norms of projected values.

The scores of a second pass over a prompt are made of both (KVzip, arXiv 2505.23416, section 3). R queries, N keys, h_q
query heads, h_kv KV heads, d head width, D model width, m values.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.ops.prefix_attention import MASKED
from pallas_kernels.tiles import exact

QUERIES = 128  # queries whose scores are in memory at once


def most_attention(q: Array, keys: Array, seen: Array, worth: Array, scale: float) -> Array:
    """Return the largest weighted softmax probability that each key receives from any query, for one row.

    Args:
        q: queries after RoPE [R, h_q, d].
        keys: [N, h_kv, d].
        seen: which keys each query sees, bool [R, N].
        worth: the factor of each query, float32 or bool [R].
        scale: factor by which the scores are multiplied.

    Returns:
        float32 [h_kv, group, N].
    """
    size, heads = len(q), keys.shape[1]
    block = min(QUERIES, size)
    padding = -size % block

    def blocks(x: Array) -> Array:
        return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])

    def add(best: Array, args: Any) -> tuple[Array, None]:
        q, seen, worth = args
        q = q.reshape(block, heads, -1, q.shape[-1])
        logits = jnp.einsum("thgd,nhd->hgtn", q, keys, preferred_element_type=jnp.float32, precision=exact(q.dtype))
        shares = jax.nn.softmax(jnp.where(seen, logits * scale, MASKED), axis=-1) * worth[:, None]
        return jnp.maximum(best, shares.max(axis=2)), None

    start = jnp.zeros((heads, q.shape[1] // heads, len(keys)))
    best, _ = lax.scan(add, start, (blocks(q), blocks(seen), blocks(worth.astype(jnp.float32))))
    return best


def output_products(projection: Mapping[str, Array], kv_heads: int, head_dim: int) -> Array:
    """Return the products of the columns of each query head's output projection, float32 [h_kv, group, d, d].

    With them, the norm of a projected value is computed without the projection: |W v|^2 = v^T (W^T W) v.

    Args:
        projection: the weights of the output projection: "kernel" [h_q * d, D], and "kernel_scale" if they are int8.
        kv_heads: number of KV heads.
        head_dim: width of a head.
    """
    kernel = projection["kernel"].astype(jnp.float32) * projection.get("kernel_scale", 1.0)
    kernel = kernel.reshape(kv_heads, -1, head_dim, kernel.shape[-1])
    return jnp.einsum("hgdm,hgem->hgde", kernel, kernel, precision="highest")


def output_norms(values: Array, products: Array) -> Array:
    """Return the norms of values after the output projection, float32 [h_kv, group, m].

    Args:
        values: float32 [m, h_kv, d].
        products: from `output_products`.
    """
    turned = jnp.einsum("mhd,hgde->hgme", values, products, precision="highest")
    return jnp.sqrt(jnp.maximum(jnp.einsum("hgme,mhe->hgm", turned, values, precision="highest"), 0))
