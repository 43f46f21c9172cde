"""Writing units into an array that may lie in host memory, one slice at a time.

See `jshadow.cache.offload` for the operations that are safe there. B is the number of rows.
"""

import itertools

import jax
from jax import Array, lax


@jax.custom_batching.custom_vmap
def write_units(array: Array, data: Array, start: Array) -> Array:
    """Write units [B, heads, n, width] into an array [B, heads, U, width], at the places `start`, int32 [B, n]."""
    for row, unit in itertools.product(range(array.shape[0]), range(data.shape[2])):
        one = lax.dynamic_slice(data, (row, 0, unit, 0), (1, data.shape[1], 1, data.shape[3]))
        array = lax.dynamic_update_slice(array, one, (row, 0, start[row, unit], 0))
    return array


@write_units.def_vmap
def write_units_of_many(size: int, batched: list[bool], array: Array, data: Array, start: Array) -> tuple[Array, bool]:
    """Run `write_units` on arrays with one more axis at the front. By itself, vmap would scatter to a host array."""
    assert all(batched), "the tail, the new units and their places belong to a row"
    rows = itertools.product(range(size), range(array.shape[1]), range(data.shape[3]))
    for many, row, unit in rows:
        one = lax.dynamic_slice(data, (many, row, 0, unit, 0), (1, 1, data.shape[2], 1, data.shape[4]))
        array = lax.dynamic_update_slice(array, one, (many, row, 0, start[many, row, unit], 0))
    return array, True
