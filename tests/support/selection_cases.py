"""Cases of the op select_chunks, and its definition in plain Python."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from random_arrays import array

from pallas_kernels import Chosen

OLDEST = 255  # the largest age


@dataclass(frozen=True)
class Selections:
    """Scores and a cache. `levels` is the number of different scores, so that few of them make many ties."""

    size: int
    count: int
    pool: float = 1  # places for each chunk that is chosen
    aged: bool = False
    heads: int = 1
    batch: int = 1
    levels: int = 10**6
    absent: float = 0.3  # share of the chunks that may not be chosen
    numbered: bool = False
    largest: float = 1.0  # the scores are below it
    dtype: str = "float32"

    @property
    def places(self) -> int:
        return int(self.count * self.pool)


# Cases of the same shape share a program.
SELECTIONS = (
    Selections(130, 70, heads=3, batch=2),
    Selections(5, 9, batch=3),  # more places than chunks
    Selections(61, 16, heads=2, levels=8, numbered=True),
    Selections(130, 24, 1.5, aged=True, heads=2, batch=2),
    Selections(61, 16, 4, aged=True, heads=2, levels=8, numbered=True),
    Selections(1, 1),
    Selections(1, 1, aged=True),
    Selections(130, 70, heads=3, batch=2, levels=4),
    Selections(130, 70, heads=3, batch=2, levels=1),  # all scores are equal
    Selections(130, 70, heads=3, batch=2, absent=0.6),  # about as many candidates as places
    Selections(130, 70, heads=3, batch=2, absent=0.0, largest=3e38),
    Selections(130, 70, heads=3, batch=2, absent=1.0),  # no candidates
    Selections(61, 16, heads=2, absent=0.95, numbered=True),  # fewer candidates than chunks to choose
    Selections(61, 16, heads=2, largest=1e-40, absent=0.0, numbered=True),  # denormal numbers
    Selections(2049, 39, 2, aged=True, levels=100),  # the first size at which a lane holds four words
    Selections(2049, 39, 2, aged=True, levels=2),
)
REAL_SELECTIONS = (
    Selections(15_356, 239, heads=8),
    Selections(15_356, 239, 2, aged=True, heads=8, levels=50),
    Selections(956, 239, heads=8, numbered=True),
    Selections(956, 239, 4, aged=True, heads=8, numbered=True),
    Selections(31_228, 486, heads=8),
)


def scores_of(case: Selections, rng: np.random.Generator) -> dict[str, Any]:
    """The scores of one call, and the numbers of the candidates."""
    shape = (case.batch, case.heads, case.size)
    scores = (rng.integers(0, case.levels, shape) / case.levels * case.largest).astype(np.float32)
    scores[rng.random(shape) < case.absent] = -1
    numbers = None
    if case.numbered:
        several = [np.sort(rng.permutation(2 * case.size)[: case.size]) for _ in range(case.batch * case.heads)]
        numbers = array(np.reshape(several, shape), np.int32)
    return {"scores": array(scores), "numbers": numbers}


def selection_inputs(case: Selections) -> dict[str, Any]:
    """Arguments of select_chunks. Half of the resident chunks exist; the last row of several is not asked."""
    rng, shape = np.random.default_rng(case.size), (case.batch, case.heads, case.places)
    inputs = scores_of(case, rng)
    resident = np.full(shape, -1)
    for b, h in np.ndindex(*shape[:2]):
        chunks = np.arange(case.size) if inputs["numbers"] is None else np.asarray(inputs["numbers"])[b, h]
        chunks = rng.permutation(chunks)[: case.places]
        resident[b, h, : len(chunks)] = chunks
        resident[b, h] = rng.permutation(resident[b, h])
    resident[rng.random(shape) < 0.5] = -1
    ages = np.where(resident < 0, OLDEST, rng.choice([0, 1, 2, 3, 90, OLDEST - 1, OLDEST], shape))
    return inputs | {
        "asked": array(np.arange(case.batch) < max(1, case.batch - 1)),
        "resident": array(resident, np.int32),
        "count": case.count,
        "ages": array(ages, np.int32) if case.aged else None,
    }


def calls_in_a_row(case: Selections, calls: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of several calls, without the cache. Few scores change from call to call."""
    rng = np.random.default_rng(calls)
    inputs = scores_of(case, rng)
    for _ in range(calls):
        changes = rng.random(inputs["scores"].shape) < 0.15
        inputs["scores"] = np.where(changes, scores_of(case, rng)["scores"], inputs["scores"])
        yield inputs | {"asked": array(rng.random(case.batch) < 0.8), "count": case.count}


def new_cache(case: Selections) -> dict[str, Any]:
    """The cache before the first of `calls_in_a_row`."""
    shape = (case.batch, case.heads, case.places)
    return {
        "resident": array(np.full(shape, -1, np.int32)),
        "ages": array(np.full(shape, OLDEST, np.int32)) if case.aged else None,
    }


def selection_truth(
    scores: Any, asked: Any, resident: Any, count: int, ages: Any = None, numbers: Any = None
) -> Chosen:
    """The definition, one head at a time, with Python's sort.

    With ages, the least recently chosen chunks are replaced first. Without, chunks that are not chosen leave the cache.
    """
    heads, places = np.shape(scores)[:2], np.shape(resident)[2]
    aged = ages is not None
    truth = Chosen(
        ids=np.zeros((*heads, count), np.int32),
        places=np.full((*heads, count), places),
        missed=np.full((*heads, count), count),
        held=np.array(resident),
        ages=np.array(ages) if aged else None,
        total=np.zeros(heads, np.int32),
        hits=np.zeros(heads, np.int32),
    )
    for b, h in np.ndindex(*heads):
        if not np.asarray(asked)[b]:
            continue
        order = sorted((-score, index) for index, score in enumerate(np.asarray(scores)[b, h].tolist()) if score >= 0)
        best = sorted(index for _, index in order[:count])
        chunks = best if numbers is None else np.asarray(numbers)[b, h, best].tolist()
        held, old = truth.held[b, h].tolist(), np.asarray(ages)[b, h].tolist() if aged else []
        missed = [index for index, chunk in enumerate(chunks) if chunk not in held]
        free = [place for place in range(places) if held[place] not in chunks]
        if aged:
            free = sorted(sorted(free, key=lambda place: -old[place])[: len(missed)])
        held = [-1 if place in free else chunk for place, chunk in enumerate(held)]
        for index, place in zip(missed, free, strict=False):
            held[place] = chunks[index]
        truth.ids[b, h, : len(chunks)] = chunks
        truth.places[b, h, : len(chunks)] = [held.index(chunk) for chunk in chunks]
        truth.missed[b, h, : len(missed)], truth.held[b, h] = missed, held
        if aged:
            new = [0 if chunk in chunks else min(OLDEST, age + 1) for chunk, age in zip(held, old, strict=True)]
            truth.ages[b, h] = new
        truth.total[b, h], truth.hits[b, h] = len(chunks), len(chunks) - len(missed)
    return truth
