"""Full attention of one token by our kernel, by JAX and by torch. It shows if full attention is a fair baseline."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gpu.runner import NotHere, Runner, Task, brief
from gpu.sizes import Sizes
from gpu.synthetic import free, on_device
from gpu.timing import build, series
from jshadow.evaluation.speed import Shape, random_step
from jshadow.ops.attention import Piece, attend

CALLS = 8
OURS = "sparse_attention"


def ours(q: Array, k: Array, v: Array) -> Array:
    """Compute full attention as a decode step of this library does. q is [B, 1, h_q, d], k and v [B, h_kv, n, d]."""
    return attend(q, [Piece(k, v, jnp.ones((1, 1, 1, k.shape[2]), bool))], q.shape[3] ** -0.5)


def library(q: Array, k: Array, v: Array, *, implementation: str) -> Array:
    """Compute full attention by jax.nn. k and v are [B, n, h_kv, d]."""
    lengths = jnp.full(q.shape[0], k.shape[1], jnp.int32)
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation=implementation)


def grouped(q: Array, k: Array, v: Array, *, implementation: str) -> Array:
    """Compute full attention by jax.nn, with the query heads of a KV head in place of several tokens."""
    batch, _, heads, dim = q.shape
    rows = q.reshape(batch, k.shape[2], heads // k.shape[2], dim).swapaxes(1, 2)
    out = library(rows, k, v, implementation=implementation)
    return out.swapaxes(1, 2).reshape(q.shape)


WAYS = {
    OURS: ours,
    "jax.nn, XLA": functools.partial(library, implementation="xla"),
    "jax.nn, cuDNN": functools.partial(library, implementation="cudnn"),
    "jax.nn, cuDNN, grouped queries": functools.partial(grouped, implementation="cudnn"),
}


def measured(sizes: Sizes, capacity: int, batch: int) -> dict[str, Any]:
    """Return the milliseconds of each way that this machine has, and why it does not have the others."""
    config = sizes.layer_config
    q = random_step(Shape(capacity, batch, config.q_heads, config.kv_heads, config.head_dim), 1).q_post
    row: dict[str, Any] = {
        "capacity": capacity,
        "batch": batch,
        "bytes": 2 * 2 * batch * config.kv_heads * capacity * config.head_dim,
        "milliseconds": {},
        "not_available": {},
    }
    for name, function in WAYS.items():
        order = (batch, config.kv_heads, capacity) if name == OURS else (batch, capacity, config.kv_heads)
        try:
            row["milliseconds"][name] = timed(sizes, function, q, (*order, config.head_dim))
        except Exception as error:
            if name == OURS:
                raise
            row["not_available"][name] = brief(error)
    return row


def timed(sizes: Sizes, function: Any, q: Array, shape: tuple[int, ...]) -> float:
    """Return the milliseconds of one way with keys and values of a shape."""
    k, v = (on_device(seed, 1.0, shape) for seed in (1, 2))
    try:
        program = build(function, q, k, v).program
        return 1e3 * series(lambda: program(q, k, v), CALLS, sizes.repeats).median
    finally:
        free(k, v)


def torch_row(found: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the row that the process with torch measured.

    Raises:
        NotHere: torch or its CUDA device is missing.
    """
    if "rows" not in found:
        raise NotHere(found.get("not_available", "the process with torch was not started"))
    row: dict[str, Any] = {"torch": found["torch"]} | found["rows"][index]
    return row


def tasks(sizes: Sizes, runner: Runner) -> Iterator[Task]:
    """Yield two tasks for each context: one for JAX, and one for what torch measured before JAX started."""
    for index, (capacity, batch) in enumerate(zip(sizes.capacities, sizes.dense_batch, strict=True)):
        size = f"{batch} x {capacity:,}"
        yield Task(
            f"full attention, {size}", 0 if sizes.dry else 15, functools.partial(measured, sizes, capacity, batch)
        )
        run = functools.partial(torch_row, runner.results.get("torch", {}), index)
        yield Task(f"full attention, torch, {size}", 0, run)
