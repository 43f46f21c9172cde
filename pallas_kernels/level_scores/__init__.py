"""The op that chooses the best chunks by the means of their landmarks, and scores these by all of their landmarks.

Landmarks in two levels are read in two steps. `chunk_scores` scores all chunks by their means. This op then reads all
landmarks of a few chunks only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.level_scores import kernel, reference
from pallas_kernels.level_scores.operands import NearScores as NearScores
from pallas_kernels.level_scores.operands import TwoLevels as TwoLevels
from pallas_kernels.level_scores.operands import check
from pallas_kernels.level_scores.reference import level_logits as level_logits


def level_scores(
    q: jax.Array,
    scores: jax.Array,
    levels: TwoLevels,
    *,
    count: int,
    size: int,
    scale: float,
    implementation: str = "auto",
) -> NearScores:
    """Score the chunks of the best groups by all of their landmarks.

    A group is `size` neighboring chunks. It has the largest score of its chunks. The `count` groups with the largest
    scores are chosen, and of equal groups the first. Their chunks are scored as in `pallas_kernels.chunk_scores`: in
    each query head, a softmax runs over the landmarks of all candidates in the chosen groups, the probabilities of a
    chunk are added, and its score is the maximum of these sums over the query heads of the KV head.

    Example with groups of two chunks, and one group: scores [.1, .2, -1, .4, .3] give the ids [0, 3], and the score of
    the first is -1, because chunk 2 is not a candidate.

    Args:
        q: floating [B, T, h_q, d], where h_q is a multiple of h_kv.
        scores: float32 [B, h_kv, T, n], the scores of all chunks by their means. A chunk with a score below 0 is not a
            candidate.
        levels: the landmarks.
        count: number of groups.
        size: number of chunks of a group. The last group may have fewer.

    Returns:
        The scores and ids of m = size * min(count, ceil(n / size)) chunks, for each query. Groups are in rising order,
        and groups without a candidate come last.

    Raises:
        ValueError: a shape, a dtype, a number or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    check(q, scores, levels)
    if count < 1 or size < 1:
        raise ValueError(f"count and size must be at least 1, got {count} and {size}")
    groups = min(count, -(-scores.shape[3] // size))
    if groups == 0:
        shape = (*scores.shape[:3], 0)
        return NearScores(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))
    options: Any = {"count": groups, "size": size, "scale": float(scale)}
    found: NearScores = run(
        implementation,
        functools.partial(kernel.level_scores, **options),
        functools.partial(reference.level_scores, **options),
        q,
        scores,
        levels,
    )
    return found
