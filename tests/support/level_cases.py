"""Cases of the op level_scores, and its definition in float64 NumPy, written from the docstrings of the package."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_cases import normal, random_bytes, scale_dtype
from kernel_truth import codes_in, softmax, two_s_complement, wide
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
    inputs = {
        "q": normal(rng, case.batch, case.queries, case.kv_heads * case.group, case.dim, dtype=case.dtype),
        "scores": array(scores),
        "count": case.count,
        "size": case.size,
        "scale": case.dim**-0.5,
    }
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


def landmarks_of(inputs: dict[str, Any]) -> np.ndarray:
    """The landmarks that the levels stand for, float64 [B, h_kv, n, s, d]."""
    dim, levels = inputs["q"].shape[3], []
    for name in ("mean", "detail"):
        rows, scale = np.asarray(inputs[f"{name}s"]), inputs.get(f"{name}_scale")
        if scale is None:
            levels.append(wide(rows).reshape(*rows.shape[:3], -1, dim))
            continue
        rows = rows.reshape(*scale.shape, -1)
        bits = 8 * rows.shape[4] // dim
        numbers = [two_s_complement(codes_in(row, dim, bits), bits) for row in rows.reshape(-1, rows.shape[4])]
        levels.append(np.reshape(numbers, (*scale.shape, dim)) * wide(scale)[..., None])
    rows = np.concatenate(levels, axis=3)
    parts = rows.shape[3]
    signs = np.array([[(-1) ** (j & k).bit_count() for k in range(parts)] for j in range(parts)])
    return np.einsum("jk,bhnkd->bhnjd", signs, rows)


def level_truth(**inputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """The definition: the scores and ids of the chunks in the best groups, one query and head at a time."""
    q, scores, marks = wide(inputs["q"]), np.asarray(inputs["scores"]), landmarks_of(inputs)
    count, size, scale = inputs["count"], inputs["size"], inputs["scale"]
    spread = inputs.get("spread")
    half = np.zeros(marks.shape[:4]) if spread is None else (scale * wide(spread)) ** 2 / 2
    batch, heads, length, chunks = scores.shape
    groups, group = -(-chunks // size), q.shape[2] // heads
    shape = (batch, heads, length, size * min(count, groups))
    found, ids = np.full(shape, -1.0), np.zeros(shape, np.int32)
    for b, h, t in np.ndindex(batch, heads, length):
        own = scores[b, h, t]
        best = [own[g * size : (g + 1) * size].max() for g in range(groups)]
        order = sorted((g for g in range(groups) if best[g] >= 0), key=lambda g: (-best[g], g))[:count]
        places = [(place, g * size + i) for place, g in enumerate(sorted(order)) for i in range(size)]
        near = [(size * place + chunk % size, chunk) for place, chunk in places if chunk < chunks and own[chunk] >= 0]
        if not near:
            continue
        at, chosen = map(list, zip(*near, strict=True))
        mass = []
        for one in q[b, t, h * group : (h + 1) * group]:
            logits = scale * marks[b, h, chosen] @ one + one @ one * half[b, h, chosen]
            mass.append(softmax(logits.ravel()).reshape(logits.shape).sum(axis=1))
        found[b, h, t, at], ids[b, h, t, at] = np.max(mass, axis=0), chosen
    return found, ids
