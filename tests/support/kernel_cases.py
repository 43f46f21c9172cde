"""The table of cases of the GPU ops, and their one table of tolerances, by the dtype of what comes out."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from random_arrays import array

TOLERANCE = {dtype: {"rtol": near, "atol": near} for dtype, near in (("float32", 1e-5), ("bfloat16", 1e-2))}


@dataclass(frozen=True)
class Heads:
    """Queries and rows: what scores and attention see."""

    rows: tuple[int, ...]  # chunks, or the rows of each piece
    dim: int
    group: int = 1
    queries: int = 1
    kv_heads: int = 1
    batch: int = 1
    dtype: str = "float32"
    parts: int = 1  # landmarks of a chunk
    bits: int | None = None  # of their numbers; None: numbers of the dtype
    spread: bool = False  # of the keys behind each


@dataclass(frozen=True)
class Chunks:
    """Factors or codes, and values of the same chunks: what reconstruction and fetch see."""

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
    profile: tuple[int, int, int] | None = None  # columns in 8, 4 and 2 bits in place of the rank
    value_bits: int | None = None


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

# Few bits: widths that are no power of two, a part of the profile missing, programs that end past the arrays. In
# float32 positions are small, for an angle may be rounded before it is reduced, or not.
PACKED_SCORES = (
    Heads((61,), 128, group=4, kv_heads=2, dtype="bfloat16", parts=4, bits=4),
    Heads((27,), 64, kv_heads=2, batch=2, parts=4, bits=4),
    Heads((33,), 80, group=8, queries=3, parts=2, bits=8),
    Heads((113,), 96, group=3, dtype="bfloat16", bits=8),
    Heads((19,), 256, group=2, queries=2, dtype="bfloat16", parts=8, bits=4),
    Heads((27,), 64, group=7, queries=10, dtype="bfloat16", parts=4),
    Heads((1,), 64, group=5, parts=3, bits=4),
    Heads((61,), 128, group=4, kv_heads=2, dtype="bfloat16", bits=8, spread=True),
    Heads((35,), 80, group=3, queries=2, parts=2, bits=4, spread=True),
    Heads((27,), 64, kv_heads=2, batch=2, dtype="bfloat16", spread=True),
)

PACKED = (
    Chunks(27, 8, 0, 128, kv_heads=2, tail=3, kept=True, dtype="bfloat16", profile=(5, 22, 28), value_bits=4),
    Chunks(13, 4, 0, 64, count=27, batch=2, kept=True, profile=(16, 64, 64), value_bits=4),
    Chunks(17, 4, 0, 64, kv_heads=2, batch=2, tail=2, kept=True, profile=(0, 64, 0), value_bits=8),
    Chunks(29, 8, 0, 128, count=3, rotated=48, dtype="bfloat16", profile=(0, 32, 64), value_bits=8),
    Chunks(13, 3, 0, 80, count=5, rotated=20, tail=2, dtype="bfloat16", profile=(0, 18, 0), value_bits=8),
    Chunks(11, 3, 0, 80, count=5, kept=True, profile=(0, 18, 0), value_bits=4),
    Chunks(9, 4, 0, 70, count=5, dtype="bfloat16", profile=(4, 8, 0), value_bits=4),
    Chunks(9, 5, 16, 66, count=5, tail=2, kept=True, value_bits=4),
    Chunks(17, 1, 0, 64, count=5, profile=(0, 0, 12)),
    Chunks(9, 8, 24, 64, kept=True, tail=2, value_bits=4),
    Chunks(9, 4, 0, 256, count=5, kept=True, dtype="bfloat16", profile=(3, 0, 0)),
    # Parts of whole pieces, which run in a loop, and parts with bytes left over.
    Chunks(19, 8, 0, 64, batch=2, tail=2, kept=True, dtype="bfloat16", profile=(32, 96, 128), value_bits=4),
    Chunks(13, 3, 0, 80, count=5, rotated=40, dtype="bfloat16", profile=(37, 70, 140), value_bits=4),
)
# Cases of attend_chunks, which keeps no chunks.
ATTENDED = tuple(dataclasses.replace(case, kept=False) for case in (*PACKED, CHUNKS[0], CHUNKS[2], CHUNKS[6]))


def name(case: Any) -> str:
    """The case as the id of a test. A text is its own."""
    if isinstance(case, str):
        return case
    values = [f"{key}{value}" for key, value in vars(case).items() if value not in (None, 0, 1)]
    return "-".join(values).replace(" ", "")


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32", scale: float = 1.0) -> jax.Array:
    """Normal numbers of a dtype."""
    return array((scale * rng.standard_normal(shape)).astype(np.float32), dtype)


def random_bytes(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Any bytes: each is a code, or several."""
    return array(rng.integers(0, 256, shape, np.uint8))


