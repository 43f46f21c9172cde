"""The arrays that select_chunks reads and returns, and the checks of their shapes and dtypes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape


class Candidates(NamedTuple):
    """The candidates of a selection. The fields are the arguments of `pallas_kernels.select_chunks`."""

    scores: jax.Array
    asked: jax.Array
    resident: jax.Array
    numbers: jax.Array | None = None


class Chosen(NamedTuple):
    """The chosen chunks of each place.

    Attributes:
        ids: int32 [B, h, k], the chunk in each place; 0 in a place that stays empty.
        valid: bool [B, h, k], whether a chunk was chosen for the place.
        hit: bool [B, h, k], whether the chunk was in this place before.
        missed: int32 [B, h, k], the places whose chunk was not there before, in rising order. Their rows must be
            fetched. The rest of the array is k, which is past the last place.
    """

    ids: jax.Array
    valid: jax.Array
    hit: jax.Array
    missed: jax.Array


def check(candidates: Candidates) -> None:
    """Check the shapes and dtypes.

    Raises:
        ValueError: one of them is wrong.
    """
    scores, asked, resident, numbers = candidates
    expect_shape("scores", scores, ("B", "h", "n"))
    expect_dtype("scores", scores, jnp.float32)
    expect_shape("asked", asked, (scores.shape[0],))
    expect_dtype("asked", asked, jnp.bool_)
    expect_shape("resident", resident, (*scores.shape[:2], "k"))
    expect_dtype("resident", resident, jnp.int32)
    if numbers is not None:
        expect_shape("numbers", numbers, scores.shape)
        expect_dtype("numbers", numbers, jnp.int32)
