"""Transform-coded keys: coefficients in the prompt's eigenbasis, with more bits for columns of larger variance.

Low rank spends 16 bits on each of a few columns and none on the others. A Gaussian source is coded with the least
squared error if each column of its eigenbasis gets bits in proportion to the logarithm of its variance (Cover & Thomas,
Elements of Information Theory, section 10.3.3). This spreads the same bits over many more columns. Here the bits follow
a fixed profile of 8, 4 and 2 bits, so that shapes are static. The mean of the keys is stored separately. Otherwise it
would dominate the first column and make its steps coarse.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jshadow.ops.layout import fit_tokens
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, EXACT, KeyCode, KeyCodec, Sizes, Spread, pass_launches
from jshadow.policies.shadowkv.key_codecs.basis import basis_launches, leading_columns
from jshadow.policies.shadowkv.key_codecs.blocks import put_block
from jshadow.policies.shadowkv.key_codecs.lowrank import encode_operations, head_columns, usual_rank
from jshadow.policies.shadowkv.key_codecs.midrise import Profile, packed_width, profile_bits, quantize, steps
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of
from jshadow.policies.shadowkv.key_codecs.prompt_keys import PromptKeys
from pallas_kernels import coded_products


class Basis(struct.PyTreeNode):
    """The part of the code that all tokens of a prompt share.

    Attributes:
        columns: eigenvectors of the centered keys by falling variance, each times the step of its quantizer, split into
            the parts of the KV heads [B, h_kv, r, d], in the model's dtype. With weights, they are eigenvectors of the
            weighted keys, divided by the weights, so that a linear combination of them is an unweighted key.
        mean: mean of the prompt's keys [B, h_kv, d], in the model's dtype.
        step: step of each column's quantizer, float32 [B, r].
    """

    columns: Array
    mean: Array
    step: Array


def usual_profile(columns: int) -> Profile:
    """Return the profile with as many bits as the usual low rank: (16, 64, 64) of 192 columns, for example."""
    return profile_of(columns, min(16 * usual_rank(columns), 8 * columns))


@dataclasses.dataclass(frozen=True)
class TransformCodec(KeyCodec):
    """Quantized coefficients in the eigenbasis. right is a `Basis`.

    left is uint8 [B, n, c * w], where w = n8 + n4 / 2 + n2 / 4. The bytes of a token are its 8-bit columns, then its
    4-bit columns, then its 2-bit columns.

    Attributes:
        profile: (n8, n4, n2): the first n8 columns have 8 bits, the next n4 have 4, and the next n2 have 2.
    """

    profile: Profile

    name = "transform"
    compiled = True

    @property
    def rank(self) -> int:
        """Number of columns r that have bits."""
        return sum(self.profile)

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return the shapes of the packed rows and of the Basis."""
        dtype = jnp.dtype(sizes.dtype)
        left: Any = jax.ShapeDtypeStruct((batch, units, chunk * packed_width(self.profile)), jnp.uint8)
        columns: Any = jax.ShapeDtypeStruct((batch, sizes.heads, self.rank, sizes.dim), dtype)
        mean: Any = jax.ShapeDtypeStruct((batch, sizes.heads, sizes.dim), dtype)
        return KeyCode(left, Basis(columns, mean, jax.ShapeDtypeStruct((batch, self.rank), jnp.float32)))  # type: ignore[arg-type]

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        """Code the keys in four passes over the prompt: for the mean, the basis, the steps and the codes."""
        batch, length, heads, _ = k_pre.shape
        keys = PromptKeys(k_pre, lengths, min(BLOCK, length), weights, spread=spread)
        mean = keys.mean_key()
        keys = dataclasses.replace(keys, mean=mean)
        basis = leading_columns(keys.gram(), self.rank, spread)
        coefficients = keys.coefficients(basis)

        def code(index: Array, left: Array) -> Array:
            rows, start = coefficients(index)
            packed = jnp.where(keys.new(index, start), quantize(rows, step[:, None], self.profile), 0)
            return put_block(left, packed, index, start)

        step = steps(*column_sizes(lambda index: coefficients(index)[0], keys, self.rank), self.profile)
        left = jnp.zeros((batch, length, packed_width(self.profile)), jnp.uint8)
        left = fit_tokens(lax.fori_loop(0, keys.blocks, code, left), units * chunk)
        columns = (head_columns(basis, weights, heads) * step[:, None, :, None]).astype(k_pre.dtype)
        return KeyCode(left.reshape(batch, units, chunk * left.shape[2]), Basis(columns, mean, step))

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        """Code keys with the prompt's basis, mean and steps."""
        rows = k_pre.astype(jnp.float32) - right.mean.astype(jnp.float32)[:, None]
        if weights is not None:  # squared: once for the weighted keys, and once because columns are divided by them
            rows *= weights[:, None] ** 2
        columns, step = right.columns.astype(jnp.float32), right.step[:, None]
        products = jnp.einsum("bthd,bhrd->btr", rows, columns, precision=EXACT)
        products = products if axis is None else lax.psum(products, axis)
        return quantize(products / jnp.where(step > 0, step, 1), step, self.profile)[:, :, None]

    def expand(self, rows: Array, right: Any) -> Array:
        """Multiply the codes by the columns, in their dtype, and add the mean."""
        keys = coded_products(rows, right.columns, self.profile)
        return keys + right.mean.astype(jnp.float32)[:, :, None]

    def operands(self, right: Any) -> dict[str, Any]:
        """Return the columns, the mean and the profile."""
        return {"right": right.columns, "mean": right.mean, "profile": self.profile}

    def products(self, sizes: Sizes) -> int:
        """Return the number of columns that have bits."""
        return self.rank

    def expand_bytes(self, sizes: Sizes) -> int:
        """Count the left row, one byte for each code, and coefficients in float32 and in the model's dtype."""
        return packed_width(self.profile) + self.rank * (1 + 4 + jnp.dtype(sizes.dtype).itemsize)

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Count the Gram matrix, its basis, and two passes: for the steps and for the codes."""
        return encode_operations(sizes, tokens, self.rank, passes=2)

    def encode_launches(self, sizes: Sizes, tokens: int) -> int:
        """Count the passes for the mean, for the Gram matrix (two), the steps and the codes, and the basis."""
        return pass_launches(5, tokens) + basis_launches(sizes.columns, self.rank)

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count two copies of the left rows, the Gram matrix, its eigenvectors, and float32 copies of a block."""
        columns, coefficients = sizes.columns, 4 * block * len(profile_bits(self.profile))
        rows = 2 * tokens * packed_width(self.profile)
        return rows + 4 * (6 * columns * columns + 4 * block * columns + coefficients)


def column_sizes(block_of: Callable[[Array], Array], keys: PromptKeys, columns: int) -> tuple[Array, Array]:
    """Return the standard deviation and the largest magnitude of each column, float32 [B, columns] each.

    Args:
        block_of: maps the number of a block to its centered rows [B, tokens, columns], zero where there is no token.
        keys: the keys, for their number of blocks and of tokens.
        columns: number of columns.
    """

    def add(index: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = block_of(index)
        return total[0] + (rows**2).sum(axis=1), jnp.maximum(total[1], jnp.abs(rows).max(axis=1))

    nothing = jnp.zeros((keys.lengths.shape[0], columns), jnp.float32)
    squares, largest = lax.fori_loop(0, keys.blocks, add, (nothing, nothing))
    if keys.spread is not None:
        squares, largest = keys.summed(squares), lax.pmax(largest, keys.spread.axis)
    return jnp.sqrt(squares / jnp.maximum(keys.tokens, 1)[:, None]), largest
