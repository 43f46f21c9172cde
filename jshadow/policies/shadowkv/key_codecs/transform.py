"""Transform-coded keys: coefficients in the prompt's eigenbasis, with more bits for columns of larger variance.

Low rank spends 16 bits on each of a few columns and none on the others. A Gaussian source is coded with the least
squared error if each column of its eigenbasis gets bits in proportion to the logarithm of its variance (Cover & Thomas,
Elements of Information Theory, section 10.3.3). This spreads the same bits over many more columns. Here the bits follow
a fixed profile of 8, 4 and 2 bits, so that shapes are static: all layers and prompts have the same. The mean of the
keys is stored separately. Otherwise it would dominate the first column and make its steps coarse.

The quantizer is uniform and mid-rise (it has no level at zero), and clips large values. The range of a column is a
multiple of its standard deviation, which is best for a Gaussian column. If most tokens are alike, the deviation is
small, and the few different tokens are many deviations away. Then the range is a share of the largest magnitude. As a
consequence, one key that is a hundred times as long as all others makes the others imprecise, even if that key itself
is stored exactly.

A GPU loads 16 bytes at once, if they begin at a multiple of 16. So each part of a code of many columns (those of 8, of
4 and of 2 bits) fills whole pieces of 16 bytes, which `pallas_kernels.reconstruct_keys` then loads without masks while
it multiplies the piece before. A code of few columns has too few pieces to share out, and fills whole bytes.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, UInt8

from jshadow.errors import ConfigError
from jshadow.ops.layout import fit_tokens
from jshadow.policies.shadowkv.key_codecs.base import (
    BLOCK,
    EXACT,
    KeyCode,
    KeyCodec,
    Sizes,
    Spread,
    pass_launches,
    put_block,
)
from jshadow.policies.shadowkv.key_codecs.lowrank import (
    PromptKeys,
    basis_launches,
    encode_operations,
    head_columns,
    leading_columns,
    usual_rank,
)
from pallas_kernels import coded_products
from pallas_kernels.bits import Profile as Profile
from pallas_kernels.bits import dequantize as dequantize
from pallas_kernels.bits import pack_codes
from pallas_kernels.bits import packed_width as packed_width

# The range for each number of bits is the larger of LOAD standard deviations and REACH times the largest magnitude.
# Both were chosen on SmolLM2-135M: LOAD by the error of its keys, and REACH by the divergence from full attention on
# plain text and by needles in repetitive text.
_LOAD = {8: 8.0, 4: 3.2, 2: 1.9}
_REACH = {8: 1.0, 4: 0.7, 2: 0.5}
# A column whose deviation is below this share of the largest one contains only float32 rounding error.
_NOTHING = 1e-5


def _profile_bits(profile: Profile) -> np.ndarray:
    """Return the number of bits of each coded column, int [n8 + n4 + n2]: first 8, then 4, then 2."""
    return np.repeat((8, 4, 2), profile)


def steps(sigma: Float[Array, "*n r"], largest: Float[Array, "*n r"], profile: Profile) -> Float[Array, "*n r"]:
    """Return the quantizer's step for columns with these standard deviations and largest magnitudes.

    A constant column has the step 0, and its codes stand for 0.
    """
    bits = _profile_bits(profile)
    load, reach = (np.array([of[bit] for bit in bits], np.float32) for of in (_LOAD, _REACH))
    half = np.float32(2.0) ** (bits - 1)
    floor = _NOTHING * sigma.max(axis=-1, keepdims=True, initial=0.0)
    return jnp.where(sigma > floor, jnp.maximum(sigma * load, largest * reach) / half, 0.0)


def quantize(x: Float[Array, "*n r"], step: Float[Array, "*n r"], profile: Profile) -> UInt8[Array, "*n w"]:
    """Quantize columns and pack their codes. The code q stands for (q + 1 / 2 - 2**(bits - 1)) * step."""
    half = jnp.asarray(2.0 ** (_profile_bits(profile) - 1), jnp.float32)
    codes = jnp.clip(jnp.floor(x / jnp.where(step > 0, step, 1)) + half, 0, 2 * half - 1)
    codes = jnp.where(step > 0, codes, 0).astype(jnp.uint8)
    first, second = profile[0], profile[0] + profile[1]
    parts = (codes[..., :first], 8), (codes[..., first:second], 4), (codes[..., second:], 2)
    return jnp.concatenate([pack_codes(part, bits) for part, bits in parts], axis=-1)


# Points (mean bits of a key column, shares of all columns that have 8, 4 and 2 bits). Between two points, shares are
# interpolated linearly. The points were measured on SmolLM2-135M, which has 192 key columns. Those at 4/3, 2 and 8/3
# bits have the least divergence from full attention, and those with more bits lose the least variance. 5/2 bits are
# those of the usual rank of wide keys; its shares, (80, 320, 320) of 1,024 columns, are in proportion to those of 8/3.
_POINTS = (
    (0, (0, 0, 0)),
    (4 / 3, (4 / 192, 40 / 192, 32 / 192)),
    (2, (28 / 192, 40 / 192, 0)),
    (5 / 2, (80 / 1024, 320 / 1024, 320 / 1024)),
    (8 / 3, (16 / 192, 64 / 192, 64 / 192)),
    (4, (33 / 192, 102 / 192, 48 / 192)),
    (16 / 3, (75 / 192, 96 / 192, 20 / 192)),
    (20 / 3, (130 / 192, 58 / 192, 4 / 192)),
    (8, (1, 0, 0)),
)
_PIECE = 16  # bytes that a GPU loads at once
_MANY = 512  # key columns from which on the parts of a code fill whole pieces


def profile_of(columns: int, bits: float) -> Profile:
    """Return the default profile (n8, n4, n2) for a number of key columns, all KV heads together, and bits of a token.

    Bits are rounded to whole bytes, which the profile fills completely; with MANY columns or more, to whole pieces of
    16
    bytes, at least one.

    Raises:
        ConfigError: bits are less than a byte, or more than 8 for each column.
    """
    size, unit = round(bits / 8), unit_of(columns)
    if not 1 <= size <= columns:
        raise ConfigError(f"bits of a token's key code must be in [8, {8 * columns}], got {bits!r}")
    mean = 8 * size / columns  # the shares are those of the bits that were asked for
    size = unit * min(max(1, round(size / unit)), columns // unit)
    for (low, first), (high, last) in itertools.pairwise(_POINTS):
        if mean <= high:
            along = (mean - low) / (high - low)
            _, fours, twos = (columns * (a + along * (b - a)) for a, b in zip(first, last, strict=True))
            break
    four, two = (step * round(count / step) for count, step in ((fours, 2 * unit), (twos, 4 * unit)))
    # Rounding may have made more columns than the bytes or the keys have room for.
    while size < four // 2 + two // 4 or columns < size + four // 2 + two * 3 // 4:
        four, two = (four, two - 4 * unit) if two else (four - 2 * unit, two)
    return size - four // 2 - two // 4, four, two


def unit_of(columns: int) -> int:
    """Return the number of bytes of which each part of a default profile is a multiple."""
    return _PIECE if columns >= _MANY else 1


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
        return sum(self.profile)

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
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

        step = steps(*_column_sizes(lambda index: coefficients(index)[0], keys, self.rank), self.profile)
        left = jnp.zeros((batch, length, packed_width(self.profile)), jnp.uint8)
        left = fit_tokens(lax.fori_loop(0, keys.blocks, code, left), units * chunk)
        columns = (head_columns(basis, weights, heads) * step[:, None, :, None]).astype(k_pre.dtype)
        return KeyCode(left.reshape(batch, units, chunk * left.shape[2]), Basis(columns, mean, step))

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        rows = k_pre.astype(jnp.float32) - right.mean.astype(jnp.float32)[:, None]
        if weights is not None:  # squared: once for the weighted keys, and once because columns are divided by them
            rows *= weights[:, None] ** 2
        columns, step = right.columns.astype(jnp.float32), right.step[:, None]
        products = jnp.einsum("bthd,bhrd->btr", rows, columns, precision=EXACT)
        products = products if axis is None else lax.psum(products, axis)
        return quantize(products / jnp.where(step > 0, step, 1), step, self.profile)[:, :, None]

    def expand(self, rows: Array, right: Any) -> Array:
        keys = coded_products(rows, right.columns, self.profile)
        return keys + right.mean.astype(jnp.float32)[:, :, None]

    def operands(self, right: Any) -> dict[str, Any]:
        return {"right": right.columns, "mean": right.mean, "profile": self.profile}

    def products(self, sizes: Sizes) -> int:
        return self.rank

    def expand_bytes(self, sizes: Sizes) -> int:
        return packed_width(self.profile) + self.rank * (1 + 4 + jnp.dtype(sizes.dtype).itemsize)

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        return encode_operations(sizes, tokens, self.rank, passes=2)

    def encode_launches(self, sizes: Sizes, tokens: int) -> int:
        return pass_launches(5, tokens) + basis_launches(sizes.columns, self.rank)

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count two copies of the left rows, the Gram matrix, its eigenvectors, and float32 copies of a block."""
        columns, coefficients = sizes.columns, 4 * block * len(_profile_bits(self.profile))
        rows = 2 * tokens * packed_width(self.profile)
        return rows + 4 * (6 * columns * columns + 4 * block * columns + coefficients)


def _column_sizes(block_of: Callable[[Array], Array], keys: PromptKeys, columns: int) -> tuple[Array, Array]:
    """Return the standard deviation and the largest magnitude of each column, float32 [B, columns] each.

    `block_of` maps the number of a block of `keys` to its centered rows [B, tokens, columns], zero where no token is.
    """

    def add(index: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = block_of(index)
        return total[0] + (rows**2).sum(axis=1), jnp.maximum(total[1], jnp.abs(rows).max(axis=1))

    nothing = jnp.zeros((keys.lengths.shape[0], columns), jnp.float32)
    squares, largest = lax.fori_loop(0, keys.blocks, add, (nothing, nothing))
    if keys.spread is not None:
        squares, largest = keys.summed(squares), lax.pmax(largest, keys.spread.axis)
    return jnp.sqrt(squares / jnp.maximum(keys.tokens, 1)[:, None]), largest
