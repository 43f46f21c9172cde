"""Low-rank keys (ShadowKV, section 4.1 and algorithm 1): the keys' coefficients in their leading directions.

The paper computes a thin SVD of K [S, h_kv * d]. Here the right singular vectors V_r are computed as the eigenvectors
of K^T K, at a fraction of the cost. The factors are left = K V_r and right = V_r^T. Their product is the truncated SVD,
and no number is divided by a singular value. The left row of a new key k is k V_r.

The eigenvectors are computed by `eigh` on a CPU, and by subspace iteration on an NVIDIA GPU (Halko, Martinsson & Tropp
2011, arXiv 0909.4061, algorithm 4.4). There, the eigenvectors of a matrix of width 1,024 take longer than all other
work of the compression, and the iteration needs only products and the Cholesky factors of small matrices. Its columns
are no exact eigenvectors if variances are close to each other. This costs little: a code needs the subspace, and
columns that share close variances need the same number of bits.

Sizes: B rows of the batch, S tokens, h_kv KV heads of width d, m = h_kv * d columns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jshadow.ops.attention import group_queries
from jshadow.ops.layout import fit_tokens
from jshadow.policies.shadowkv.key_codecs.base import (
    BLOCK,
    EXACT,
    KeyCode,
    KeyCodec,
    Sizes,
    Spread,
    new_tokens,
    pass_launches,
    put_block,
    token_block,
)

TAIL = 64  # number of the prompt's last queries from which the weights are computed
_LEAST = 0.01  # added to each relative mean square, because later queries may be larger in numbers that are small here


def query_weights(
    q_tail: Float[Array, "B w h_q d"], lengths: Int[Array, " B"], kv_heads: int, rotated: int, axis: str | None = None
) -> Float[Array, "B {kv_heads} d"]:
    """Return the factors by which a code multiplies the numbers of a key before it quantizes or truncates them,
    float32.

    A key code has an error in each number of a key, and attention is affected by the product of this error and a query.
    RoPE rotates pairs of numbers by an angle that depends on the distance. Averaged over many distances, the squared
    error of a product is the squared error of a pair times the mean square of the queries in that pair, summed over
    pairs. So a code minimizes the error of the products if it codes keys times the root of that mean square. KQ-SVD
    (Lesens et al. 2025, arXiv 2512.05916) does the same for models without RoPE, with full matrices as weights.

    Args:
        q_tail: queries after RoPE of each row's last w tokens. Rows shorter than w are padded in front.
        lengths: number of tokens in each row.
        rotated: how many of the d numbers RoPE rotates. Number i is paired with number i + rotated / 2.
        axis: the axis of a mesh that splits the heads, inside shard_map, or None.

    Returns:
        Numbers that are equal within a pair. The mean square over all heads of a row is near 1.
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
    return jnp.sqrt(energy / jnp.where(mean > 0, mean, 1) + _LEAST)


