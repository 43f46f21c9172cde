"""The arrays of a state: their shapes, their split over a mesh, and the programs that move rows between states.

Axis 0 of every array is the row. An array keeps its memory. The programs treat arrays in host memory as
`jshadow.cache.offload` requires. On a mesh, each device moves its own part, inside `jax.shard_map`, and only rows that
are split over the axis `data` travel.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from jshadow.cache.offload import Space, tier_shapes, to_host
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec, Shards
from jshadow.errors import StateMismatch
from pallas_kernels import on_host

# Shapes and splits


def layer_shapes(spec: CacheSpec, fitted: Any = None) -> LayerState:
    """Return the state of a layer on one device, with ShapeDtypeStructs in place of arrays.

    `fitted` has the arrays that the policy learned for this layer.
    """
    return _unfitted_shapes(spec) if fitted is None else _fitted_shapes(spec, fitted)


@functools.lru_cache(maxsize=1024)
def _unfitted_shapes(spec: CacheSpec) -> LayerState:
    return _fitted_shapes(spec, None)


def _fitted_shapes(spec: CacheSpec, fitted: Any) -> LayerState:
    state = jax.eval_shape(functools.partial(spec.policy.init, spec), fitted)
    shapes: LayerState = state.replace(host=tier_shapes(spec.policy.host_layout(spec), spec))
    return shapes


def layer_splits(spec: CacheSpec) -> LayerState:
    """Return the PartitionSpec of every array of a layer's state, in a LayerState. The spec must have `shards`."""
    return _splits(dataclasses.replace(spec, layer=None))


@functools.lru_cache(maxsize=1024)
def _splits(spec: CacheSpec) -> LayerState:
    """Return the result of `layer_splits`, which is the same for all layers."""
    shards = spec.shards
    assert shards is not None
    kinds = {
        "data": dataclasses.replace(spec, batch=spec.batch + 1),
        "tp": dataclasses.replace(spec, q_heads=2 * spec.q_heads, kv_heads=2 * spec.kv_heads),
        "left": dataclasses.replace(spec, shards=dataclasses.replace(shards, grown=True)),
    }
    grown = {kind: jax.tree.leaves(layer_shapes(more)) for kind, more in kinds.items()}
    leaves, structure = jax.tree.flatten(layer_shapes(spec))

    def split(place: int, leaf: Any) -> PartitionSpec:
        axes: list[Any] = [None] * len(leaf.shape)
        for kind in kinds:
            axis = next((i for i, size in enumerate(grown[kind][place].shape) if size != leaf.shape[i]), None)
            if axis is not None:
                axes[axis] = kind if kind != "left" else "tp" if shards.splits_left else None
        return shards.spec(*axes)

    where: LayerState = jax.tree.unflatten(structure, [split(place, leaf) for place, leaf in enumerate(leaves)])
    return where


class Moves(NamedTuple):
    """How arrays are split on a mesh before and after rows move between them: the PartitionSpec of each array."""

    shards: Shards
    before: tuple[PartitionSpec, ...]
    after: tuple[PartitionSpec, ...]


# Rows that are taken and inserted


def row_numbers(rows: Any, batch: int) -> list[int]:
    """Return numbers of rows as a list."""
    try:
        numbers = [operator.index(row) for row in rows]
    except TypeError as error:
        raise StateMismatch(f"rows must be whole numbers, got {rows!r:.80}") from error
    if any(isinstance(row, bool) for row in rows):  # a boolean mask would be read as the rows 0 and 1
        raise StateMismatch(f"rows must be whole numbers, got {rows!r:.80}")
    if not numbers or not all(0 <= row < batch for row in numbers):
        raise StateMismatch(f"rows must be a non-empty list of numbers in [0, {batch}), got {numbers}")
    return numbers


def take_rows(tree: Any, rows: Sequence[int], moves: Moves | None) -> Any:
    """Return new arrays that consist of the given rows of each array of a pytree. `moves` is None on one device."""
    return taken_from(tree, jnp.asarray(rows, jnp.int32), moves=moves)


