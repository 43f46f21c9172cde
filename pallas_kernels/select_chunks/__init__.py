"""The op that chooses the chunks with the largest scores, and gives each of them a place in a buffer."""

import jax

from pallas_kernels.choose import run
from pallas_kernels.select_chunks import kernel, reference
from pallas_kernels.select_chunks.operands import Candidates, check
from pallas_kernels.select_chunks.operands import Chosen as Chosen
from pallas_kernels.select_chunks.reference import in_place as in_place
from pallas_kernels.select_chunks.reference import places_of as places_of


def select_chunks(
    scores: jax.Array,
    asked: jax.Array,
    resident: jax.Array,
    *,
    numbers: jax.Array | None = None,
    implementation: str = "auto",
) -> Chosen:
    """Choose the k candidates with the largest scores. A chunk that was chosen before keeps its place.

    Of equal scores, the first is chosen. The chosen chunks that are not in `resident` get the free places in turn: the
    first of them, in the order of `scores`, gets the first free place.

    Example for one row and head: scores [.1, .4, -1, .3, .2] and resident [3, -1] give ids [3, 1] and hit [True,
    False]. Chunk 3 keeps its place, and chunk 1 gets the free place.

    Args:
        scores: float32 [B, h, n], one for each candidate. A candidate with a score below 0 is never chosen.
        asked: bool [B]. A row that is not asked chooses nothing.
        resident: int32 [B, h, k], the chunk in each place, or -1. The chunks of a head are distinct.
        numbers: int32 [B, h, n], the number of each candidate's chunk. None: candidate i is chunk i.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        The chosen chunks.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    candidates = Candidates(scores, asked, resident, numbers)
    check(candidates)
    chosen: Chosen = run(implementation, kernel.select_chunks, reference.select_chunks, candidates)
    return chosen
