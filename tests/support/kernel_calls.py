"""The GPU ops called with flat keyword arguments, as `kernel_cases` and `kernel_truth` have them.

Each call is one program of XLA: without `jax.jit`, every operation of a reference would be one.
"""

import functools
from typing import Any

import jax

import pallas_kernels
from pallas_kernels import ChosenKeys, HostRows, KeptRows, TwoLevels

chunk_scores = jax.jit(pallas_kernels.chunk_scores, static_argnames=("scale", "implementation"))
sparse_attention = jax.jit(pallas_kernels.sparse_attention, static_argnames=("scale", "implementation"))
sparse_prefill = jax.jit(pallas_kernels.sparse_prefill, static_argnames=("scale", "implementation"))


@functools.partial(jax.jit, static_argnames=("profile", "implementation"))
def reconstruct_keys(*, implementation: str = "auto", **arguments: Any) -> Any:
    """Arguments are the fields of ChosenKeys."""
    return pallas_kernels.reconstruct_keys(ChosenKeys(**arguments), implementation=implementation)


@functools.partial(jax.jit, static_argnames=("value_bits", "value_dtype", "profile", "implementation"))
def fetch_reconstruct(
    values: Any,
    *,
    values_tail: Any = None,
    value_bits: int | None = None,
    value_dtype: Any = None,
    kept_values: Any = None,
    kept_keys: Any = None,
    places: Any = None,
    missed: Any = None,
    implementation: str = "auto",
    **arguments: Any,
) -> Any:
    """Arguments are the fields of HostRows and of KeptRows, and those of ChosenKeys."""
    rows = HostRows(values, values_tail, value_bits, value_dtype)
    kept = None if missed is None else KeptRows(kept_values, kept_keys, places, missed)
    return pallas_kernels.fetch_reconstruct(rows, ChosenKeys(**arguments), kept, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("value_bits", "value_dtype", "profile", "scale", "implementation"))
def attend_chunks(
    q: Any,
    values: Any,
    *,
    scale: float,
    values_tail: Any = None,
    value_bits: int | None = None,
    value_dtype: Any = None,
    implementation: str = "auto",
    **arguments: Any,
) -> Any:
    """Arguments are the query, the fields of HostRows, and those of ChosenKeys."""
    rows = HostRows(values, values_tail, value_bits, value_dtype)
    return pallas_kernels.attend_chunks(q, rows, ChosenKeys(**arguments), scale=scale, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("count", "size", "scale", "implementation"))
def level_scores(
    q: Any, scores: Any, *, count: int, size: int, scale: float, implementation: str = "auto", **arguments: Any
) -> Any:
    """Arguments are the fields of TwoLevels."""
    options: dict[str, Any] = {"count": count, "size": size, "scale": scale, "implementation": implementation}
    return pallas_kernels.level_scores(q, scores, TwoLevels(**arguments), **options)
