"""Programs that move rows between the arrays of states on a mesh; see rows.py for one device.

Each device moves its own part, inside `jax.shard_map`. Only rows that are split over the axis `data` travel. B is the
number of rows of a state.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jshadow.cache.offload import Space, to_host
from jshadow.cache.row_fit import fit, in_host
from jshadow.cache.shards import Shards
from jshadow.cache.state_splits import Moves
from pallas_kernels import on_host


def take_on_devices(tree: Any, rows: Any, moves: Moves) -> Any:
    """Return new arrays that consist of the given rows of each array [B, ...]."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, take_program(leaves, jnp.asarray(rows, jnp.int32), moves=moves))


@functools.partial(jax.jit, static_argnames="moves")
def take_program(leaves: list[Array], rows: Array, *, moves: Moves) -> list[Array]:
    """Return the arrays of `take_on_devices`."""
    shards, before, after = moves

    def one(leaves: list[Array], rows: Array) -> list[Array]:
        return [
            take_leaf(leaf, rows, first(split) == "data", first(target) == "data")
            for leaf, split, target in zip(leaves, before, after, strict=True)
        ]

    return on_mesh(one, shards, (list(before), PartitionSpec()), list(after))(leaves, rows)


def take_leaf(leaf: Array, rows: Array, split: bool, target: bool) -> Array:
    """Return rows of one array on a device.

    `split` tells whether the array's rows are split over `data`, and `target` whether those of the result are.
    """
    host = in_host(leaf)
    if target:
        count = rows.shape[0] // lax.axis_size("data")
        rows = lax.dynamic_slice_in_dim(rows, lax.axis_index("data") * count, count)
    if host and not split:
        return on_host(pick)(leaf, to_host(rows))
    if split:
        leaf = lax.all_gather(jax.device_put(leaf, Space.Device) if host else leaf, "data", axis=0, tiled=True)
    taken = pick(leaf, rows)
    return to_host(taken) if host else taken


def pick(array: Array, rows: Array) -> Array:
    """Return the given rows of an array."""
    return jnp.take(array, rows, axis=0, mode="clip")


def insert_on_devices(leaves: list[Array], others: list[Array], row: int, moves: Moves) -> list[Array]:
    """Return the arrays [B, ...] with row `row` replaced by those of `others` [1, ...]. `leaves` is consumed."""
    return insert_program(leaves, others, jnp.asarray(row, jnp.int32), moves=moves)


@functools.partial(jax.jit, static_argnames="moves", donate_argnums=0)
def insert_program(leaves: list[Array], others: list[Array], row: Array, *, moves: Moves) -> list[Array]:
    """Return the arrays of `insert_on_devices`. `leaves` is donated."""
    shards, before, _ = moves
    sources = [without_rows(split) for split in before]

    def one(leaves: list[Array], others: list[Array], row: Array) -> list[Array]:
        return [
            insert_leaf(leaf, source, row, first(split) == "data")
            for leaf, source, split in zip(leaves, others, before, strict=True)
        ]

    return on_mesh(one, shards, (list(before), sources, PartitionSpec()), list(before))(leaves, others, row)


def insert_leaf(leaf: Array, source: Array, row: Array, split: bool) -> Array:
    """Return one array of a device with a row replaced. `split` tells whether the rows are split over `data`."""
    source = fit_leaf(source, leaf.shape)
    if not split:
        return lax.dynamic_update_slice_in_dim(leaf, source, row, axis=0)
    own = row - lax.axis_index("data") * leaf.shape[0]
    here = (own >= 0) & (own < leaf.shape[0])
    own = jnp.clip(own, 0, leaf.shape[0] - 1)
    old = lax.dynamic_slice_in_dim(leaf, own, 1, axis=0)
    if in_host(leaf):
        source = on_host(lambda here, new, old: jnp.where(here, new, old))(to_host(here), source, old)
    else:
        source = jnp.where(here, source, old)
    return lax.dynamic_update_slice_in_dim(leaf, source, own, axis=0)


def resize_on_devices(tree: Any, shapes: Any, moves: Moves) -> Any:
    """Return new arrays whose rows are cut or zero-padded.

    Args:
        tree: the arrays [B, ...].
        shapes: a pytree of that structure with the shapes on one device. Only the axes after the first one count.
        moves: how the arrays are split.
    """
    leaves, structure = jax.tree.flatten(tree)
    wanted = tuple(tuple(shape.shape[1:]) for shape in jax.tree.leaves(shapes))
    return jax.tree.unflatten(structure, resize_program(leaves, wanted=wanted, moves=moves))


@functools.partial(jax.jit, static_argnames=("wanted", "moves"))
def resize_program(leaves: list[Array], *, wanted: tuple[tuple[int, ...], ...], moves: Moves) -> list[Array]:
    """Return the arrays of `resize_on_devices`."""
    shards, before, _ = moves

    def one(leaves: list[Array]) -> list[Array]:
        return [fit_leaf(leaf, (0, *shape)) for leaf, shape in zip(leaves, wanted, strict=True)]

    return on_mesh(one, shards, (list(before),), list(before))(leaves)


def fit_leaf(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Cut or zero-pad the rows of an array of a device. Rows in host memory pass through the device."""
    if leaf.shape[1:] == tuple(shape[1:]):
        return leaf
    fitted: Array = fit(jax.device_put(leaf, Space.Device) if in_host(leaf) else leaf, shape, jnp)
    return to_host(fitted) if in_host(leaf) else fitted


def on_mesh(one: Callable[..., Any], shards: Shards, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Return `jax.shard_map` of a function on the mesh."""
    return jax.shard_map(one, mesh=shards.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def first(split: PartitionSpec) -> Any:
    """Return the mesh axis of the rows, or None."""
    return split[0] if len(split) else None


def without_rows(split: PartitionSpec) -> PartitionSpec:
    """Return a PartitionSpec whose rows are not split."""
    return PartitionSpec(None, *split[1:]) if len(split) else split
