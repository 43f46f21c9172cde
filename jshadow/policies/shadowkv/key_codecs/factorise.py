"""Low-rank factors of the pre-RoPE keys (ShadowKV, section 4.1 and algorithm 1), by the Gram matrix.

The paper takes a thin SVD of K [S, h_kv * d]. The eigenvectors of K^T K are the same right singular vectors V_r;
left = K V_r and right = V_r^T multiply to the same truncation, at a fraction of the cost, and nothing is divided by
a singular value. Left keeps the scale, so a new key joins the factors as k V_r.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 2048  # tokens of which a float32 copy exists at once
EXACT = lax.Precision.HIGHEST  # TF32 products would bend the basis


def key_factors(
    k_pre: Float[Array, "B S h_kv d"], lengths: Int[Array, "B"], rank: int,
    weights: Float[Array, "B h_kv d"] | None = None, block: int = BLOCK,
) -> tuple[Float[Array, "B S {rank}"], Float[Array, "B h_kv {rank} d"]]:  # fmt: skip
    """Factor each row's pre-RoPE keys, all KV heads side by side.

    Args:
        k_pre: [B, S, h_kv, d], right padded.
        lengths: int32 [B].
        rank: columns to keep, at most h_kv * d. Columns beyond a row's length are zero, unless all are kept: then
            right is a whole basis, and every key of any token survives it.
        weights: what an error in each number of a key counts, float32; None: all alike, and right is orthonormal.
        block: tokens of which a float32 copy exists at once.

    Returns:
        left [B, S, rank] in k_pre's dtype and right [B, h_kv, rank, d] in float32; left @ right approximates the keys.
    """
    batch, length, heads, dim = k_pre.shape
    width, block = heads * dim, min(block, length)

    def add(index: Array, gram: Array) -> Array:
        rows, _ = token_block(k_pre, lengths, index, block, weights)
        return gram + jnp.einsum("bsm,bsn->bmn", rows, rows, precision=EXACT)

    def project(index: Array, left: Array) -> Array:
        rows, start = token_block(k_pre, lengths, index, block, weights)
        new = jnp.einsum("bsm,bmr->bsr", rows, basis, precision=EXACT).astype(left.dtype)
        return put_block(left, new, index, start)

    blocks = -(-length // block)
    gram = lax.fori_loop(0, blocks, add, jnp.zeros((batch, width, width), jnp.float32))
    basis = jnp.linalg.eigh(gram)[1][:, :, ::-1][:, :, :rank]
    if rank < width:
        basis = jnp.where(jnp.arange(rank) < lengths[:, None, None], basis, 0.0)
    left = lax.fori_loop(0, blocks, project, jnp.zeros((batch, length, rank), k_pre.dtype))
    return left, head_columns(basis, weights, heads)


def head_columns(
    basis: Float[Array, "B columns r"], weights: Float[Array, "B h_kv d"] | None, heads: int
) -> Float[Array, "B {heads} r d"]:
    """A basis of weighed keys, all heads side by side, as what makes keys themselves of coefficients."""
    if weights is not None:
        basis = basis / weights.reshape(basis.shape[0], -1, 1)
    return basis.reshape(basis.shape[0], heads, -1, basis.shape[2]).transpose(0, 1, 3, 2)


def token_block(
    k_pre: Array, lengths: Array, index: Array, block: int, weights: Array | None = None
) -> tuple[Array, Array]:
    """Tokens index * block and on of k_pre [B, S, h_kv, d], times weights [B, h_kv, d], all heads side by side in
    float32, and the first's number.

    [B, block, h_kv * d]; zeros for padding and, as the last block overlaps the one before, for tokens that were there
    already: every token counts once.
    """
    batch, length, heads, dim = k_pre.shape
    start = jnp.minimum(index * block, length - block)
    rows = lax.dynamic_slice_in_dim(k_pre, start, block, axis=1).reshape(batch, block, heads * dim)
    own = own_tokens(lengths, index, start, block)
    rows = rows.astype(jnp.float32)
    if weights is not None:
        rows *= weights.reshape(batch, 1, -1)
    return jnp.where(own[..., None], rows, 0.0), start


def own_tokens(lengths: Array, index: Array, start: Array, block: int) -> Array:
    """Which tokens of `token_block` are real and not of the block before, bool [B, block]."""
    token = start + jnp.arange(block)
    return (token >= index * block) & (token < lengths[:, None])


def put_block(buffer: Array, new: Array, index: Array, start: Array) -> Array:
    """buffer [B, S, ...] with a block's rows, but for tokens that the block before has written."""
    block = new.shape[1]
    old = lax.dynamic_slice_in_dim(buffer, start, block, axis=1)
    counted = (start + jnp.arange(block) < index * block).reshape(block, *[1] * (buffer.ndim - 2))
    return lax.dynamic_update_slice_in_dim(buffer, jnp.where(counted, old, new), start, axis=1)


def project_keys(
    k_pre: Float[Array, "B T h_kv d"], right: Float[Array, "B h_kv r d"],
    weights: Float[Array, "B h_kv d"] | None = None,
) -> Float[Array, "B T r"]:  # fmt: skip
    """Left rows [B, T, r] of later keys before RoPE, on a prompt's basis (ShadowKV, section 7.1), in right's dtype."""
    if weights is not None:  # once for the keys, once for right, which lacks it
        k_pre = k_pre.astype(jnp.float32) * weights[:, None] ** 2
    rows = jnp.einsum("bthd,bhrd->btr", k_pre, right, precision=EXACT, preferred_element_type=jnp.float32)
    return rows.astype(right.dtype)
