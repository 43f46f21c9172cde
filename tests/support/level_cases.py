"""Cases of the op level_scores, and its definition in float64 NumPy, written from the docstrings of the package."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_cases import normal, queries, random_bytes, scale_dtype
from kernel_truth import grouped, mass_of, numbers_of, wide
from random_arrays import array


@dataclass(frozen=True)
class Near:
    """Chunks with landmarks in two levels. `ties` is the number of different scores, so that few of them make ties."""

    chunks: int
    count: int  # groups that are chosen
    dim: int
    parts: int
    group: int = 1
    size: int = 4  # chunks of a group
    queries: int = 1
    kv_heads: int = 1
    batch: int = 1
    dtype: str = "float32"
    bits: int | None = None  # of the details; means then have 8
    spread: bool = False
    ties: int = 10**6
    absent: float = 0.4  # share of the chunks that are no candidates


LEVELS = (
    Near(61, 5, 128, 4, group=4, kv_heads=2, dtype="bfloat16", bits=4, spread=True),
    Near(27, 3, 64, 4, kv_heads=2, batch=2, bits=4, ties=3),
    Near(113, 9, 80, 2, group=8, dtype="bfloat16", bits=8, spread=True, ties=2),
    Near(70, 40, 64, 8, group=5, bits=8, absent=0.9),  # more groups than there are, and few candidates
    Near(33, 2, 80, 4, group=3, queries=3, batch=2, spread=True),
    Near(150, 20, 96, 2, group=7, dtype="bfloat16", size=3, ties=5, spread=True),
    Near(18, 2, 256, 16, group=2, dtype="bfloat16", bits=4),
    Near(299, 70, 64, 2, group=6, queries=2, dtype="bfloat16", bits=4, ties=1, absent=0.0),
    Near(1, 1, 64, 4, group=2, bits=4),
)
REAL_LEVELS = tuple(
    Near(n, 239, 128, 4, group=4, kv_heads=8, dtype=dtype, bits=4, spread=True)
    for n, dtype in ((15_356, "bfloat16"), (7_676, "float32"))
)


def level_inputs(case: Near) -> dict[str, Any]:
    """Arguments of level_scores: the last row and head of several has no candidate."""
    rng, lead = np.random.default_rng(case.chunks), (case.batch, case.kv_heads)
    scores = (rng.integers(0, case.ties, (*lead, case.queries, case.chunks)) / case.ties).astype(np.float32)
    scores[rng.random(scores.shape) < case.absent] = -1
    if case.batch * case.kv_heads > 1:
        scores[-1, -1] = -1
    scores[0, 0, 0, 0] = 0.5
    inputs: dict[str, Any] = {"count": case.count, "size": case.size, "scale": case.dim**-0.5}
    inputs |= {"q": queries(case, rng), "scores": array(scores)}
    for name, rows, bits in (("mean", 1, case.bits and 8), ("detail", case.parts - 1, case.bits)):
        shape, key = (*lead, case.chunks), f"{name}s"
        if bits is None:
            inputs[key] = normal(rng, *shape, rows * case.dim, dtype=case.dtype)
            continue
        inputs[key] = random_bytes(rng, *shape, rows * case.dim * bits // 8)
        steps = (0.5 + rng.random((*shape, rows))) * 2.0 ** (1 - bits)
        inputs[f"{name}_scale"] = array(steps, scale_dtype(case.dtype))
    if case.spread:
        inputs["spread"] = array(0.5 * rng.random((*lead, case.chunks, case.parts)), scale_dtype(case.dtype))
    return inputs


def level_truth(**inputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """The definition: the scores and ids of the chunks in the best groups, one query and head at a time."""
    q, scores, count, size, scale = (inputs[key] for key in ("q", "scores", "count", "size", "scale"))
    rows = [numbers_of(inputs[f"{key}s"], inputs.get(f"{key}_scale"), q.shape[3]) for key in ("mean", "detail")]
    marks, scores, spread = np.concatenate(rows, axis=3), np.asarray(scores), inputs.get("spread")
    parts = range(marks.shape[3])
    signs = np.array([[(-1) ** (j & k).bit_count() for k in parts] for j in parts])
    marks = np.einsum("jk,bhnkd->bhnjd", signs, marks)
    half = np.zeros(marks.shape[:4]) if spread is None else (scale * wide(spread)) ** 2 / 2
    groups = -(-scores.shape[3] // size)
    asked, shape = grouped(q, scores.shape[1]), (*scores.shape[:3], size * min(count, groups))
    found, ids = np.full(shape, -1.0), np.zeros(shape, np.int32)
    for b, h, t in np.ndindex(*shape[:3]):
        own = scores[b, h, t]
        best = [own[g * size : (g + 1) * size].max() for g in range(groups)]
        order = sorted((g for g in range(groups) if best[g] >= 0), key=lambda g: (-best[g], g))[:count]
        places = [(place * size + i, g * size + i) for place, g in enumerate(sorted(order)) for i in range(size)]
        if near := [(at, chunk) for at, chunk in places if chunk < len(own) and own[chunk] >= 0]:
            at, chosen = map(list, zip(*near, strict=True))
            there = np.ones(len(chosen), bool)
            found[b, h, t, at] = mass_of(asked[b, h, t], marks[b, h, chosen], half[b, h, chosen], there, scale)
            ids[b, h, t, at] = chosen
    return found, ids