@dataclasses.dataclass(frozen=True)
class PromptKeys:
    """A prompt's keys minus their mean, times weights. They are read block by block.

    Products of bfloat16 numbers are exact in float32. So keys in bfloat16 are multiplied as they are, on the tensor
    cores of a GPU, with float32 sums. The mean and the weights change the small matrices instead: weights W and a mean
    m make of the products G of n keys with the sum s the matrix W (G - s m^T - m s^T + n m m^T) W. A basis is split
    into two matrices of bfloat16 numbers. Together they have 16 significant bits. Keys of other dtypes are centered
    and weighted in float32, and their products are float32 products.

    Attributes:
        k_pre: keys before RoPE, padded on the right [B, S, h_kv, d].
        lengths: tokens of each row, int32 [B].
        block: number of tokens in a block, at most S.
        weights: weights on the numbers of a key, float32 [B, h_kv, d], or None.
        mean: the mean that is subtracted [B, h_kv, d] in k_pre's dtype, or None.
        spread: the devices that have the other tokens, or None. Then `lengths` counts the tokens that are here.
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
        high, low = _two_parts(basis)
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


def _two_parts(x: Float[Array, "*n"]) -> tuple[Array, Array]:
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


_NARROWEST = 256  # narrower matrices have their eigenvectors computed by cuSOLVER, which is fast for them
_SHARE = 0.75  # largest share of the columns for which subspace iteration is used
_SHIFT = 5e-5  # added to the diagonal of correlations, so that rounding leaves them positive definite
_MORE = 4.0  # where it does not, the iteration is repeated with so many times the shift, which costs a little accuracy
# The time on a GPU is that of library calls and launches, not that of operations. With 8 iterations, the lost variance
# is within 1 % of the least possible for all spectra of the tests. With 16 it is within 0.3 %. With one polish, more is
# lost if one variance is a million times the others, as that of a large mean.
ITERATIONS = 8  # products with the Gram matrix
_POLISHES = 2  # how often the columns are polished after each Cholesky-QR
LEAF = 128  # most columns of a Cholesky factor that a library computes
# The number of columns is raised to a multiple of MULTIPLE. More columns change none of the others. Without them, XLA
# copies most operands of the products into larger arrays first.
MULTIPLE = 64
# On an H200, the Cholesky factor and the triangular solve of a library take about 1 us a column, for 64 to 448 columns.
# So many columns take as long as one small kernel.
COLUMNS_A_LAUNCH = 2
# Each float32 number is the sum of three bfloat16 numbers. Six products of these sum up to a product in float32, to 22
# bits, and run on tensor cores. A CPU multiplies in float32 instead.
_SIX_PRODUCTS = lax.DotAlgorithmPreset.BF16_BF16_F32_X6


def leading_columns(
    gram: Float[Array, "B m m"], count: int, spread: Spread | None = None
) -> Float[Array, "B m {count}"]:
    """Return an orthonormal basis of the directions with the most variance, by falling variance, float32.

    `gram` are symmetric positive semidefinite matrices. On a GPU, the basis of a matrix of zeros is zero. If `spread`
    tells that several devices have the same matrices, all get the columns of the first device, because two devices may
    round them differently.
    """
    if spread is not None:
        # One matrix after the other: a batch of eigenvectors needs more of a CPU's threads than several devices leave.
        columns = lax.platform_dependent(
            gram,
            cuda=lambda gram: leading_columns(gram, count),
            default=lambda gram: lax.map(lambda one: eigenvectors(one[None], count)[0], gram),
        )
        return lax.psum(jnp.where(lax.axis_index(spread.axis) == 0, columns, 0), spread.axis)
    if not _by_products(gram.shape[-1], count):
        return eigenvectors(gram, count)
    return lax.platform_dependent(
        gram, cuda=lambda gram: iterated(gram, count), default=lambda gram: eigenvectors(gram, count)
    )


def _by_products(width: int, count: int) -> bool:
    """Return whether a GPU computes `count` of `width` columns by subspace iteration."""
    return width >= _NARROWEST and count <= _SHARE * width


def eigenvectors(gram: Float[Array, "B m m"], count: int) -> Float[Array, "B m {count}"]:
    """Return the `count` eigenvectors with the largest eigenvalues."""
    return jnp.linalg.eigh(gram)[1][:, :, ::-1][:, :, :count]


def iterated(gram: Float[Array, "B m m"], count: int) -> Float[Array, "B m {count}"]:
    """Compute `leading_columns` by subspace iteration. The start is fixed, so equal matrices give equal results.

    If variances fall steeply, rounding can leave a matrix of correlations without a Cholesky factor. Then the basis of
    this matrix of the batch is computed anew with a larger shift.
    """
    width = gram.shape[-1]
    most = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    gram = gram / jnp.where(most > 0, most, 1)
    start = jnp.asarray(np.random.default_rng(0).standard_normal((width, columns_of(width, count))), jnp.float32)

    def times(columns: Array) -> Array:
        return product("bmn,bnr->bmr", gram, columns)

    def lacking(columns: Array) -> Array:
        return ~jnp.isfinite(columns).all(axis=(1, 2))

    def attempt(state: tuple[Array, Array]) -> tuple[Array, Array]:
        shift, before = state
        columns = jnp.broadcast_to(start, before.shape)
        columns = lax.fori_loop(0, ITERATIONS, lambda _, columns: orthogonal(times(columns), shift), columns)
        columns = lax.fori_loop(0, 2, lambda _, columns: orthogonal(columns, shift), columns)
        return shift * _MORE, jnp.where(lacking(before)[:, None, None], columns, before)

    none = jnp.full((gram.shape[0], *start.shape), jnp.nan, jnp.float32)
    _, columns = lax.while_loop(
        lambda state: lacking(state[1]).any() & (state[0] < 1), attempt, (jnp.float32(_SHIFT), none)
    )
    columns = columns[..., :count]
    variance = (columns * times(columns)).sum(axis=1)
    return jnp.take_along_axis(columns, jnp.argsort(-variance, axis=1, stable=True)[:, None], axis=2)


def columns_of(width: int, count: int) -> int:
    """Return the number of columns that the iteration has."""
    return min(width, -(-count // MULTIPLE) * MULTIPLE)


def orthogonal(columns: Float[Array, "B m r"], shift: Float[Array, ""] | float = _SHIFT) -> Float[Array, "B m r"]:
    """Return nearly orthonormal columns, of which the first k span the same space as the first k arguments.

    The factor is that of shifted Cholesky-QR (Fukaya et al. 2020, SIAM J. Sci. Comput. 42(1)) of columns of length 1. A
    column that depends on earlier ones becomes short, and a zero column stays zero. The columns are scaled before their
    products are taken, because the square of a short column would be too small for float32.
    """
    columns = _scaled(columns)
    inverse = inverse_cholesky(_products_of(columns) + shift * jnp.eye(columns.shape[-1]))
    columns = product("bmr,bsr->bms", columns, inverse)
    for _ in range(_POLISHES):
        columns = _polished(columns)
    return columns


def _scaled(columns: Float[Array, "B m r"]) -> Float[Array, "B m r"]:
    """Scale columns to length 1, except zero columns."""
    length = jnp.sqrt((columns**2).sum(axis=1, keepdims=True))
    return columns / jnp.where(length > 0, length, 1)


def inverse_cholesky(matrix: Float[Array, "B r r"]) -> Float[Array, "B r r"]:
    """Return the inverse of the lower Cholesky factor of positive definite matrices, mostly by matrix products.

    The factor is computed in blocks (Golub & Van Loan, Matrix Computations, section 4.2.9). Only blocks of at most
    `LEAF` columns are left to a library, which takes longer for each operation than matrix products do.
    """
    size = matrix.shape[-1]
    if size <= LEAF:
        lower, identity = jnp.linalg.cholesky(matrix, symmetrize_input=False), jnp.eye(size)
        return lax.linalg.triangular_solve(lower, jnp.broadcast_to(identity, matrix.shape), left_side=True, lower=True)

    half = _half_of(size)
    first = inverse_cholesky(matrix[:, :half, :half])
    below = product("bik,bjk->bij", matrix[:, half:, :half], first)
    second = inverse_cholesky(matrix[:, half:, half:] - product("bik,bjk->bij", below, below))
    corner = -product("bij,bjk->bik", second, product("bij,bjk->bik", below, first))
    above = jnp.zeros((matrix.shape[0], half, size - half), matrix.dtype)
    return jnp.concatenate([jnp.concatenate([first, above], axis=2), jnp.concatenate([corner, second], axis=2)], axis=1)


def _half_of(size: int) -> int:
    """Return the number of columns of the first half of a matrix: a multiple of `MULTIPLE` if it has so many."""
    return max(1, -(-(size // 2) // MULTIPLE)) * MULTIPLE if size > MULTIPLE else size // 2


def _polished(columns: Float[Array, "B m r"]) -> Float[Array, "B m r"]:
    """Apply Cholesky-QR to nearly orthonormal columns, with the Cholesky factor of I + E to first order in E."""
    error = _products_of(columns) - jnp.eye(columns.shape[-1])
    factor = jnp.triu(error, 1) + error * jnp.eye(columns.shape[-1]) / 2
    return columns - product("bmr,brs->bms", columns, factor)


def _products_of(columns: Float[Array, "B m r"]) -> Float[Array, "B r r"]:
    """Return the products of all pairs of columns."""
    return product("bmr,bms->brs", columns, columns)


def product(equation: str, a: Array, b: Array) -> Array:
    """Multiply float32 matrices by an `einsum` equation, with float32 sums."""
    return jnp.einsum(equation, a, b, precision=_SIX_PRODUCTS)


def basis_operations(width: int, count: int) -> int:
    """Return the operations of `leading_columns` on a GPU for one matrix. A product is six products in bfloat16.

    Eigenvectors take 9 * width^3 operations (Golub & Van Loan, section 8.3.3).
    """
    if not _by_products(width, count):
        return 9 * width**3
    most, each = columns_of(width, count), 2 * width
    # `orthogonal` has one product of all pairs of columns, one with the factor, and two in each `_polished`.
    steps = (ITERATIONS + 2) * (2 + 2 * _POLISHES)
    square = each * width * (most * ITERATIONS + count)
    inner, library = inverse_operations(most)
    total: int = 6 * (square + each * most**2 * steps) + (6 * inner + library) * (ITERATIONS + 2)
    return total


def inverse_operations(size: int) -> tuple[int, int]:
    """Return the operations of one `inverse_cholesky`: those of matrix products, and those of library calls."""
    if size <= LEAF:
        return 0, size**3 + size**3 // 3  # the triangular solve and the factor
    half = _half_of(size)
    parts = [inverse_operations(half), inverse_operations(size - half)]
    # In half columns: half * rest * half, rest * half * rest, rest * half * half and rest * rest * half.
    return 4 * half * (size - half) * size + sum(part[0] for part in parts), sum(part[1] for part in parts)


def basis_launches(width: int, count: int) -> int:
    """Return about how many kernels a GPU launches for `leading_columns` of one matrix.

    A library call counts as the launches that take as long. `make aot` compares the sum with a compiled program. The
    launches of cuSOLVER's eigenvectors are not known. They count as none.
    """
    if not _by_products(width, count):
        return 0
    inverse = _inverse_launches(columns_of(width, count))
    # A product that is cut into parts and their sum are two kernels. A polish has two products.
    return (ITERATIONS + 2) * (8 + 4 * _POLISHES + inverse)


def _inverse_launches(size: int) -> int:
    """Return about how many kernels one `inverse_cholesky` launches, with what its library calls count as."""
    if size <= LEAF:
        return 2 + size // COLUMNS_A_LAUNCH
    half = _half_of(size)
    return 7 + _inverse_launches(half) + _inverse_launches(size - half)


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
        left, right = key_factors(k_pre, lengths, self.rank, weights, spread)
        left = fit_tokens(left, units * chunk).reshape(left.shape[0], units, chunk * self.rank)
        return KeyCode(left, right.astype(k_pre.dtype))

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        return _project_keys(k_pre, right, weights, axis)[:, :, None]

    def expand(self, rows: Array, right: Any) -> Array:
        if rows.shape[1] == 1:
            return jnp.einsum("bsr,bhrd->bhsd", rows[:, 0], right, preferred_element_type=jnp.float32)
        return jnp.einsum("bhtr,bhrd->bhtd", rows, right, precision=EXACT, preferred_element_type=jnp.float32)

    def operands(self, right: Any) -> dict[str, Any]:
        return {"right": right}

    def products(self, sizes: Sizes) -> int:
        return self.rank

    def expand_bytes(self, sizes: Sizes) -> int:
        return self.rank * jnp.dtype(sizes.dtype).itemsize

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        return encode_operations(sizes, tokens, self.rank, passes=1)

    def encode_launches(self, sizes: Sizes, tokens: int) -> int:
        return pass_launches(2, tokens) + basis_launches(sizes.columns, self.rank)

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count two copies of the left rows, the Gram matrix, its eigenvectors, and float32 copies of a block."""
        columns, item = sizes.columns, jnp.dtype(sizes.dtype).itemsize
        return 2 * tokens * self.rank * item + 4 * (6 * columns * columns + 4 * block * columns)


