"""The arrays that level_scores reads and returns, and the checks of their shapes and dtypes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape


class TwoLevels(NamedTuple):
    """The landmarks of n chunks in two levels.

    Each chunk has s landmarks, where s is a power of two and at least 2. They are stored as the s rows of their
    Hadamard transform. The first row is the mean of the landmarks. Landmark j is the sum of all rows k, in which row k
    has a minus sign if j & k has an odd number of ones.

    Attributes:
        means: the first row of each chunk, floating [B, h_kv, n, d]. With mean_scale they are packed instead: uint8
            [B, h_kv, n, d * bits / 8], two's complement codes in the layout of `pallas_kernels.bits`.
        details: the other rows of each chunk, side by side, floating [B, h_kv, n, (s - 1) * d]. With detail_scale they
            are packed instead: uint8 [B, h_kv, n, (s - 1) * d * bits / 8].
        mean_scale: floating [B, h_kv, n, 1], the step of each mean's codes, or None.
        detail_scale: floating [B, h_kv, n, s - 1], the step of each row's codes, or None.
        spread: floating [B, h_kv, n, s], the root mean square difference of the keys from their landmark, or None.
    """

    means: jax.Array
    details: jax.Array
    mean_scale: jax.Array | None = None
    detail_scale: jax.Array | None = None
    spread: jax.Array | None = None

    def parts(self, dim: int) -> int:
        """Return the number of landmarks s of a chunk if heads are `dim` wide."""
        rows = self.details.shape[3] // dim if self.detail_scale is None else self.detail_scale.shape[3]
        return rows + 1

    def bits(self, dim: int) -> tuple[int, int] | None:
        """Return the bits of a packed number of the means and of the details, or None if they are not packed."""
        if self.mean_scale is None or self.detail_scale is None:
            return None
        return 8 * self.means.shape[3] // dim, 8 * self.details.shape[3] // (dim * self.detail_scale.shape[3])


class NearScores(NamedTuple):
    """The chunks that were scored by all of their landmarks.

    Attributes:
        scores: float32 [B, h_kv, T, m]; -1 where there is no candidate.
        ids: their chunks, int32 [B, h_kv, T, m], in rising order; 0 where there is no candidate.
    """

    scores: jax.Array
    ids: jax.Array


def check(q: jax.Array, scores: jax.Array, levels: TwoLevels) -> None:
    """Check the shapes and dtypes of all arrays.

    Raises:
        ValueError: a shape or a dtype is wrong.
    """
    expect_shape("q", q, ("B", "T", "h_q", "d"))
    expect_dtype("q", q, jnp.floating)
    batch, length, heads, dim = q.shape
    expect_shape("scores", scores, (batch, "h_kv", length, "n"))
    expect_dtype("scores", scores, jnp.float32)
    expect_groups(heads, scores.shape[1])
    lead = (batch, scores.shape[1], scores.shape[3])
    check_rows("means", levels.means, levels.mean_scale, lead, dim)
    check_rows("details", levels.details, levels.detail_scale, lead, dim)
    if (levels.mean_scale is None) != (levels.detail_scale is None):
        raise ValueError("means and details must both have a scale, or neither of them")
    if levels.mean_scale is not None and levels.mean_scale.shape[3] != 1:
        raise ValueError(f"means must have one scale for each chunk, got {levels.mean_scale.shape[3]}")
    if levels.means.shape[3] not in row_widths(dim, levels.mean_scale):
        raise ValueError(
            f"means must have one row of {dim} numbers for each chunk, got {levels.means.shape[3]} columns"
        )
    parts = levels.parts(dim)
    if parts < 2 or parts & (parts - 1):
        raise ValueError(f"a chunk must have a power of two of landmarks, and at least 2, got {parts}")
    if levels.spread is not None:
        expect_shape("spread", levels.spread, (*lead, parts))
        expect_dtype("spread", levels.spread, jnp.floating)


def check_rows(name: str, rows: jax.Array, scale: jax.Array | None, lead: tuple[int, ...], dim: int) -> None:
    """Check one level.

    Raises:
        ValueError: a shape or a dtype is wrong.
    """
    expect_shape(name, rows, (*lead, "w"))
    expect_dtype(name, rows, jnp.floating if scale is None else jnp.uint8)
    if scale is None:
        whole = rows.shape[3] > 0 and rows.shape[3] % dim == 0
    else:
        expect_shape(f"the scale of {name}", scale, (*lead, "r"))
        expect_dtype(f"the scale of {name}", scale, jnp.floating)
        whole = scale.shape[3] > 0 and rows.shape[3] in [width * scale.shape[3] for width in row_widths(dim, scale)]
    if not whole:
        raise ValueError(f"{name} must have whole rows of {dim} numbers, got {rows.shape[3]} columns")


def row_widths(dim: int, scale: jax.Array | None) -> tuple[float, ...]:
    """Return how many columns a row of `dim` numbers may have: as many, or the bytes of 8 or 4 bits for each."""
    return (dim,) if scale is None else (dim, dim / 2)
