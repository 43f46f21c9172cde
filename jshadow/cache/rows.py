"""Programs that move rows between the arrays of states. Axis 0 of every array is the row.

An array keeps its memory. The programs treat arrays in host memory as `jshadow.cache.offload` requires.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.mesh_rows import insert_on_devices, take_on_devices
from jshadow.cache.offload import to_host
from jshadow.cache.row_fit import fit, in_host
from jshadow.cache.state_splits import Moves
from jshadow.errors import StateMismatch
from pallas_kernels import on_host


def take_rows(tree: Any, rows: Sequence[int], moves: Moves | None = None) -> Any:
    """Return new arrays that consist of the given rows of each array of a pytree. `moves` is given on a mesh."""
    if moves is not None:
        return take_on_devices(tree, rows, moves)
    return taken_from(tree, jnp.asarray(rows, jnp.int32))


def row_numbers(rows: Any, batch: int) -> list[int]:
    """Return numbers of rows as a list.

    Raises:
        StateMismatch: there is none, or one is not an integer in [0, batch).
    """
    try:
        numbers = [operator.index(row) for row in rows]
    except TypeError as error:
        raise StateMismatch(f"rows must be whole numbers, got {rows!r:.80}") from error
    if any(isinstance(row, bool) for row in rows):  # a boolean mask would be read as the rows 0 and 1
        raise StateMismatch(f"rows must be whole numbers, got {rows!r:.80}")
    if not numbers or not all(0 <= row < batch for row in numbers):
        raise StateMismatch(f"rows must be a non-empty list of numbers in [0, {batch}), got {numbers}")
    return numbers


@jax.jit
def taken_from(tree: Any, rows: Array) -> Any:
    """Return the arrays of `take_rows`. `rows` is int32 [n], so all choices of n rows share the program."""

    def pick(array: Array, rows: Array) -> Array:
        return jnp.take(array, rows, axis=0, mode="clip")

    return jax.tree.map(lambda leaf: on_host(pick)(leaf, to_host(rows)) if in_host(leaf) else pick(leaf, rows), tree)


def insert_row(tree: Any, row: int, other: Any, moves: Moves | None = None) -> Any:
    """Return the arrays of a pytree with row `row` replaced by the only row of another. This consumes `tree`.

    A row that is longer than that of `tree` is cut, and a shorter one is filled with zeros. The result reuses the
    memory of `tree`, so no more than a row is allocated.

    Args:
        tree: the arrays, [B, ...] each.
        row: the number of the row.
        other: a pytree of the same structure, with arrays [1, ...].
        moves: how the arrays of `tree` are split on a mesh, or None.
    """
    leaves, structure = jax.tree.flatten(tree)
    # A buffer can be donated only once, and may not be an argument of the same call. Only small arrays are shared.
    kept, donated = {id(leaf) for leaf in leaves}, set[int]()
    others = [leaf.copy() if id(leaf) in kept else leaf for leaf in jax.tree.leaves(other)]
    for place, leaf in enumerate(leaves):
        leaves[place] = leaf.copy() if id(leaf) in donated else leaf
        donated.add(id(leaf))
    if moves is not None:
        return jax.tree.unflatten(structure, insert_on_devices(leaves, others, row, moves))
    others = [fit_host(source, leaf) for leaf, source in zip(leaves, others, strict=True)]
    return jax.tree.unflatten(structure, insert_into(leaves, others, jnp.asarray(row, jnp.int32)))


@functools.partial(jax.jit, donate_argnums=0)
def insert_into(leaves: list[Array], others: list[Array], row: Array) -> list[Array]:
    """Return the arrays of `insert_row`. `row` is int32 [], so all rows share the program. `leaves` is donated."""
    fitted = [fit(source, leaf.shape, jnp) for leaf, source in zip(leaves, others, strict=True)]
    return [
        lax.dynamic_update_slice_in_dim(leaf, source, row, axis=0) for leaf, source in zip(leaves, fitted, strict=True)
    ]


def fit_host(source: Array, like: Array) -> Array:
    """Cut or zero-pad a row in host memory to the shape of the rows of `like`. Return other arrays as they are."""
    if source.sharding.memory_kind != "pinned_host" or source.shape[1:] == like.shape[1:]:
        return source
    return jax.device_put(fit(np.asarray(source), like.shape, np), source.sharding)
