"""The leading eigenvectors of a Gram matrix: by `eigh` on a CPU, by subspace iteration on an NVIDIA GPU.

On a GPU, the eigenvectors of a matrix of width 1,024 take longer than all other work of the compression. Subspace
iteration (Halko, Martinsson & Tropp 2011, arXiv 0909.4061, algorithm 4.4) needs only products and the Cholesky factors
of matrices that are as wide as the result. Its columns are no exact eigenvectors if variances are close to each other.
This costs little: a code needs the subspace, and columns that share close variances need the same number of bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jshadow.policies.shadowkv.key_codecs.base import EXACT

ITERATIONS = 12  # the lost variance is then within 1 % of the least possible, whatever the spectrum
NARROWEST = 256  # for narrower matrices, and for nearly all columns, the eigenvectors of LAPACK or cuSOLVER are fast
SHARE = 0.75  # largest share of the columns for which subspace iteration is used
SHIFT = 3e-5  # added to the diagonal of correlations, so that rounding leaves them positive definite


def leading_columns(gram: Float[Array, "B m m"], count: int) -> Float[Array, "B m {count}"]:
    """Return an orthonormal basis of the directions with the most variance, by falling variance.

    Args:
        gram: symmetric positive semidefinite matrices, float32 [B, m, m].
        count: number of columns r, at most m.

    Returns:
        float32 [B, m, r]. On a GPU, a column without any variance may be zero if r < m.
    """
    width = gram.shape[-1]
    if width < NARROWEST or count > SHARE * width:
        return eigenvectors(gram, count)
    return lax.platform_dependent(
        gram, cuda=lambda gram: iterated(gram, count), default=lambda gram: eigenvectors(gram, count)
    )


def eigenvectors(gram: Float[Array, "B m m"], count: int) -> Float[Array, "B m {count}"]:
    """Return the `count` eigenvectors with the largest eigenvalues, float32 [B, m, count]."""
    return jnp.linalg.eigh(gram)[1][:, :, ::-1][:, :, :count]


def iterated(gram: Float[Array, "B m m"], count: int) -> Float[Array, "B m {count}"]:
    """Compute `leading_columns` by subspace iteration. The start is fixed, so equal matrices give equal results."""
    width = gram.shape[-1]
    most = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
    gram = gram / jnp.where(most > 0, most, 1)
    start = jnp.asarray(np.random.default_rng(0).standard_normal((width, count)), jnp.float32)

    def times(columns: Array) -> Array:
        return jnp.einsum("bmn,bnr->bmr", gram, columns, precision=EXACT)

    def iterate(_: Array, columns: Array) -> Array:
        return orthogonal(times(columns))

    columns = jnp.broadcast_to(start, (gram.shape[0], width, count))
    columns = orthogonal(orthogonal(lax.fori_loop(0, ITERATIONS, iterate, columns)))
    variance = (columns * times(columns)).sum(axis=1)
    return jnp.take_along_axis(columns, jnp.argsort(-variance, axis=1, stable=True)[:, None], axis=2)


def orthogonal(columns: Float[Array, "B m r"]) -> Float[Array, "B m r"]:
    """Return orthonormal columns with the same span, by Cholesky-QR of the columns scaled to length 1.

    The columns are orthonormal up to rounding only if they nearly were before: columns that depend on others become
    short. Repeating the call makes them orthonormal. Zero columns stay zero. See shifted Cholesky-QR (Fukaya et al.
    2020, SIAM J. Sci. Comput. 42(1)).
    """
    length = jnp.sqrt((columns**2).sum(axis=1, keepdims=True))
    columns = columns / jnp.where(length > 0, length, 1)
    alike = jnp.einsum("bmr,bms->brs", columns, columns, precision=EXACT)
    lower = jnp.linalg.cholesky(alike + SHIFT * jnp.eye(alike.shape[-1]), symmetrize_input=False)
    return jax.lax.linalg.triangular_solve(lower, columns, lower=True, transpose_a=True)
