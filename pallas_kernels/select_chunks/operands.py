"""The arrays that select_chunks reads and returns, and the checks of their shapes and dtypes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape

MOST_AGE = 255  # the age of a place stops here


class Candidates(NamedTuple):
    """The candidates of a selection, and the cache. The fields are the arguments of `pallas_kernels.select_chunks`."""

    scores: jax.Array
    asked: jax.Array
    resident: jax.Array
    ages: jax.Array | None = None
    numbers: jax.Array | None = None


class Chosen(NamedTuple):
    """The k chosen chunks, and the cache of P places after the selection.

    Attributes:
        ids: int32 [B, h, k], the chosen chunks in rising order, and then 0.
        places: int32 [B, h, k], the place of each chosen chunk in the cache, and then P.
        missed: int32 [B, h, k], the indices in `ids` of the chunks that were not in the cache, in rising order, and
            then k. Their rows must be fetched.
        held: int32 [B, h, P], the chunk in each place of the cache, or -1: `resident` of the next call.
        ages: int32 [B, h, P], `ages` of the next call. None if the call had no ages.
        total: int32 [B, h], how many chunks were chosen.
        hits: int32 [B, h], how many of them were in the cache.
    """

    ids: jax.Array
    places: jax.Array
    missed: jax.Array
    held: jax.Array
    ages: jax.Array | None
    total: jax.Array
    hits: jax.Array


def check(candidates: Candidates, count: int) -> None:
    """Check the shapes and dtypes, and the number of chunks to choose.

    Raises:
        ValueError: one of them is wrong.
    """
    scores, asked, resident, ages, numbers = candidates
    expect_shape("scores", scores, ("B", "h", "n"))
    expect_dtype("scores", scores, jnp.float32)
    expect_shape("asked", asked, (scores.shape[0],))
    expect_dtype("asked", asked, jnp.bool_)
    expect_shape("resident", resident, (*scores.shape[:2], "P"))
    expect_dtype("resident", resident, jnp.int32)
    if ages is not None:
        expect_shape("ages", ages, resident.shape)
        expect_dtype("ages", ages, jnp.int32)
    if numbers is not None:
        expect_shape("numbers", numbers, scores.shape)
        expect_dtype("numbers", numbers, jnp.int32)
    if not 0 <= count <= resident.shape[2]:
        raise ValueError(f"count must be 0 to {resident.shape[2]}, the number of places, got {count}")
