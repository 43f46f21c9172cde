"""Low-rank keys (ShadowKV, section 4.1 and algorithm 1): the leading directions of the keys, in the model's dtype.

The paper takes a thin SVD of K [S, h_kv * d]. The eigenvectors of K^T K are the same right singular vectors V_r.
left = K V_r and right = V_r^T multiply to the same truncation at a fraction of the cost, and nothing is divided by a
singular value. The left factor has the scale, so the left row of a new key k is k V_r.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jshadow.ops.layout import fit_tokens
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, EXACT, KeyCode, KeyCodec, Sizes, put_block, token_block


def usual_rank(columns: int) -> int:
    """The paper's share of the key columns: 160 of every 1024, in multiples of 8."""
    return min(columns, max(8, round(columns * 160 / 1024 / 8) * 8))


@dataclasses.dataclass(frozen=True)
class LowRankCodec(KeyCodec):
    """left [B, n, c * rank] times right [B, h_kv, rank, d], both in the model's dtype.

    Attributes:
        rank: columns of the factors.
    """

    rank: int

    name = "lowrank"
    compiled = True

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """The two factors."""
        dtype = jnp.dtype(sizes.dtype)
        left: Any = jax.ShapeDtypeStruct((batch, units, chunk * self.rank), dtype)
        return KeyCode(left, jax.ShapeDtypeStruct((batch, sizes.heads, self.rank, sizes.dim), dtype))

    def encode(self, k_pre: Array, lengths: Array, units: int, chunk: int, weights: Array | None = None) -> KeyCode:
        """Factor the keys by their Gram matrix."""
        left, right = key_factors(k_pre, lengths, self.rank, weights)
        left = fit_tokens(left, units * chunk).reshape(left.shape[0], units, chunk * self.rank)
        return KeyCode(left, right.astype(k_pre.dtype))

    def project(self, k_pre: Array, right: Any, weights: Array | None = None) -> Array:
        """Multiply keys with the prompt's basis."""
        return project_keys(k_pre, right, weights)[:, :, None]

    def expand(self, rows: Array, right: Any) -> Array:
        """Multiply the two factors."""
        if rows.shape[1] == 1:
            return jnp.einsum("bsr,bhrd->bhsd", rows[:, 0], right, preferred_element_type=jnp.float32)
        return jnp.einsum("bhtr,bhrd->bhtd", rows, right, precision=EXACT, preferred_element_type=jnp.float32)

    def operands(self, right: Any) -> dict[str, Any]:
        """The other factor."""
        return {"right": right}

    def products(self, sizes: Sizes) -> int:
        """One for each column of the factors."""
        return self.rank

    def expand_bytes(self, sizes: Sizes) -> int:
        """The left row."""
        return self.rank * jnp.dtype(sizes.dtype).itemsize

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Left rows in the order of the prompt, the Gram matrix and its eigenvectors, float32 copies of a block."""
        columns, item = sizes.columns, jnp.dtype(sizes.dtype).itemsize
        return 2 * tokens * self.rank * item + 4 * (6 * columns * columns + 4 * block * columns)


def key_factors(
    k_pre: Float[Array, "B S h_kv d"],
    lengths: Int[Array, " B"],
    rank: int,
    weights: Float[Array, "B h_kv d"] | None = None,
    block: int = BLOCK,
) -> tuple[Float[Array, "B S {rank}"], Float[Array, "B h_kv {rank} d"]]:
    """Factor each row's pre-RoPE keys, all KV heads side by side.

    Args:
        k_pre: [B, S, h_kv, d], right padded.
        lengths: int32 [B].
        rank: columns to keep, at most h_kv * d. Columns beyond a row's length are zero. With all columns, `right` is a
            whole basis, and the key of any token survives it.
        weights: what an error in each number of a key counts, float32 [B, h_kv, d]. None: all count alike, and the
            columns of `right` are orthonormal.
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
    """A basis of weighted keys, all heads side by side, as the columns that rebuild keys without weights."""
    if weights is not None:
        basis = basis / weights.reshape(basis.shape[0], -1, 1)
    return basis.reshape(basis.shape[0], heads, -1, basis.shape[2]).transpose(0, 1, 3, 2)


def project_keys(
    k_pre: Float[Array, "B T h_kv d"],
    right: Float[Array, "B h_kv r d"],
    weights: Float[Array, "B h_kv d"] | None = None,
) -> Float[Array, "B T r"]:
    """Left rows [B, T, r] of later keys before RoPE, on a prompt's basis (ShadowKV, section 7.1), in right's dtype."""
    if weights is not None:  # once for the keys, and once because right is divided by them
        k_pre = k_pre.astype(jnp.float32) * weights[:, None] ** 2
    rows = jnp.einsum("bthd,bhrd->btr", k_pre, right, precision=EXACT, preferred_element_type=jnp.float32)
    return rows.astype(right.dtype)