def scale_dtype(dtype: str) -> str:
    """Dtype of the scales beside numbers of a dtype."""
    return "float32" if dtype == "float32" else "float16"


def queries(case: Any, rng: np.random.Generator) -> jax.Array:
    return normal(rng, case.batch, case.queries, case.kv_heads * case.group, case.dim, dtype=case.dtype)


def score_inputs(case: Heads) -> dict[str, Any]:
    """Arguments of chunk_scores: one row of the batch and head without any candidate, if there are several."""
    rng, (count,) = np.random.default_rng(case.dim), case.rows
    candidates = rng.random((case.batch, case.kv_heads, count)) < 0.6
    candidates[-1, -1] = False
    candidates[0, 0, 0] = True
    lead = (case.batch, case.kv_heads, count * case.parts)
    inputs = {"q": queries(case, rng), "candidates": array(candidates), "scale": case.dim**-0.5}
    inputs["landmarks"] = normal(rng, *lead, case.dim, dtype=case.dtype)
    if case.bits is not None:
        steps = (0.5 + rng.random((*lead, 1))) * 2.0 ** (2 - case.bits)
        inputs["landmarks"] = random_bytes(rng, *lead, case.dim * case.bits // 8)
        inputs["landmark_scale"] = array(steps, scale_dtype(case.dtype))
    if case.spread:
        inputs["spread"] = array(0.5 * rng.random((*lead, 1)), scale_dtype(case.dtype))
    return inputs


def attention_inputs(case: Heads) -> dict[str, Any]:
    """Arguments of sparse_attention: masks of several broadcast shapes, and a query that may see nothing."""
    rng, pieces = np.random.default_rng(case.dim), []
    for number, rows in enumerate(case.rows):
        full = (case.batch, case.kv_heads, case.queries, rows)
        valid = rng.random((full, (1, 1, full[2], rows), (*full[:2], 1, 1))[number % 3]) < 0.6
        valid[:, :, -1] = valid[:, :, -1] & (case.queries == 1)
        k, v = (normal(rng, case.batch, case.kv_heads, rows, case.dim, dtype=case.dtype) for _ in range(2))
        pieces.append((k, v, array(valid)))
    return {"q": queries(case, rng), "pieces": pieces, "scale": case.dim**-0.5}


def factor_inputs(case: Chunks) -> dict[str, Any]:
    """Arguments of reconstruct_keys: ids below and above what exists."""
    rng, last = np.random.default_rng(case.dim), case.units + case.tail - 1
    half = (case.dim if case.rotated is None else case.rotated) // 2
    ids = rng.integers(0, last + 1, (case.batch, case.kv_heads, case.count))
    ids[..., :3] = -2, last + 6, last
    inverse = array(10_000.0 ** -(np.arange(half) / half), np.float32)
    inputs: dict[str, Any] = {"ids": array(ids, np.int32), "inverse": inverse} | right_sides(case, rng)
    inputs["left"] = left_rows(case, rng, case.units)
    if case.tail:
        inputs["tail"] = left_rows(case, rng, case.tail)
        inputs["tail_unit"] = array(case.units - 1 - np.arange(case.batch), np.int32)
    return inputs


def left_rows(case: Chunks, rng: np.random.Generator, units: int) -> jax.Array:
    """Left rows of so many chunks."""
    if case.profile is not None:
        width = case.profile[0] + case.profile[1] // 2 + case.profile[2] // 4
        return random_bytes(rng, case.batch, units, case.chunk * width)
    return normal(rng, case.batch, units, case.chunk * case.rank, dtype=case.dtype, scale=case.rank**-0.5)


def right_sides(case: Chunks, rng: np.random.Generator) -> dict[str, Any]:
    """What left rows are multiplied with. For codes: rows of deviation 1 / sqrt(r), each times the step of its code."""
    lead, profile = (case.batch, case.kv_heads), case.profile
    if profile is None:
        return {"right": normal(rng, *lead, case.rank, case.dim, dtype=case.dtype)}
    steps = 4.0 / 2.0 ** np.repeat((8, 4, 2), profile) * sum(profile) ** -0.5
    steps = (steps * (0.5 + rng.random((case.batch, sum(profile))))).astype(np.float32)
    right = array(np.asarray(normal(rng, *lead, sum(profile), case.dim)) * steps[:, None, :, None], case.dtype)
    return {"right": right, "mean": normal(rng, *lead, case.dim, dtype=case.dtype), "profile": profile}


def host_rows(case: Chunks, rng: np.random.Generator, *lead: int) -> jax.Array:
    """Values in host memory: numbers, or words of any codes, the scales of the tokens, and what fills a sector."""
    if case.value_bits is None:
        return on_host(normal(rng, *lead, case.chunk * case.dim, dtype=case.dtype))
    scales = (0.5 + rng.random((*lead, case.chunk))).astype(scale_dtype(case.dtype)).view(np.uint16)
    codes = case.chunk * math.ceil(case.dim * case.value_bits / 16)
    rows = rng.integers(0, 2**16, (*lead, math.ceil((codes + scales.shape[-1]) / 16) * 16), np.uint16)
    rows[..., codes : codes + scales.shape[-1]] = scales
    return on_host(rows)


def fetch_inputs(case: Chunks) -> dict[str, Any]:
    """Arguments of fetch_reconstruct: values in host memory, of which some need not come."""
    inputs, rng, lead = factor_inputs(case), np.random.default_rng(case.rank), (case.batch, case.kv_heads)
    inputs["values"] = host_rows(case, rng, *lead, case.units)
    if case.tail:
        inputs["values_tail"] = host_rows(case, rng, *lead, case.tail + 1)
    if case.value_bits is not None:
        inputs |= {"value_bits": case.value_bits, "value_dtype": case.dtype}
    if case.kept:
        shape = (*lead, case.count)
        places = case.count + 3  # some hold chunks that are not selected
        for field in ("kept_values", "kept_keys"):
            inputs[field] = normal(rng, *lead, places, case.chunk * case.dim, dtype=case.dtype)
        mixed = rng.permuted(np.broadcast_to(np.arange(places), (*lead, places)), axis=2)
        inputs["places"] = array(mixed[..., :-3], np.int32)
        miss = rng.integers(0, 2, shape).astype(bool)
        miss[..., 0], miss[..., 1] = False, True
        miss[0, 0] = np.arange(case.count) > 0  # nearly all
        miss[-1, -1, 2:] = False  # a single one
        inputs["missed"] = array(np.sort(np.where(miss, np.arange(case.count), case.count)), np.int32)
    return inputs


def attend_inputs(case: Chunks) -> dict[str, Any]:
    """Arguments of attend_chunks: three query heads for each KV head."""
    q = normal(np.random.default_rng(1), case.batch, 1, 3 * case.kv_heads, case.dim, dtype=case.dtype)
    return fetch_inputs(case) | {"q": q, "scale": case.dim**-0.5}


def misses(inputs: dict[str, Any]) -> np.ndarray:
    """Which chunks the arguments of fetch_reconstruct ask to fetch and rebuild, bool [B, h_kv, k]."""
    shape = inputs["ids"].shape
    if "missed" not in inputs:
        return np.ones(shape, bool)
    return (np.asarray(inputs["missed"])[..., None] == np.arange(shape[2])).any(axis=2)


def on_host(x: Any) -> jax.Array:
    """An array in pinned host memory."""
    return jax.device_put(np.asarray(x), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
