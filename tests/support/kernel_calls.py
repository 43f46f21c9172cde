"""The GPU ops called with flat keyword arguments, as `kernel_cases` and `kernel_truth` have them."""

from typing import Any

import pallas_kernels
from pallas_kernels import ChosenKeys, HostRows, KeptRows, TwoLevels

chunk_scores = pallas_kernels.chunk_scores
sparse_attention = pallas_kernels.sparse_attention


def reconstruct_keys(*, implementation: str = "auto", **arguments: Any) -> Any:
    """Arguments are the fields of ChosenKeys."""
    return pallas_kernels.reconstruct_keys(ChosenKeys(**arguments), implementation=implementation)


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


def level_scores(
    q: Any, scores: Any, *, count: int, size: int, scale: float, implementation: str = "auto", **arguments: Any
) -> Any:
    """Arguments are the fields of TwoLevels."""
    options: dict[str, Any] = {"count": count, "size": size, "scale": scale, "implementation": implementation}
    return pallas_kernels.level_scores(q, scores, TwoLevels(**arguments), **options)
