"""The two large products of a codec: a prompt's keys with themselves, and with the columns of a basis.

Products of bfloat16 numbers are exact in float32. So keys in bfloat16 are multiplied as they are, on the tensor cores
of a GPU, with float32 sums. The mean and the weights change the small matrices instead: weights W and a mean m make of
the products G of n keys with the sum s the matrix W (G - s m^T - m s^T + n m m^T) W. A basis is split into two
matrices of bfloat16 numbers. Together they have 16 significant bits. Keys of other dtypes are centered and weighted in
float32, and their products are float32 products.

Sizes: B rows of the batch, S tokens, h_kv KV heads of width d, m = h_kv * d columns.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jshadow.policies.shadowkv.key_codecs.base import EXACT, Spread
from jshadow.policies.shadowkv.key_codecs.blocks import new_tokens, token_block


@dataclasses.dataclass(frozen=True)
class PromptKeys:
    """A prompt's keys minus their mean, times weights. They are read block by block.

    Attributes:
        k_pre: keys before RoPE, padded on the right [B, S, h_kv, d].
        lengths: tokens of each row, int32 [B].
        block: number of tokens in a block, at most S.
        weights: weights on the numbers of a key, float32 [B, h_kv, d], or None.
        mean: the mean that is subtracted [B, h_kv, d] in k_pre's dtype, or None.
        spread: the devices that have the other tokens, or None if all tokens are here. Then `lengths` counts the
            tokens that are here.
    """

    k_pre: Array
    lengths: Array
    block: int
    weights: Array | None = None
    mean: Array | None = None
    spread: Spread | None = None

    @property
    def tokens(self) -> Array:
        """Number of tokens of each row, on all devices, int32 [B]."""
        return self.lengths if self.spread is None else self.spread.lengths

    def summed(self, x: Array) -> Array:
        """Add up an array over the devices that have the tokens."""
        return x if self.spread is None else lax.psum(x, self.spread.axis)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.k_pre.shape[1] // self.block)

    @property
    def narrow(self) -> bool:
        """Whether the keys are multiplied in bfloat16."""
        return self.k_pre.dtype == jnp.bfloat16

    def rows(self, index: Array) -> tuple[Array, Array]:
        """Return one block as `token_block` does, float32 minus the mean and times weights, but as stored if narrow."""
        rows, start = token_block(self.k_pre, self.lengths, index, self.block)
        if self.narrow:
            return rows, start
        rows = rows.astype(jnp.float32)
        if self.mean is not None:
            rows -= side_by_side(self.mean)[:, None]
        if self.weights is not None:
            rows *= side_by_side(self.weights)[:, None]
        return jnp.where(self.new(index, start), rows, 0.0), start

    def new(self, index: Array, start: Array) -> Array:
        """Return which tokens of a block count, bool [B, block, 1]; see `new_tokens`."""
        return new_tokens(self.lengths, index, start, self.block)[..., None]

    def gram(self) -> Float[Array, "B m m"]:
        """Return the products of all pairs of columns, summed over the tokens, float32 [B, m, m]."""
        precision = lax.Precision.DEFAULT if self.narrow else EXACT

        def add(index: Array, gram: Array) -> Array:
            rows, _ = self.rows(index)
            return gram + jnp.einsum(
                "bsm,bsn->bmn", rows, rows, precision=precision, preferred_element_type=jnp.float32
            )

        batch, _, heads, dim = self.k_pre.shape
        gram = lax.fori_loop(0, self.blocks, add, jnp.zeros((batch, heads * dim, heads * dim), jnp.float32))
        if self.narrow and self.mean is not None:
            mean, total = side_by_side(self.mean), self.total()
            cross = total[:, :, None] * mean[:, None, :]
            square = self.lengths[:, None, None] * (mean[:, :, None] * mean[:, None, :])
            gram = gram - (cross + cross.swapaxes(1, 2)) + square
        if self.narrow and self.weights is not None:
            weights = side_by_side(self.weights)
            gram = gram * weights[:, :, None] * weights[:, None, :]
        return self.summed(gram)

    def total(self) -> Float[Array, "B m"]:
        """Return the sum of each row's keys that are here, without weights and with the mean, float32 [B, m]."""

        def add(index: Array, total: Array) -> Array:
            rows, _ = token_block(self.k_pre, self.lengths, index, self.block)
            return total + rows.sum(axis=1, dtype=jnp.float32)

        batch, _, heads, dim = self.k_pre.shape
        return lax.fori_loop(0, self.blocks, add, jnp.zeros((batch, heads * dim), jnp.float32))

    def mean_key(self) -> Float[Array, "B h_kv d"]:
        """Return the mean of each row's keys, rounded to their dtype, in which it is stored."""
        batch, _, heads, dim = self.k_pre.shape
        mean = self.summed(self.total()) / jnp.maximum(self.tokens, 1)[:, None]
        return rounded(mean.reshape(batch, heads, dim), self.k_pre.dtype).astype(self.k_pre.dtype)

    def variance(self, mean: Float[Array, "B h_kv d"]) -> Float[Array, "B h_kv d"]:
        """Return the mean squared distance of each number of a key from a mean key, float32 [B, h_kv, d]."""

        def add(index: Array, total: Array) -> Array:
            rows, start = token_block(self.k_pre, self.lengths, index, self.block)
            off = rows.astype(jnp.float32) - side_by_side(mean)[:, None]
            return total + jnp.where(self.new(index, start), off**2, 0).sum(axis=1)

        batch, _, heads, dim = self.k_pre.shape
        total = lax.fori_loop(0, self.blocks, add, jnp.zeros((batch, heads * dim), jnp.float32))
        return (self.summed(total) / jnp.maximum(self.tokens, 1)[:, None]).reshape(batch, heads, dim)

    def coefficients(self, basis: Float[Array, "B m r"]) -> Callable[[Array], tuple[Array, Array]]:
        """Return a function of a block's number: the block times the basis, float32 [B, block, r], and its first token.

        Tokens that do not count have zeros.
        """
        if not self.narrow:

            def wide(index: Array) -> tuple[Array, Array]:
                rows, start = self.rows(index)
                return jnp.einsum("bsm,bmr->bsr", rows, basis, precision=EXACT), start

            return wide
        if self.weights is not None:
            basis = basis * side_by_side(self.weights)[:, :, None]
        high, low = two_parts(basis)
        both, rank = jnp.concatenate([high, low], axis=2), basis.shape[2]

        def narrow(index: Array) -> tuple[Array, Array]:
            rows, start = self.rows(index)
            products = jnp.einsum("bsm,bmr->bsr", rows, both, preferred_element_type=jnp.float32)
            products = products[..., :rank] + products[..., rank:]
            if self.mean is None:
                return products, start
            return jnp.where(self.new(index, start), products - shift[:, None], 0.0), start

        if self.mean is not None:
            columns = high.astype(jnp.float32) + low.astype(jnp.float32)
            shift = jnp.einsum("bm,bmr->br", side_by_side(self.mean), columns, precision=EXACT)
        return narrow


def two_parts(x: Float[Array, "*n"]) -> tuple[Array, Array]:
    """Return two bfloat16 arrays, of which the sum is x to 16 significant bits."""
    high = rounded(x, jnp.dtype(jnp.bfloat16))
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def rounded(x: Array, dtype: jnp.dtype) -> Array:
    """Round to the numbers of a dtype. XLA may leave out a conversion to a dtype and back, but not this."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def side_by_side(x: Array) -> Array:
    """Return numbers of all heads [B, h_kv, d] as float32 [B, h_kv * d]."""
    return x.reshape(x.shape[0], -1).astype(jnp.float32)