@functools.partial(jax.jit, static_argnames="moves")
def taken_from(tree: Any, rows: Array, *, moves: Moves | None = None) -> Any:
    """Return the arrays of `take_rows`. `rows` is int32 [n], so all choices of n rows share the program."""
    if moves is None:
        return jax.tree.map(lambda leaf: _take(leaf, rows), tree)
    leaves, structure = jax.tree.flatten(tree)

    def one(leaves: list[Array], rows: Array) -> list[Array]:
        splits = zip(leaves, moves.before, moves.after, strict=True)
        return [_take(leaf, rows, _by_row(before), _by_row(after)) for leaf, before, after in splits]

    run = _on_mesh(one, moves.shards, (list(moves.before), PartitionSpec()), list(moves.after))
    return jax.tree.unflatten(structure, run(leaves, rows))


def _take(leaf: Array, rows: Array, split: bool = False, target: bool = False) -> Array:
    """Return rows of one array of a device. `split` and `target`: whether its rows and the result's are split."""

    def pick(array: Array, rows: Array) -> Array:
        return jnp.take(array, rows, axis=0, mode="clip")

    host = _in_host(leaf)
    if target:
        count = rows.shape[0] // lax.axis_size("data")
        rows = lax.dynamic_slice_in_dim(rows, lax.axis_index("data") * count, count)
    if host and not split:
        return on_host(pick)(leaf, to_host(rows))
    if split:
        leaf = lax.all_gather(jax.device_put(leaf, Space.Device) if host else leaf, "data", axis=0, tiled=True)
    taken = pick(leaf, rows)
    return to_host(taken) if host else taken


