"""The leading eigenvectors of a Gram matrix: by `eigh` on a CPU, by subspace iteration on an NVIDIA GPU.

On a GPU, the eigenvectors of a matrix of width 1,024 take longer than all other work of the compression. Subspace
iteration (Halko, Martinsson & Tropp 2011, arXiv 0909.4061, algorithm 4.4) needs only products and the Cholesky factors
of small matrices. Its columns are no exact eigenvectors if variances are close to each other.
This costs little: a code needs the subspace, and columns that share close variances need the same number of bits.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jshadow.policies.shadowkv.key_codecs.base import Spread

NARROWEST = 256  # narrower matrices have their eigenvectors computed by cuSOLVER, which is fast for them
SHARE = 0.75  # largest share of the columns for which subspace iteration is used
SHIFT = 5e-5  # added to the diagonal of correlations, so that rounding leaves them positive definite
MORE = 4.0  # where it does not, the iteration is repeated with so many times the shift, which costs a little accuracy
# The time on a GPU is that of library calls and launches, not that of operations. With 8 iterations, the lost variance
# is within 1 % of the least possible for all spectra of the tests. With 16 it is within 0.3 %. With one polish, more is
# lost if one variance is a million times the others, as that of a large mean.
ITERATIONS = 8  # products with the Gram matrix
POLISHES = 2  # how often the columns are polished after each Cholesky-QR
LEAF = 128  # most columns of a Cholesky factor that a library computes
# The number of columns is raised to a multiple of MULTIPLE. More columns change none of the others. Without them, XLA
# copies most operands of the products into larger arrays first.
MULTIPLE = 64
# On an H200, the Cholesky factor and the triangular solve of a library take about 1 us a column, for 64 to 448 columns.
# So many columns take as long as one small kernel.
COLUMNS_A_LAUNCH = 2
# Each float32 number is the sum of three bfloat16 numbers. Six products of these sum up to a product in float32, to 22
# bits, and run on tensor cores. A CPU multiplies in float32 instead.
SIX_PRODUCTS = lax.DotAlgorithmPreset.BF16_BF16_F32_X6


def leading_columns(
    gram: Float[Array, "B m m"], count: int, spread: Spread | None = None
) -> Float[Array, "B m {count}"]:
    """Return an orthonormal basis of the directions with the most variance, by falling variance.

    Args:
        gram: symmetric positive semidefinite matrices, float32 [B, m, m].
        count: number of columns r, at most m.
        spread: None, or the devices that have the same matrices. All get the columns of the first device, because two
            devices may round them differently.

    Returns:
        float32 [B, m, r]. On a GPU, the basis of a matrix of zeros is zero.
    """
    if spread is not None:
        # One matrix after the other: a batch of eigenvectors needs more of a CPU's threads than several devices leave.
        columns = lax.platform_dependent(
            gram,
            cuda=lambda gram: leading_columns(gram, count),
            default=lambda gram: lax.map(lambda one: eigenvectors(one[None], count)[0], gram),
        )
        return lax.psum(jnp.where(lax.axis_index(spread.axis) == 0, columns, 0), spread.axis)
    if not by_products(gram.shape[-1], count):
        return eigenvectors(gram, count)
    return lax.platform_dependent(
        gram, cuda=lambda gram: iterated(gram, count), default=lambda gram: eigenvectors(gram, count)
    )


def by_products(width: int, count: int) -> bool:
    """Return whether a GPU computes `count` of `width` columns by subspace iteration."""
    return width >= NARROWEST and count <= SHARE * width


def eigenvectors(gram: Float[Array, "B m m"], count: int) -> Float[Array, "B m {count}"]:
    """Return the `count` eigenvectors with the largest eigenvalues, float32 [B, m, count]."""
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
        return shift * MORE, jnp.where(lacking(before)[:, None, None], columns, before)

    none = jnp.full((gram.shape[0], *start.shape), jnp.nan, jnp.float32)
    _, columns = lax.while_loop(
        lambda state: lacking(state[1]).any() & (state[0] < 1), attempt, (jnp.float32(SHIFT), none)
    )
    columns = columns[..., :count]
    variance = (columns * times(columns)).sum(axis=1)
    return jnp.take_along_axis(columns, jnp.argsort(-variance, axis=1, stable=True)[:, None], axis=2)


def columns_of(width: int, count: int) -> int:
    """Return the number of columns that the iteration has."""
    return min(width, -(-count // MULTIPLE) * MULTIPLE)


def orthogonal(columns: Float[Array, "B m r"], shift: Float[Array, ""] | float = SHIFT) -> Float[Array, "B m r"]:
    """Return nearly orthonormal columns, of which the first k span the same space as the first k arguments.

    The factor is that of shifted Cholesky-QR (Fukaya et al. 2020, SIAM J. Sci. Comput. 42(1)) of columns of length 1. A
    column that depends on earlier ones becomes short, and a zero column stays zero. The columns are scaled before their
    products are taken, because the square of a short column would be too small for float32.
    """
    columns = scaled(columns)
    inverse = inverse_cholesky(products_of(columns) + shift * jnp.eye(columns.shape[-1]))
    columns = product("bmr,bsr->bms", columns, inverse)
    for _ in range(POLISHES):
        columns = polished(columns)
    return columns


def scaled(columns: Float[Array, "B m r"]) -> Float[Array, "B m r"]:
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

    half = half_of(size)
    first = inverse_cholesky(matrix[:, :half, :half])
    below = product("bik,bjk->bij", matrix[:, half:, :half], first)
    second = inverse_cholesky(matrix[:, half:, half:] - product("bik,bjk->bij", below, below))
    corner = -product("bij,bjk->bik", second, product("bij,bjk->bik", below, first))
    above = jnp.zeros((matrix.shape[0], half, size - half), matrix.dtype)
    return jnp.concatenate([jnp.concatenate([first, above], axis=2), jnp.concatenate([corner, second], axis=2)], axis=1)


def half_of(size: int) -> int:
    """Return the number of columns of the first half of a matrix: a multiple of `MULTIPLE` if it has so many."""
    return max(1, -(-(size // 2) // MULTIPLE)) * MULTIPLE if size > MULTIPLE else size // 2


def polished(columns: Float[Array, "B m r"]) -> Float[Array, "B m r"]:
    """Apply Cholesky-QR to nearly orthonormal columns, with the Cholesky factor of I + E to first order in E."""
    error = products_of(columns) - jnp.eye(columns.shape[-1])
    factor = jnp.triu(error, 1) + error * jnp.eye(columns.shape[-1]) / 2
    return columns - product("bmr,brs->bms", columns, factor)


def products_of(columns: Float[Array, "B m r"]) -> Float[Array, "B r r"]:
    """Return the products of all pairs of columns."""
    return product("bmr,bms->brs", columns, columns)


def product(equation: str, a: Array, b: Array) -> Array:
    """Multiply float32 matrices by an `einsum` equation, with float32 sums."""
    return jnp.einsum(equation, a, b, precision=SIX_PRODUCTS)


def basis_operations(width: int, count: int) -> int:
    """Return the operations of `leading_columns` on a GPU for one matrix. A product is six products in bfloat16.

    Eigenvectors take 9 * width^3 operations (Golub & Van Loan, section 8.3.3).
    """
    if not by_products(width, count):
        return 9 * width**3
    most, each = columns_of(width, count), 2 * width
    # `orthogonal` has one product of all pairs of columns, one with the factor, and two in each `polished`.
    steps = (ITERATIONS + 2) * (2 + 2 * POLISHES)
    square = each * width * (most * ITERATIONS + count)
    inner, library = inverse_operations(most)
    total: int = 6 * (square + each * most**2 * steps) + (6 * inner + library) * (ITERATIONS + 2)
    return total


def inverse_operations(size: int) -> tuple[int, int]:
    """Return the operations of one `inverse_cholesky`: those of matrix products, and those of library calls."""
    if size <= LEAF:
        return 0, size**3 + size**3 // 3  # the triangular solve and the factor
    half = half_of(size)
    parts = [inverse_operations(half), inverse_operations(size - half)]
    # In half columns: half * rest * half, rest * half * rest, rest * half * half and rest * rest * half.
    return 4 * half * (size - half) * size + sum(part[0] for part in parts), sum(part[1] for part in parts)


def basis_launches(width: int, count: int) -> int:
    """Return about how many kernels a GPU launches for `leading_columns` of one matrix.

    A library call counts as the launches that take as long. `make aot` compares the sum with a compiled program. The
    launches of cuSOLVER's eigenvectors are not known. They count as none.
    """
    if not by_products(width, count):
        return 0
    inverse = inverse_launches(columns_of(width, count))
    # A product that is cut into parts and their sum are two kernels. A polish has two products.
    return (ITERATIONS + 2) * (8 + 4 * POLISHES + inverse)


def inverse_launches(size: int) -> int:
    """Return about how many kernels one `inverse_cholesky` launches, with what its library calls count as."""
    if size <= LEAF:
        return 2 + size // COLUMNS_A_LAUNCH
    half = half_of(size)
    return 7 + inverse_launches(half) + inverse_launches(size - half)
