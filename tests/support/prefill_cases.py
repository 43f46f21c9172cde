"""Random lists of keys for sparse_prefill, and its result in float64 NumPy, query by query."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_cases import normal
from kernel_truth import softmax, wide
from random_arrays import array

from pallas_kernels import KeyLists, Keys


@dataclass(frozen=True)
class Prompt:
    """Sizes of a case: queries start at block `skipped` of the prompt, and fill `count` blocks of `block`."""

    dim: int
    group: int = 1
    kv_heads: int = 1
    block: int = 64
    count: int = 2
    skipped: int = 0
    lengths: tuple[int, ...] = (128,)
    tokens: int = 128
    dtype: str = "float32"
    masks: bool = False


PROMPTS = (
    Prompt(64),
    Prompt(80, 3, 1, 16, 5, 1, (23, 96), 96),  # padding
    Prompt(96, 4, 1, 16, 4, 0, (64, 50), 64, masks=True),
    Prompt(128, 1, 2, 32, 2, 1, (90,), 90, "bfloat16"),  # keys end within a block
    Prompt(256, 8, 1, 64, 1, 1, (100,), 128, "bfloat16", masks=True),
)


def prefill_inputs(case: Prompt) -> dict[str, Any]:
    """Arguments of sparse_prefill. Each list also has numbers past its count, which nothing may read."""
    rng = np.random.default_rng(case.dim)
    rows, heads, tokens = len(case.lengths), case.group * case.kv_heads, case.tokens
    q = normal(rng, rows, case.count * case.block, heads, case.dim, dtype=case.dtype)
    k, v = (normal(rng, rows, tokens, case.kv_heads, case.dim, dtype=case.dtype) for _ in range(2))
    wide_list, long_list = -(-tokens // case.block), 37
    blocks = np.full((rows, heads, case.count, wide_list), 2**30, np.int32)
    columns = np.full((rows, heads, case.count, long_list), -(2**30), np.int32)
    counts = np.zeros((2, rows, heads, case.count), np.int32)
    for b, h, i in np.ndindex(rows, heads, case.count):
        own = case.skipped + i
        chosen = rng.permutation(own + 1)[: rng.integers(0, own + 2)]
        others = np.setdiff1d(np.arange(min(tokens, (own + 1) * case.block)) // case.block, chosen)
        outside = [key for key in range(min(tokens, (own + 1) * case.block)) if key // case.block in others]
        single = rng.permutation(outside)[: rng.integers(0, long_list + 1)]
        blocks[b, h, i, : len(chosen)], columns[b, h, i, : len(single)] = chosen, single
        counts[:, b, h, i] = len(chosen), len(single)
    masks = [array(rng.random((rows, heads, tokens)) < share) for share in (0.4, 0.1)] if case.masks else []
    lists = KeyLists(*map(array, (blocks, counts[0], columns, counts[1])), *masks)
    keys, first = Keys(k, v, array(case.lengths, np.int32)), array(np.int32(case.skipped * case.block))
    return {"q": q, "keys": keys, "lists": lists, "first": first, "scale": 0.3}


def prefill_truth(q: Any, keys: Keys, lists: KeyLists, first: Any, scale: float, sinks: Any = None) -> np.ndarray:
    """sparse_prefill by its docstring: one block of queries after another."""
    q, k, v = wide(q), wide(keys.k), wide(keys.v)
    lists = KeyLists(*(None if x is None else np.asarray(x) for x in lists))
    block, out, key = q.shape[1] // lists.blocks.shape[2], np.zeros(q.shape), np.arange(k.shape[1])
    for b, h, i in np.ndindex(*lists.blocks.shape[:3]):
        rows, kv = slice(i * block, (i + 1) * block), h // (q.shape[2] // k.shape[2])
        place = int(first) + np.arange(rows.start, rows.stop)[:, None]
        near = np.isin(key // block, lists.blocks[b, h, i, : lists.block_counts[b, h, i]]) & (key <= place)
        if lists.diagonals is not None:
            near &= lists.diagonals[b, h][np.maximum(place - key, 0) % len(key)] | lists.in_column[b, h]
        seen = near | np.isin(key, lists.columns[b, h, i, : lists.column_counts[b, h, i]])
        seen &= (key <= place) & (place < np.asarray(keys.lengths)[b])
        scores = q[b, rows, h] @ k[b, :, kv].T * scale
        out[b, rows, h] = softmax(scores, seen) @ v[b, :, kv]
        if sinks is not None:
            total = np.where(seen, np.exp(scores), 0).sum(axis=1, keepdims=True)
            out[b, rows, h] *= total / (total + np.exp(sinks[h]))
    return out
