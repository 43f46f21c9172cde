"""Transform-coded keys: the prompt's own eigenbasis, with more bits for columns of more variance.

Low rank spends 16 bits on each of a few columns and none on the others. In its eigenbasis, a Gaussian source is coded
with the least squared error where the bits of a column follow the logarithm of its variance (Cover & Thomas, Elements
of Information Theory, section 10.3.3); that spreads the same bits over many more columns. Here the bits follow a fixed
profile of 8, 4 and 2 bits, so that shapes are static. The mean of the keys is kept apart; otherwise it would be the
first column and make every step coarse.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jshadow.ops.layout import fit_tokens
from jshadow.policies.shadowkv.key_codecs.base import (
    BLOCK,
    EXACT,
    KeyCode,
    KeyCodec,
    Sizes,
    new_tokens,
    put_block,
    token_block,
)
from jshadow.policies.shadowkv.key_codecs.lowrank import head_columns, usual_rank
from jshadow.policies.shadowkv.key_codecs.midrise import Profile, packed_width, profile_bits, quantise, steps
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of
from pallas_kernels import coded_products


class Basis(struct.PyTreeNode):
    """What all rows of a prompt share.

    Attributes:
        columns: eigenvectors of the centred keys by falling variance, each KV head its part [B, h_kv, r, d]. With
            weights, eigenvectors of the weighted keys, divided by the weights, so that their sums are keys again.
        mean: of the prompt's keys [B, h_kv, d].
        step: of each column's quantiser, float32 [B, r].
    """

    columns: Array
    mean: Array
    step: Array


def usual_profile(columns: int) -> Profile:
    """The bits of the usual low rank: (16, 64, 64) of 192 columns, (80, 320, 320) of 1,024."""
    return profile_of(columns, min(16 * usual_rank(columns), 8 * columns))


@dataclasses.dataclass(frozen=True)
class TransformCodec(KeyCodec):
    """left uint8 [B, n, c * w], w = n8 + n4 / 2 + n2 / 4: a token's 8-bit columns, then 4-bit, then 2-bit ones.

    Attributes:
        profile: (n8, n4, n2), columns by bits: the first n8 have eight, the next n4 four, the next n2 two.
    """

    profile: Profile

    name = "transform"
    compiled = True

    @property
    def rank(self) -> int:
        """Columns that have any bits."""
        return sum(self.profile)

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """The rows are bytes; `right` is a Basis."""
        dtype = jnp.dtype(sizes.dtype)
        left: Any = jax.ShapeDtypeStruct((batch, units, chunk * packed_width(self.profile)), jnp.uint8)
        columns: Any = jax.ShapeDtypeStruct((batch, sizes.heads, self.rank, sizes.dim), dtype)
        mean: Any = jax.ShapeDtypeStruct((batch, sizes.heads, sizes.dim), dtype)
        return KeyCode(left, Basis(columns, mean, jax.ShapeDtypeStruct((batch, self.rank), jnp.float32)))  # type: ignore[arg-type]

    def encode(self, k_pre: Array, lengths: Array, units: int, chunk: int, weights: Array | None = None) -> KeyCode:
        """Read the prompt four times: twice for the basis, once for the steps, once for the codes."""
        batch, length, heads, _ = k_pre.shape
        block = min(BLOCK, length)
        blocks = -(-length // block)
        mean = mean_key(k_pre, lengths, block)
        basis = eigenbasis(k_pre, lengths, mean, block, weights)[:, :, : self.rank]

        def coefficients(index: Array) -> tuple[Array, Array]:
            rows, start = centred_block(k_pre, lengths, mean, index, block, weights)
            return jnp.einsum("bsm,bmr->bsr", rows, basis, precision=EXACT), start

        def code(index: Array, left: Array) -> Array:
            rows, start = coefficients(index)
            packed = quantise(rows, step[:, None], self.profile)
            packed = jnp.where(new_tokens(lengths, index, start, block)[..., None], packed, 0)
            return put_block(left, packed, index, start)

        step = steps(*column_sizes(lambda index: coefficients(index)[0], lengths, blocks, self.rank), self.profile)
        left = jnp.zeros((batch, length, packed_width(self.profile)), jnp.uint8)
        left = fit_tokens(lax.fori_loop(0, blocks, code, left), units * chunk)
        columns = head_columns(basis, weights, heads).astype(k_pre.dtype)
        return KeyCode(left.reshape(batch, units, chunk * left.shape[2]), Basis(columns, mean, step))

    def project(self, k_pre: Array, right: Any, weights: Array | None = None) -> Array:
        """Code keys by the prompt's basis, mean and steps."""
        rows = k_pre.astype(jnp.float32) - right.mean.astype(jnp.float32)[:, None]
        if weights is not None:  # once for the keys, and once because the columns are divided by them
            rows *= weights[:, None] ** 2
        columns = right.columns.astype(jnp.float32)
        coefficients = jnp.einsum("bthd,bhrd->btr", rows, columns, precision=EXACT)
        return quantise(coefficients, right.step[:, None], self.profile)[:, :, None]

    def expand(self, rows: Array, right: Any) -> Array:
        """Multiply the codes with the basis times the steps, in the basis' dtype, and add the mean."""
        keys = coded_products(rows, right.columns, right.step, self.profile)
        return keys + right.mean.astype(jnp.float32)[:, :, None]

    def operands(self, right: Any) -> dict[str, Any]:
        """The basis, the mean, the steps and the profile."""
        return {"right": right.columns, "mean": right.mean, "step": right.step, "profile": self.profile}

    def products(self, sizes: Sizes) -> int:
        """One for each column that has bits."""
        return self.rank

    def expand_bytes(self, sizes: Sizes) -> int:
        """The row, codes of a byte each, and coefficients in float32 and in the model's dtype."""
        return packed_width(self.profile) + self.rank * (1 + 4 + jnp.dtype(sizes.dtype).itemsize)

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Rows in the order of the prompt, the Gram matrix and its eigenvectors, float32 copies of a block."""
        columns, coefficients = sizes.columns, 4 * block * len(profile_bits(self.profile))
        rows = 2 * tokens * packed_width(self.profile)
        return rows + 4 * (6 * columns * columns + 4 * block * columns + coefficients)


def mean_key(k_pre: Array, lengths: Array, block: int) -> Array:
    """Mean of each row's keys [B, h_kv, d], rounded to k_pre's dtype as it is stored."""
    batch, length, heads, dim = k_pre.shape

    def add(index: Array, total: Array) -> Array:
        return total + token_block(k_pre, lengths, index, block)[0].sum(axis=1)

    total = lax.fori_loop(0, -(-length // block), add, jnp.zeros((batch, heads * dim), jnp.float32))
    return (total / jnp.maximum(lengths, 1)[:, None]).reshape(batch, heads, dim).astype(k_pre.dtype)


def centred_block(
    k_pre: Array, lengths: Array, mean: Array, index: Array, block: int, weights: Array | None = None
) -> tuple[Array, Array]:
    """`token_block` of the keys minus their mean."""
    rows, start = token_block(k_pre, lengths, index, block)
    new = new_tokens(lengths, index, start, block)
    rows -= mean.reshape(rows.shape[0], 1, -1).astype(jnp.float32)
    if weights is not None:
        rows *= weights.reshape(rows.shape[0], 1, -1)
    return jnp.where(new[..., None], rows, 0.0), start


def column_sizes(block_of: Callable[[Array], Array], lengths: Array, blocks: int, columns: int) -> tuple[Array, Array]:
    """Standard deviation and largest magnitude of each column, float32 [B, columns].

    Args:
        block_of: centred rows [B, tokens, columns] of a block, zero where there is no token.
        lengths: tokens of each row, int32 [B].
        blocks: how many there are.
        columns: of a row.
    """

    def add(index: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = block_of(index)
        return total[0] + (rows**2).sum(axis=1), jnp.maximum(total[1], jnp.abs(rows).max(axis=1))

    nothing = jnp.zeros((lengths.shape[0], columns), jnp.float32)
    squares, largest = lax.fori_loop(0, blocks, add, (nothing, nothing))
    return jnp.sqrt(squares / jnp.maximum(lengths, 1)[:, None]), largest


def eigenbasis(k_pre: Array, lengths: Array, mean: Array, block: int, weights: Array | None = None) -> Array:
    """Eigenvectors of the centred keys, all heads side by side, falling variance: float32 [B, h_kv * d, h_kv * d]."""
    batch, length, heads, dim = k_pre.shape
    width = heads * dim

    def add(index: Array, gram: Array) -> Array:
        rows, _ = centred_block(k_pre, lengths, mean, index, block, weights)
        return gram + jnp.einsum("bsm,bsn->bmn", rows, rows, precision=EXACT)

    gram = lax.fori_loop(0, -(-length // block), add, jnp.zeros((batch, width, width), jnp.float32))
    return jnp.linalg.eigh(gram)[1][:, :, ::-1]
