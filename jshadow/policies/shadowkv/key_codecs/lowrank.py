"""Low-rank keys (ShadowKV, section 4.1 and algorithm 1): the keys' coefficients in their leading directions.

The paper computes a thin SVD of K [S, h_kv * d]. Here the right singular vectors V_r are computed as the eigenvectors
of K^T K, at a fraction of the cost. The factors are left = K V_r and right = V_r^T. Their product is the truncated SVD,
and no number is divided by a singular value. The left row of a new key k is k V_r.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jshadow.ops.layout import fit_tokens
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, EXACT, KeyCode, KeyCodec, Sizes, Spread, pass_launches
from jshadow.policies.shadowkv.key_codecs.basis import basis_launches, basis_operations, leading_columns
from jshadow.policies.shadowkv.key_codecs.blocks import put_block
from jshadow.policies.shadowkv.key_codecs.prompt_keys import PromptKeys


def usual_rank(columns: int) -> int:
    """Return the paper's rank: 160 for every 1,024 key columns, in multiples of 8.

    It is at least 8, but never more than the number of columns.
    """
    return min(columns, max(8, round(columns * 160 / 1024 / 8) * 8))


@dataclasses.dataclass(frozen=True)
class LowRankCodec(KeyCodec):
    """Keys as the product of left [B, n, c * rank] and right [B, h_kv, rank, d], both in the model's dtype.

    Attributes:
        rank: rank of the factors.
    """

    rank: int

    name = "lowrank"
    compiled = True

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return the shapes of the two factors."""
        dtype = jnp.dtype(sizes.dtype)
        left: Any = jax.ShapeDtypeStruct((batch, units, chunk * self.rank), dtype)
        return KeyCode(left, jax.ShapeDtypeStruct((batch, sizes.heads, self.rank, sizes.dim), dtype))

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        """Factor the keys, using the eigenvectors of their Gram matrix."""
        left, right = key_factors(k_pre, lengths, self.rank, weights, spread)
        left = fit_tokens(left, units * chunk).reshape(left.shape[0], units, chunk * self.rank)
        return KeyCode(left, right.astype(k_pre.dtype))

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        """Multiply keys with the prompt's basis."""
        return project_keys(k_pre, right, weights, axis)[:, :, None]

    def expand(self, rows: Array, right: Any) -> Array:
        """Multiply the two factors."""
        if rows.shape[1] == 1:
            return jnp.einsum("bsr,bhrd->bhsd", rows[:, 0], right, preferred_element_type=jnp.float32)
        return jnp.einsum("bhtr,bhrd->bhtd", rows, right, precision=EXACT, preferred_element_type=jnp.float32)

    def operands(self, right: Any) -> dict[str, Any]:
        """Return the right factor."""
        return {"right": right}

    def products(self, sizes: Sizes) -> int:
        """Return the rank."""
        return self.rank

    def expand_bytes(self, sizes: Sizes) -> int:
        """Count the left row."""
        return self.rank * jnp.dtype(sizes.dtype).itemsize

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Count the Gram matrix, its basis, and one pass for the left rows."""
        return encode_operations(sizes, tokens, self.rank, passes=1)

    def encode_launches(self, sizes: Sizes, tokens: int) -> int:
        """Count the passes for the Gram matrix and for the left rows, and the basis."""
        return pass_launches(2, tokens) + basis_launches(sizes.columns, self.rank)

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count two copies of the left rows, the Gram matrix, its eigenvectors, and float32 copies of a block."""
        columns, item = sizes.columns, jnp.dtype(sizes.dtype).itemsize
        return 2 * tokens * self.rank * item + 4 * (6 * columns * columns + 4 * block * columns)


def encode_operations(sizes: Sizes, tokens: int, rank: int, passes: int) -> int:
    """Return the operations of the Gram matrix, its basis, and `passes` products of all keys with the basis."""
    block = min(BLOCK, tokens)
    parts = 2 if jnp.dtype(sizes.dtype) == jnp.bfloat16 else 1  # a basis in two matrices; see `prompt_keys`
    rows = -(-tokens // block) * block
    products = 2 * rows * sizes.columns * (sizes.columns + passes * parts * rank)
    return products + basis_operations(sizes.columns, rank)


def key_factors(
    k_pre: Float[Array, "B S h_kv d"],
    lengths: Int[Array, " B"],
    rank: int,
    weights: Float[Array, "B h_kv d"] | None = None,
    spread: Spread | None = None,
    block: int = BLOCK,
) -> tuple[Float[Array, "B S {rank}"], Float[Array, "B h_kv {rank} d"]]:
    """Factor each row's keys before RoPE, with all KV heads side by side.

    Args:
        k_pre: keys before RoPE, padded on the right [B, S, h_kv, d].
        lengths: tokens of each row, int32 [B].
        rank: number of columns to keep, at most h_kv * d. Columns beyond a row's length are zero, unless all columns
            are kept. Then `right` is a complete basis, in which every key is exact.
        weights: weights on the errors of a key's numbers, float32 [B, h_kv, d]. None: all errors count equally, and the
            columns of `right` are orthonormal.
        spread: as in `KeyCodec.encode`.
        block: number of tokens that have a float32 copy at once.

    Returns:
        left [B, S, rank] in k_pre's dtype and right [B, h_kv, rank, d] in float32. left @ right approximates the keys.
    """
    batch, length, heads, dim = k_pre.shape
    width, block = heads * dim, min(block, length)

    keys = PromptKeys(k_pre, lengths, block, weights, spread=spread)
    basis = leading_columns(keys.gram(), rank, spread)
    if rank < width:
        basis = jnp.where(jnp.arange(rank) < keys.tokens[:, None, None], basis, 0.0)
    coefficients = keys.coefficients(basis)

    def project(index: Array, left: Array) -> Array:
        new, start = coefficients(index)
        return put_block(left, new.astype(left.dtype), index, start)

    left = lax.fori_loop(0, keys.blocks, project, jnp.zeros((batch, length, rank), k_pre.dtype))
    return left, head_columns(basis, weights, heads)


def head_columns(
    basis: Float[Array, "B columns r"], weights: Float[Array, "B h_kv d"] | None, heads: int
) -> Float[Array, "B {heads} r d"]:
    """Convert a basis of weighted keys, with all heads side by side, to columns [B, heads, r, d] of unweighted keys."""
    if weights is not None:
        basis = basis / weights.reshape(basis.shape[0], -1, 1)
    return basis.reshape(basis.shape[0], heads, -1, basis.shape[2]).transpose(0, 1, 3, 2)


def project_keys(
    k_pre: Float[Array, "B T h_kv d"],
    right: Float[Array, "B h_kv r d"],
    weights: Float[Array, "B h_kv d"] | None = None,
    axis: str | None = None,
) -> Float[Array, "B T r"]:
    """Return the left rows [B, T, r] of later keys before RoPE, in right's dtype (ShadowKV, section 7.1).

    `axis` is as in `KeyCodec.project`.
    """
    if weights is not None:  # squared: once for the weighted keys, and once because right is divided by the weights
        k_pre = k_pre.astype(jnp.float32) * weights[:, None] ** 2
    rows = jnp.einsum("bthd,bhrd->btr", k_pre, right, precision=EXACT, preferred_element_type=jnp.float32)
    return (rows if axis is None else lax.psum(rows, axis)).astype(right.dtype)
