"""Keys in the basis of `TransformCode`, with bits that the prompt decides; for key_codes_published.py.

Dynamic programming spends the bits of a token on the columns so that the squared error is least, as in KVTC
(arXiv 2511.01815). It knows the real errors of the prompt that it codes. KVTC has those of calibration texts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.policies.shadowkv.key_codecs.lowrank import PromptKeys, leading_columns, side_by_side
from jshadow.policies.shadowkv.key_codecs.transform import steps

LOADS = np.geomspace(1.2, 8, 8)  # ranges to try, in standard deviations


def column_errors(x: Array, real: Array, bits: int) -> tuple[Array, Array]:
    """Round columns x [S, W] to `bits` bits, with the range of least squared error for each column.

    Returns:
        The rounded columns, zero without bits, and their squared errors over the real tokens [W].
    """
    if bits == 0:
        return jnp.zeros_like(x), jnp.where(real, x**2, 0).sum(axis=0)
    half, sigma = 2.0 ** (bits - 1), jnp.sqrt(jnp.where(real, x**2, 0).mean(axis=0))

    def attempt(best: tuple[Array, Array], load: Array) -> tuple[tuple[Array, Array], None]:
        return least(best, rounded(x, sigma * load / half, half), x, real), None

    none = jnp.zeros_like(x), jnp.full(x.shape[1], jnp.inf)
    return lax.scan(attempt, none, jnp.asarray(LOADS, jnp.float32))[0]


def rounded(x: Array, step: Array, half: float) -> Array:
    """Round to a mid-rise quantizer of 2 * half levels."""
    codes = jnp.clip(jnp.floor(x / jnp.where(step > 0, step, 1)), -half, half - 1)
    return (codes + 0.5) * step


def least(best: tuple[Array, Array], tried: Array, x: Array, real: Array) -> tuple[Array, Array]:
    """Return, for each column, the better of the best so far and of new values, with its error."""
    error = jnp.where(real, (tried - x) ** 2, 0).sum(axis=0)
    better = error < best[1]
    return jnp.where(better, tried, best[0]), jnp.where(better, error, best[1])


def usual_errors(x: Array, real: Array, bits: int) -> tuple[Array, Array]:
    """Round as `column_errors`, with the ranges of `TransformCode`, which has 8, 4 and 2 bits."""
    if bits == 0:
        return column_errors(x, real, 0)
    there = jnp.where(real, x, 0)
    sigma, largest = jnp.sqrt((there**2).sum(axis=0) / real.sum()), jnp.abs(there).max(axis=0)
    profile = tuple(x.shape[1] * (bits == kind) for kind in (8, 4, 2))
    tried = rounded(x, steps(sigma, largest, profile), 2.0 ** (bits - 1))  # type: ignore[arg-type]
    return tried, jnp.where(real, (tried - x) ** 2, 0).sum(axis=0)


def allotted(errors: Array, widths: tuple[int, ...], total: int) -> Array:
    """Return which width each column gets, so that the sum of errors is least: int [W]. By dynamic programming.

    Args:
        errors: the error of each column with each width [W, widths].
        widths: the numbers of bits to choose from, rising from 0.
        total: bits of all columns together, at most.
    """

    def forward(best: Array, error: Array) -> tuple[Array, Array]:
        # best[b]: the least error of the columns so far with at most b bits
        after = [jnp.concatenate([jnp.full(width, jnp.inf), best[: total + 1 - width]]) for width in widths]
        every = jnp.stack(after) + error[:, None]
        return every.min(axis=0), every.argmin(axis=0)

    def backward(left: Array, chosen: Array) -> tuple[Array, Array]:
        return left - jnp.asarray(widths)[chosen[left]], chosen[left]

    _, chosen = lax.scan(forward, jnp.zeros(total + 1), errors)
    return lax.scan(backward, jnp.asarray(total), chosen, reverse=True)[1]


@dataclasses.dataclass(frozen=True)
class Allotted:
    """Rounds keys in the basis of `TransformCode`, with bits that the prompt decides or that groups of columns have.

    Attributes:
        widths: the numbers of bits that a column may have.
        total: bits of a token.
        fixed: the bits of each of eight groups of columns, or () if dynamic programming decides them.
        own_ranges: whether each column has its range of least error, and not that of `TransformCode`.
    """

    widths: tuple[int, ...]
    total: int
    fixed: tuple[int, ...] = ()
    own_ranges: bool = False

    def rounded_keys(self, k_pre: Array, lengths: Array, weights: Array | None) -> Array:
        """Round the keys k_pre [B, S, h_kv, d]."""
        plain = PromptKeys(k_pre, lengths, k_pre.shape[1], weights)
        mean = plain.mean_key()
        keys = dataclasses.replace(plain, mean=mean)
        basis = leading_columns(keys.gram(), k_pre.shape[2] * k_pre.shape[3])
        x, _ = keys.coefficients(basis)(jnp.int32(0))
        real = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
        got = jnp.einsum("bsr,bmr->bsm", jax.vmap(self.rounds)(x, real), basis, precision=lax.Precision.HIGHEST)
        got = got if weights is None else got / side_by_side(weights)[:, None]
        return got.reshape(k_pre.shape) + mean[:, None]

    def rounds(self, x: Array, real: Array) -> Array:
        """Round the coefficients of one prompt x [S, W]."""
        errors_of = column_errors if self.own_ranges else usual_errors
        values, errors = zip(*(errors_of(x, real, bits) for bits in self.widths), strict=True)
        if self.fixed:
            groups = np.repeat([self.widths.index(bits) for bits in self.fixed], x.shape[1] // len(self.fixed))
            chosen = jnp.asarray(groups)
        else:
            chosen = allotted(jnp.stack(errors, axis=1), self.widths, self.total)
        return jnp.take_along_axis(jnp.stack(values), chosen[None, None], axis=0)[0]
