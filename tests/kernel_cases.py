"""The table of cases of the GPU ops, and their one table of tolerances, by the dtype of what comes out."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE: dict[str, dict[str, float]] = {
    "float32": {"rtol": 1e-5, "atol": 1e-5},
    "bfloat16": {"rtol": 1e-2, "atol": 1e-2},
}


@dataclass(frozen=True)
class Heads:
    """Queries and rows: what scores and attention see."""

    rows: tuple[int, ...]  # landmarks, or the rows of each piece
    dim: int
    group: int = 1
    queries: int = 1
    kv_heads: int = 1
    batch: int = 1
    dtype: str = "float32"


@dataclass(frozen=True)
class Chunks:
    """Factors, and values of the same chunks: what reconstruction and fetch see."""

    units: int
    chunk: int
    rank: int
    dim: int
    count: int = 7
    rotated: int | None = None  # None: all columns
    tail: int = 0
    kept: bool = False
    kv_heads: int = 1
    batch: int = 1
    dtype: str = "float32"


SCORES = (
    Heads((27,), 64, kv_heads=2, batch=2),
    Heads((61,), 128, group=4, kv_heads=2, dtype="bfloat16"),
    Heads((113,), 80, group=8, queries=3),
    Heads((482,), 96, group=3, kv_heads=2, dtype="bfloat16"),
    Heads((61,), 256, group=2, queries=2),
    Heads((27,), 64, group=7, queries=10, dtype="bfloat16"),
    Heads((113,), 256, group=6, dtype="bfloat16"),
    Heads((1,), 64, group=5),
)

ATTENTION = (
    Heads((27,), 64, kv_heads=2, batch=2),
    Heads((61, 5, 113), 128, group=4, kv_heads=2, dtype="bfloat16"),
    Heads((113, 61), 80, group=8, queries=3),
    Heads((482,), 96, group=3, dtype="bfloat16"),
    Heads((27, 1), 256, group=2, queries=2),
    Heads((61, 27), 80, group=7, queries=10, dtype="bfloat16"),
    Heads((61,), 64, group=6, queries=5),
    Heads((113,), 256, group=5, dtype="bfloat16"),
)

CHUNKS = (
    Chunks(27, 8, 160, 128, kv_heads=2, tail=3, kept=True, dtype="bfloat16"),
    Chunks(61, 1, 24, 64, count=27, batch=2, kept=True),
    Chunks(27, 3, 32, 80, kv_heads=2, batch=2, tail=2, kept=True),
    Chunks(113, 16, 48, 96, count=3, rotated=48, tail=2, dtype="bfloat16"),
    Chunks(27, 8, 192, 256, count=3, rotated=64),
    Chunks(113, 8, 64, 128, tail=4, kept=True),
    Chunks(482, 3, 100, 64, count=13, rotated=20, kept=True, dtype="bfloat16"),
    Chunks(61, 1, 120, 80, count=5, rotated=2, dtype="bfloat16"),
)


def name(case: Heads | Chunks) -> str:
    """The case as the id of a test."""
    values = [f"{key}{value}" for key, value in vars(case).items() if value not in (None, 0, 1)]
    return "-".join(values).replace(" ", "")


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32", scale: float = 1.0) -> jax.Array:
    """Normal numbers of a dtype."""
    return jnp.asarray((scale * rng.standard_normal(shape)).astype(np.float32)).astype(dtype)


def score_inputs(case: Heads) -> dict[str, Any]:
    """Arguments of chunk_scores: one row of the batch and head without any candidate, if there are several."""
    rng, (count,) = np.random.default_rng(case.dim), case.rows
    candidates = rng.random((case.batch, case.kv_heads, count)) < 0.6
    candidates[-1, -1] = False
    candidates[0, 0, 0] = True
    return {
        "q": normal(rng, case.batch, case.queries, case.kv_heads * case.group, case.dim, dtype=case.dtype),
        "landmarks": normal(rng, case.batch, case.kv_heads, count, case.dim, dtype=case.dtype),
        "candidates": jnp.asarray(candidates),
        "scale": case.dim**-0.5,
    }


def attention_inputs(case: Heads) -> dict[str, Any]:
    """Arguments of sparse_attention: masks of several broadcast shapes, and a query that may see nothing."""
    rng, pieces = np.random.default_rng(case.dim), []
    for number, rows in enumerate(case.rows):
        full = (case.batch, case.kv_heads, case.queries, rows)
        shape = (full, (1, 1, full[2], rows), (*full[:2], 1, 1))[number % 3]
        valid = rng.random(shape) < 0.6
        valid[:, :, -1] = valid[:, :, -1] & (case.queries == 1)
        k, v = (normal(rng, case.batch, case.kv_heads, rows, case.dim, dtype=case.dtype) for _ in range(2))
        pieces.append((k, v, jnp.asarray(valid)))
    q = normal(rng, case.batch, case.queries, case.kv_heads * case.group, case.dim, dtype=case.dtype)
    return {"q": q, "pieces": pieces, "scale": case.dim**-0.5}


def factor_inputs(case: Chunks) -> dict[str, Any]:
    """Arguments of reconstruct_keys: ids below and above what exists."""
    rng = np.random.default_rng(case.dim)
    half = (case.dim if case.rotated is None else case.rotated) // 2
    ids = rng.integers(0, case.units + case.tail, (case.batch, case.kv_heads, case.count))
    ids[..., 0], ids[..., 1], ids[..., 2] = -2, case.units + case.tail + 5, case.units + case.tail - 1
    inputs = {
        "left": normal(rng, case.batch, case.units, case.chunk * case.rank, dtype=case.dtype, scale=case.rank**-0.5),
        "right": normal(rng, case.batch, case.kv_heads, case.rank, case.dim, dtype=case.dtype),
        "ids": jnp.asarray(ids, jnp.int32),
        "inverse": jnp.asarray(10_000.0 ** -(np.arange(half) / half), jnp.float32),
    }
    if case.tail:
        shape = (case.batch, case.tail, case.chunk * case.rank)
        inputs["tail"] = normal(rng, *shape, dtype=case.dtype, scale=case.rank**-0.5)
        inputs["tail_unit"] = jnp.asarray(case.units - 1 - np.arange(case.batch), jnp.int32)
    return inputs


def fetch_inputs(case: Chunks) -> dict[str, Any]:
    """Arguments of fetch_reconstruct: values in host memory, of which some need not come."""
    inputs, rng = factor_inputs(case), np.random.default_rng(case.rank)
    lead, width = (case.batch, case.kv_heads), case.chunk * case.dim
    inputs["values"] = on_host(normal(rng, *lead, case.units, width, dtype=case.dtype))
    if case.tail:
        inputs["values_tail"] = on_host(normal(rng, *lead, case.tail + 1, width, dtype=case.dtype))
    if case.kept:
        inputs["kept"] = normal(rng, *inputs["ids"].shape, width, dtype=case.dtype)
        stay = rng.integers(0, 2, inputs["ids"].shape).astype(bool)
        stay[..., 0], stay[..., 1] = True, False
        inputs["stay"] = jnp.asarray(stay)
    return inputs


def on_host(x: jax.Array) -> jax.Array:
    """An array in pinned host memory."""
    return jax.device_put(x, jax.memory.Space.Host)
