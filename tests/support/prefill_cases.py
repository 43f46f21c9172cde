"""Random lists of keys for sparse_prefill, and its result in float64 NumPy, query by query."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from kernel_cases import normal
from kernel_truth import softmax, wide
from random_arrays import array

from pallas_kernels import KeyLists, Keys


class Prompt(NamedTuple):
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


def inputs_of(case: Prompt) -> dict[str, Any]:
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
    lists = KeyLists(*map(jnp.asarray, (blocks, counts[0], columns, counts[1])), *masks)
    return {
        "q": q,
        "keys": Keys(k, v, array(case.lengths, np.int32)),
        "lists": lists,
        "first": array(np.int32(case.skipped * case.block)),
        "scale": 0.3,
    }


def truth(q: Any, keys: Keys, lists: KeyLists, first: Any, scale: float) -> np.ndarray:
    """sparse_prefill by its docstring: one query after another."""
    q, k, v, first, lengths = wide(q), wide(keys.k), wide(keys.v), int(first), np.asarray(keys.lengths)
    lists = KeyLists(*(None if x is None else np.asarray(x) for x in lists))
    rows, length, heads, _ = q.shape
    block, out = length // lists.blocks.shape[2], np.zeros(q.shape)
    for b, h, t in np.ndindex(rows, heads, length):
        i, place, kv = t // block, first + t, h // (heads // k.shape[2])
        if place >= lengths[b]:
            continue
        seen = [int(x) for x in lists.columns[b, h, i, : int(lists.column_counts[b, h, i])]]
        for number in lists.blocks[b, h, i, : int(lists.block_counts[b, h, i])]:
            near = range(int(number) * block, min((int(number) + 1) * block, place + 1))
            if lists.diagonals is not None:
                on_line, in_column = lists.diagonals[b, h], lists.in_column[b, h]
                near = [x for x in near if on_line[place - x] or in_column[x]]
            seen += near
        seen = [x for x in seen if x <= place]
        if seen:
            out[b, t, h] = softmax(k[b, seen, kv] @ q[b, t, h] * scale) @ v[b, seen, kv]
    return out
