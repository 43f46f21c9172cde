"""The sizes and the memory of rows of arrays. Axis 0 is the row."""

from typing import Any

import jax
from jax import Array

from jshadow.cache.offload import Space


def in_host(leaf: Array) -> bool:
    """Return whether an array lies in host memory. It may be traced."""
    return bool(jax.typeof(leaf).memory_space == Space.Host)


def fit(source: Any, shape: tuple[int, ...], numpy: Any) -> Any:
    """Cut or zero-pad rows [n, ...] to [n, *shape[1:]], with the functions of `numpy` or `jax.numpy`."""
    if source.shape[1:] == shape[1:]:
        return source
    whole = (source.shape[0], *shape[1:])
    cut = source[tuple(slice(0, size) for size in whole)]
    return numpy.pad(cut, [(0, size - there) for size, there in zip(whole, cut.shape, strict=True)])