def insert_row(tree: Any, row: int, other: Any, moves: Moves | None) -> Any:
    """Return the arrays of a pytree with row `row` replaced by the only row of another. This consumes `tree`.

    A row that is longer than that of `tree` is cut, and a shorter one is filled with zeros. The result reuses the
    memory of `tree`, so no more than a row is allocated.

    Args:
        tree: the arrays, [B, ...] each.
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
    if moves is None:
        others = [fit_host(source, leaf) for leaf, source in zip(leaves, others, strict=True)]
    return jax.tree.unflatten(structure, insert_into(leaves, others, jnp.asarray(row, jnp.int32), moves=moves))


def fit_host(source: Array, like: Array) -> Array:
    """Cut or zero-pad a row in host memory to the shape of the rows of `like`. Return other arrays as they are."""
    if source.sharding.memory_kind != "pinned_host" or source.shape[1:] == like.shape[1:]:
        return source
    return jax.device_put(_fit(np.asarray(source), like.shape, np), source.sharding)


@functools.partial(jax.jit, static_argnames="moves", donate_argnums=0)
def insert_into(leaves: list[Array], others: list[Array], row: Array, *, moves: Moves | None = None) -> list[Array]:
    """Return the arrays of `insert_row`. `row` is int32 [], so all rows share the program. `leaves` is donated."""
    if moves is None:
        return [_insert(leaf, source, row) for leaf, source in zip(leaves, others, strict=True)]
    splits = list(moves.before)
    sources = [PartitionSpec(None, *split[1:]) if len(split) else split for split in splits]

    def one(leaves: list[Array], others: list[Array], row: Array) -> list[Array]:
        parts = zip(leaves, others, splits, strict=True)
        return [_insert(leaf, source, row, _by_row(split)) for leaf, source, split in parts]

    return _on_mesh(one, moves.shards, (splits, sources, PartitionSpec()), splits)(leaves, others, row)


def _insert(leaf: Array, source: Array, row: Array, split: bool = False) -> Array:
    """Return one array of a device with a row replaced. `split` tells whether the rows are split over `data`."""
    source = _fit_leaf(source, leaf.shape)
    if not split:
        return lax.dynamic_update_slice_in_dim(leaf, source, row, axis=0)
    own = row - lax.axis_index("data") * leaf.shape[0]
    here = (own >= 0) & (own < leaf.shape[0])
    own = jnp.clip(own, 0, leaf.shape[0] - 1)
    old = lax.dynamic_slice_in_dim(leaf, own, 1, axis=0)
    if _in_host(leaf):
        source = on_host(lambda here, new, old: jnp.where(here, new, old))(to_host(here), source, old)
    else:
        source = jnp.where(here, source, old)
    return lax.dynamic_update_slice_in_dim(leaf, source, own, axis=0)


# Rows of another size


def resized(tree: Any, shapes: Any, moves: Moves | None = None) -> Any:
    """Return new arrays [B, ...] whose rows are cut or zero-padded. None shares memory with `tree`.

    Args:
        moves: how the arrays are split on a mesh, or None.
    """
    leaves, structure = jax.tree.flatten(tree)
    wanted = tuple(tuple(shape.shape[1:]) for shape in jax.tree.leaves(shapes))
    if moves is not None:
        return jax.tree.unflatten(structure, resize(leaves, shapes=wanted, moves=moves))
    changes = [leaf.shape[1:] != shape for leaf, shape in zip(leaves, wanted, strict=True)]
    results = [leaf if change else leaf.copy() for leaf, change in zip(leaves, changes, strict=True)]
    in_host = [leaf.sharding.memory_kind == "pinned_host" for leaf in leaves]
    moved = [index for index, change in enumerate(changes) if change and not in_host[index]]
    if moved:
        fitted = resize([leaves[index] for index in moved], shapes=tuple(wanted[index] for index in moved))
        for index, leaf in zip(moved, fitted, strict=True):
            results[index] = leaf
    for index, change in enumerate(changes):
        if change and in_host[index]:
            rows = _fit(np.asarray(leaves[index]), (0, *wanted[index]), np)
            results[index] = jax.device_put(np.array(rows), leaves[index].sharding)
    return jax.tree.unflatten(structure, results)


@functools.partial(jax.jit, static_argnames=("shapes", "moves"))
def resize(leaves: list[Array], shapes: tuple[tuple[int, ...], ...], moves: Moves | None = None) -> list[Array]:
    """Return arrays [B, ...] whose rows are cut or zero-padded to `shapes`, those of one device."""

    def one(leaves: list[Array]) -> list[Array]:
        return [_fit_leaf(leaf, (0, *shape)) for leaf, shape in zip(leaves, shapes, strict=True)]

    if moves is None:
        return one(leaves)
    return _on_mesh(one, moves.shards, (list(moves.before),), list(moves.before))(leaves)


def _fit_leaf(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Cut or zero-pad the rows of an array of a device. Rows in host memory pass through the device."""
    if leaf.shape[1:] == tuple(shape[1:]):
        return leaf
    fitted: Array = _fit(jax.device_put(leaf, Space.Device) if _in_host(leaf) else leaf, shape, jnp)
    return to_host(fitted) if _in_host(leaf) else fitted


def _fit(source: Any, shape: tuple[int, ...], numpy: Any) -> Any:
    """Cut or zero-pad rows [n, ...] to [n, *shape[1:]], with the functions of `numpy` or `jax.numpy`."""
    if source.shape[1:] == shape[1:]:
        return source
    whole = (source.shape[0], *shape[1:])
    cut = source[tuple(slice(0, size) for size in whole)]
    return numpy.pad(cut, [(0, size - there) for size, there in zip(whole, cut.shape, strict=True)])


def _in_host(leaf: Array) -> bool:
    """Return whether an array lies in host memory. It may be traced."""
    return bool(jax.typeof(leaf).memory_space == Space.Host)


def _by_row(split: PartitionSpec) -> bool:
    """Return whether the rows of an array are split over `data`."""
    return bool(len(split)) and split[0] == "data"


def _on_mesh(one: Callable[..., Any], shards: Shards, inputs: Any, outputs: Any) -> Callable[..., Any]:
    return jax.shard_map(one, mesh=shards.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
