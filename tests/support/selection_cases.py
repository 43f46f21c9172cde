"""Cases of the op select_chunks, and its definition in plain Python."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Selections:
    """Scores and places. `levels` is the number of different scores, so that few of them make many ties."""

    size: int
    places: int
    heads: int = 1
    batch: int = 1
    levels: int = 10**6
    absent: float = 0.3  # share of the chunks that may not be chosen
    numbered: bool = False
    dtype: str = "float32"


SELECTIONS = (
    Selections(27, 7, heads=2, batch=2),
    Selections(130, 70, heads=3, levels=4),
    Selections(5, 9, batch=3),  # more places than chunks
    Selections(300, 64, heads=2, levels=1),  # all scores are equal
    Selections(61, 16, heads=2, absent=0.95, numbered=True),  # fewer candidates than places
    Selections(4097, 239, levels=100, numbered=True),
    Selections(1, 1),
    Selections(64, 64, absent=0.0),  # all are chosen
)
REAL_SELECTIONS = (
    Selections(15_356, 239, heads=8),
    Selections(15_356, 239, heads=8, levels=50),
    Selections(956, 239, heads=8, numbered=True),
    Selections(31_228, 486, heads=8),
)


def selection_inputs(case: Selections) -> dict[str, Any]:
    """Arguments of select_chunks. Half of the resident chunks exist; the last row of several is not asked."""
    rng, shape = np.random.default_rng(case.size), (case.batch, case.heads, case.size)
    scores = (rng.integers(0, case.levels, shape) / case.levels).astype(np.float32)
    scores[rng.random(shape) < case.absent] = -1
    chunks = np.stack([rng.permutation(case.size) for _ in range(case.batch * case.heads)]).reshape(shape)
    resident = np.full((*shape[:2], case.places), -1)
    kept = min(case.size, case.places)
    resident[..., :kept] = chunks[..., :kept]
    resident[rng.random(resident.shape) < 0.5] = -1
    return {
        "scores": jnp.asarray(scores),
        "asked": jnp.asarray(np.arange(case.batch) < max(1, case.batch - 1)),
        "resident": jnp.asarray(resident, jnp.int32),
        "numbers": jnp.asarray(chunks[..., ::-1], jnp.int32) if case.numbered else None,
    }


def selection_truth(scores: Any, asked: Any, resident: Any, numbers: Any) -> tuple[np.ndarray, ...]:
    """The definition, one head at a time, with Python's sort."""
    scores, resident = np.asarray(scores), np.asarray(resident)
    ids, valid, hit = np.zeros_like(resident), np.zeros(resident.shape, bool), np.zeros(resident.shape, bool)
    missed, misses = np.full_like(resident, resident.shape[2]), np.zeros(resident.shape[:2], int)
    for b, h in np.ndindex(*resident.shape[:2]):
        order = sorted(range(scores.shape[2]), key=lambda i: (-scores[b, h, i], i))
        best = [i for i in order if scores[b, h, i] >= 0 and asked[b]][: resident.shape[2]]
        chunks = [i if numbers is None else int(numbers[b, h, i]) for i in sorted(best)]
        coming = [chunk for chunk in chunks if chunk not in resident[b, h]]
        for place, old in enumerate(resident[b, h]):
            if old in chunks:
                ids[b, h, place], valid[b, h, place], hit[b, h, place] = old, True, True
            elif coming:
                ids[b, h, place], valid[b, h, place] = coming.pop(0), True
                missed[b, h, misses[b, h]] = place
                misses[b, h] += 1
    return ids, valid, hit, missed
