"""The time of compressing a prompt, compared with its attention, for one layer (ShadowKV, table 12).

It also measures the eigenvectors of a Gram matrix by each algorithm that JAX has.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gpu.runner import Task, attempt, brief
from gpu.sizes import Sizes
from gpu.synthetic import drawn, free, on_device
from gpu.timing import build, series
from jshadow.engine.prefill.layer import put
from jshadow.ops.attention import causal_attention, whole_attention
from jshadow.planner.pieces import pieces_of
from jshadow.policies.shadowkv.key_codecs.lowrank import key_factors

PIECE = 2048  # tokens of a piece of a prompt, as in `prefill`


def arrays(sizes: Sizes, tokens: int) -> tuple[Any, Any, Any]:
    """Return random queries, keys and values of a prompt. Its rows are not multiples of one another."""
    config = sizes.config
    shapes = ((1, tokens, heads, config.head_dim) for heads in (config.q_heads, config.kv_heads, config.kv_heads))
    q, k, v = (on_device(seed, 1.0, shape) for seed, shape in enumerate(shapes))
    return q, k, v


def in_pieces(q: Any, k: Any, v: Any) -> Any:
    """Compute causal attention piece by piece, as a prefill does where it does not use cuDNN."""
    count, size = pieces_of(q.shape[1], PIECE)

    scale = q.shape[-1] ** -0.5

    def one(index: Any, done: Any) -> Any:
        rows = lax.dynamic_slice_in_dim(q, index * size, size, axis=1)
        return put(done, causal_attention(rows, k, v, scale, index * size)[0], index * size)

    return lax.fori_loop(0, count, one, jnp.zeros_like(q))


def factors(sizes: Sizes, capacity: int, k: Any) -> Any:
    """Compute the Gram matrix of the keys, its eigenvectors, and the left and right factor."""
    rank = sizes.policies["paper"].resolve(sizes.config, capacity).rank
    assert rank is not None
    return key_factors(k, jnp.full(1, k.shape[1], jnp.int32), rank)


def measured(sizes: Sizes, capacity: int) -> dict[str, Any]:
    """Measure the seconds of the factors, of attention in pieces, and on a GPU of fused attention (cuDNN)."""
    tokens = sizes.prompt(capacity) // PIECE * PIECE or sizes.prompt(capacity)
    q, k, v = arrays(sizes, tokens)
    repeats = min(3, sizes.repeats)

    def seconds(count: int, function: Any, *args: Any) -> float:
        program = build(function, *args).program
        return series(lambda: program(*args), 1, count).median

    try:
        ways = {
            "factor_seconds": lambda: seconds(repeats, functools.partial(factors, sizes, capacity), k),
            "attention_seconds": lambda: seconds(1, in_pieces, q, k, v),
        }
        if jax.default_backend() == "gpu":
            ways["fused_attention_seconds"] = lambda: seconds(
                repeats,
                lambda q, k, v: whole_attention(q, k, v, q.shape[-1] ** -0.5, None, "cudnn"),
                q,
                k,
                v,
            )
        return {"tokens": tokens} | {way: attempt(run) for way, run in ways.items()}
    finally:
        free(q, k, v)


def eigenvectors(sizes: Sizes) -> dict[str, Any]:
    """Measure the milliseconds of the eigenvectors of a Gram matrix, by each algorithm."""
    side = sizes.config.key_columns
    rows = drawn(1, 1.0, shape=(2 * side, side), dtype="float32")
    gram = jnp.einsum("sm,sn->mn", rows, rows, precision=lax.Precision.HIGHEST)
    row: dict[str, Any] = {"side": side, "milliseconds": {}, "not_available": {}}
    for way in lax.linalg.EighImplementation:
        try:
            program = build(functools.partial(lax.linalg.eigh, implementation=way), gram).program
            seconds = series(lambda run=program: run(gram), 1, min(3, sizes.repeats)).median
            row["milliseconds"][way.name] = 1e3 * seconds
        except Exception as error:  # not every backend has every algorithm
            row["not_available"][way.name] = brief(error)
    free(rows, gram)
    return row


def tasks(sizes: Sizes) -> Iterator[Task]:
    """Yield one task for each context, shortest first, because attention of a longer one takes four times as long."""
    for capacity in sorted(sizes.capacities):
        needs = 0 if sizes.dry else 15 if capacity < 100_000 else 25
        yield Task(f"compress, {capacity:,}", needs, functools.partial(measured, sizes, capacity))
    yield Task("eigenvectors", 0 if sizes.dry else 10, functools.partial(eigenvectors, sizes))
