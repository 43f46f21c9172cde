"""Low-rank factors of the pre-RoPE keys (ShadowKV, section 4.1 and algorithm 1), by the Gram matrix.

The paper takes a thin SVD of K [S, h_kv * d]. The eigenvectors of K^T K are the same right singular vectors V_r;
left = K V_r and right = V_r^T multiply to the same truncation, at a fraction of the cost, and nothing is divided by
a singular value. Left keeps the scale, so a new key joins the factors as k V_r.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jshadow.rope import rotate
from jshadow.state import Rebuild


def key_factors(
    k_pre: Float[Array, "B S h_kv d"], lengths: Int[Array, "B"], rank: int
) -> tuple[Float[Array, "B S {rank}"], Float[Array, "B h_kv {rank} d"]]:
    """Factor each row's pre-RoPE keys, all KV heads side by side.

    Args:
        k_pre: [B, S, h_kv, d], right padded.
        lengths: int32 [B].
        rank: columns to keep, at most h_kv * d. Columns beyond a row's length are zero.

    Returns:
        left [B, S, rank] and right [B, h_kv, rank, d], both float32; left @ right approximates the keys.
    """
    batch, length, heads, dim = k_pre.shape
    real = jnp.arange(length)[None, :, None] < lengths[:, None, None]
    keys = jnp.where(real, k_pre.reshape(batch, length, heads * dim).astype(jnp.float32), 0.0)
    gram = jnp.einsum("bsm,bsn->bmn", keys, keys, precision=lax.Precision.HIGHEST)
    basis = jnp.linalg.eigh(gram)[1][:, :, ::-1][:, :, :rank]
    basis = jnp.where(jnp.arange(rank) < lengths[:, None, None], basis, 0.0)
    left = jnp.einsum("bsm,bmr->bsr", keys, basis, precision=lax.Precision.HIGHEST)
    right = basis.reshape(batch, heads, dim, rank).transpose(0, 1, 3, 2)
    return left, right


def reconstruct_keys(rebuild: Rebuild, ids: Int[Array, "B heads n"]) -> Float[Array, "B heads tokens d"]:
    """Rebuild the post-RoPE keys of selected units.

    Args:
        rebuild: the factors.
        ids: int32 [B, heads, n], units.

    Returns:
        [B, heads, n * unit, d] in the dtype of the factors.
    """
    batch, heads, count = ids.shape
    rank, dim = rebuild.right.shape[2:]
    unit = rebuild.left.shape[2] // rank
    rows = jnp.take_along_axis(rebuild.left[:, None], ids[..., None], axis=2, mode="clip")
    rows = rows.reshape(batch, heads, count * unit, rank)
    keys = jnp.einsum("bhtr,bhrd->bhtd", rows, rebuild.right, preferred_element_type=jnp.float32)
    table = rebuild.rope_table
    positions = (ids[..., None] * unit + jnp.arange(unit)).reshape(batch, heads, count * unit)
    cos, sin = (jnp.take(part, positions, axis=0, mode="clip") for part in (table.cos, table.sin))
    return rotate(keys.reshape(batch, heads, count * unit, dim), cos, sin).astype(rebuild.left.dtype)
