"""The op that chooses the chunks with the largest scores, and gives each of them a place in a cache."""

import functools

import jax

from pallas_kernels.choose import run
from pallas_kernels.select_chunks import kernel, reference
from pallas_kernels.select_chunks.kernel import MOST_PLACES as MOST_PLACES
from pallas_kernels.select_chunks.operands import MOST_AGE as MOST_AGE
from pallas_kernels.select_chunks.operands import Candidates, check
from pallas_kernels.select_chunks.operands import Chosen as Chosen
from pallas_kernels.select_chunks.reference import places_of as places_of


def select_chunks(
    scores: jax.Array,
    asked: jax.Array,
    resident: jax.Array,
    *,
    count: int,
    ages: jax.Array | None = None,
    numbers: jax.Array | None = None,
    implementation: str = "auto",
) -> Chosen:
    """Choose the k = `count` candidates with the largest scores, and find a place for each of them in a cache.

    Of equal scores, the first is chosen. A chunk that is in the cache keeps its place. A chosen chunk that is not in
    the cache is missed. The n-th missed chunk gets the n-th place that is freed, in rising order of the places.

    Without ages, every place whose chunk is not chosen is freed. If no missed chunk gets it, it is empty afterwards.

    With ages, each missed chunk frees one place. Only a place whose chunk is not chosen can be freed. The places with
    the largest ages are freed, and of equal ages the first place. All other chunks stay. Afterwards the age of a
    chosen chunk's place is 0. The age of every other place is larger by one, up to MOST_AGE. So the chunk that was
    chosen least recently is replaced first.

    A row that is not asked chooses nothing. Its cache and its ages do not change.

    Example for one row and head: scores [.1, .4, -1, .3, .2], count 2 and resident [3, 4] give ids [1, 3], places
    [1, 0] and missed [0, 2]. Chunk 3 keeps its place, and chunk 1 gets the place of chunk 4.

    Args:
        scores: float32 [B, h, n], one for each candidate. A candidate with a score below 0 is never chosen.
        asked: bool [B], whether a row chooses.
        resident: int32 [B, h, P], the chunk in each place of the cache, or -1. The chunks of a head are distinct.
        count: k, the number of chunks to choose, at most P. Fewer are chosen if there are fewer candidates.
        ages: int32 [B, h, P], how many selections ago the chunk of each place was chosen last, 0 to MOST_AGE. A new
            cache has MOST_AGE in every place. None: the cache holds only the chunks that were chosen last.
        numbers: int32 [B, h, n], the number of each candidate's chunk, rising in each head. None: candidate i is
            chunk i.

    Returns:
        The chosen chunks, and the cache for the next call.

    Raises:
        ValueError: a shape, a dtype, the count or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    candidates = Candidates(scores, asked, resident, ages, numbers)
    check(candidates, count)
    parts = (functools.partial(part.select_chunks, count=count) for part in (kernel, reference))
    chosen: Chosen = run(implementation, *parts, candidates)
    return chosen