def encode_operations(sizes: Sizes, tokens: int, rank: int, passes: int) -> int:
    """Return the operations of the Gram matrix, its basis, and `passes` products of all keys with the basis."""
    block = min(BLOCK, tokens)
    parts = 2 if jnp.dtype(sizes.dtype) == jnp.bfloat16 else 1  # a basis in two matrices; see `PromptKeys`
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
    """Factor each row's keys before RoPE, with all KV heads side by side: left @ right approximates the keys.

    The arguments are those of `KeyCodec.encode`. At most m columns can be kept. Columns beyond a row's length are zero,
    unless all columns are kept. Then `right` is a complete basis, in which every key is exact. Without weights, the
    columns of `right` are orthonormal. left has k_pre's dtype, and right is float32.
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


def _project_keys(
    k_pre: Float[Array, "B T h_kv d"],
    right: Float[Array, "B h_kv r d"],
    weights: Float[Array, "B h_kv d"] | None = None,
    axis: str | None = None,
) -> Float[Array, "B T r"]:
    """Return the left rows of later keys before RoPE, in the dtype of `right`; see `KeyCodec.project`."""
    if weights is not None:  # squared: once for the weighted keys, and once because right is divided by the weights
        k_pre = k_pre.astype(jnp.float32) * weights[:, None] ** 2
    rows = jnp.einsum("bthd,bhrd->btr", k_pre, right, precision=EXACT, preferred_element_type=jnp.float32)
    return (rows if axis is None else lax.psum(rows, axis)).astype(right.dtype)
