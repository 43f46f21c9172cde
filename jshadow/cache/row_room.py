"""The windows of a state whose rows may take a given number of tokens, and a state with other windows.

B is the number of rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.mesh_rows import resize_on_devices
from jshadow.cache.offload import tier_shapes
from jshadow.cache.row_fit import fit
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state_splits import layer_shapes, moves_of, write_splits
from jshadow.errors import CapacityError


def with_room(specs: tuple[CacheSpec, ...], room: int | None) -> tuple[CacheSpec, ...]:
    """Return the specs with windows in which every row can take `room` tokens after its prompt, of any length.

    None: return the specs as they are, so that a row may grow to the capacity.

    Raises:
        CapacityError: room is not an integer of at least 0.
    """
    check_room_size(room)
    if room is None:
        return specs
    windows = [window_with_room(spec.policy, spec.capacity, int(room)) for spec in specs]
    return tuple(dataclasses.replace(spec, window=window) for spec, window in zip(specs, windows, strict=True))


@functools.lru_cache(maxsize=256)
def window_with_room(cache: Any, capacity: int, room: int) -> int:
    """Return the window in which a prompt of any length that fits the capacity can take `room` more tokens.

    A row still holds at most `capacity` tokens. `cache` is the `LayerCache` of a layer.
    """
    return max(cache.window_slots(min(prompt + room, capacity), prompt) for prompt in range(1, capacity + 1))


def check_room_size(room: Any) -> None:
    """Raise CapacityError unless room is None or an integer of at least 0."""
    if room is not None and (isinstance(room, bool) or not isinstance(room, int | np.integer) or room < 0):
        raise CapacityError(f"room must be an integer of at least 0, or None, got {room!r}")


def roomy(state: Any, room: Any) -> Any:
    """Return the result of `KVState.with_room`. The state must not be consumed."""
    return with_windows(state, windows_for(state, room))


def with_windows(state: Any, specs: tuple[CacheSpec, ...]) -> Any:
    """Return a state with the windows of `specs`, as `KVState.with_room` does. The tokens that it holds must fit."""
    _, writes = state.split()
    if specs[0].shards is not None:
        return on_mesh(state, writes, specs)
    layers = []
    for index, ((live, tail), spec) in enumerate(zip(writes.layers, specs, strict=True)):
        like, like_tail = live_shapes(spec, jax.tree.map(lambda leaf, index=index: leaf[index], state.fitted))
        tail = tail and tail.replace(array=resized(tail.array, like_tail.array))
        layers.append((resized(live, like), tail))
    rest = jax.tree.map(lambda leaf: leaf.copy(), writes.replace(layers=()))
    return state.join(rest.replace(layers=tuple(layers))).replace(specs=specs)


def on_mesh(state: Any, writes: Any, specs: tuple[CacheSpec, ...]) -> Any:
    """Return the result of `with_windows` for a state on a mesh."""
    moves = moves_of(writes, specs, None, write_splits)
    assert moves is not None
    shapes = [(like.live, like.host.tail) for like in map(layer_shapes, specs)]
    rest = [
        jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(writes.replace(layers=()))
    ]
    resized = resize_on_devices(writes, (shapes, rest), moves)
    return state.join(resized).replace(specs=specs)


def windows_for(state: Any, room: Any) -> tuple[CacheSpec, ...]:
    """Return the specs of a KVState with the windows of `KVState.with_room`.

    Raises:
        CapacityError: as in `KVState.with_room`.
    """
    check_room_size(room)
    if room is None:
        raise CapacityError("room must be an integer of at least 0, got None")
    held = int(np.max(np.asarray(state.lengths)))
    if held + room > state.capacity:
        raise CapacityError(
            f"room must be at most {state.capacity - held}, as a row holds {held} tokens of "
            f"capacity={state.capacity}, got {room}"
        )
    # A prompt leaves at most so many exact tokens in the window. Tokens after the prompt take slots of their own.
    asked = int(room)
    while True:
        specs = with_room(state.specs, asked)
        missing = int(room) - int(np.min(np.asarray(state.replace(specs=specs).room())))
        if missing <= 0:
            return specs
        asked += missing


def live_shapes(spec: CacheSpec, fitted: Any) -> tuple[Any, Any]:
    """Return the live record of a layer and the array of its host tail, with ShapeDtypeStructs in place of arrays."""
    return unfitted_shapes(spec) if fitted is None else fitted_shapes(spec, fitted)


@functools.lru_cache(maxsize=1024)
def unfitted_shapes(spec: CacheSpec) -> tuple[Any, Any]:
    """Return the result of `live_shapes` for a policy without learned arrays."""
    return fitted_shapes(spec, None)


def fitted_shapes(spec: CacheSpec, fitted: Any) -> tuple[Any, Any]:
    """Return the result of `live_shapes`."""
    layer = jax.eval_shape(lambda fitted: spec.policy.init(spec, fitted), fitted)
    return layer.live, tier_shapes(spec.policy.host_layout(spec), spec).tail


def resized(tree: Any, shapes: Any) -> Any:
    """Return new arrays [B, ...] whose rows are cut or zero-padded to those of `shapes`, a pytree of that structure.

    Only the axes after the first one count in `shapes`. No array of the result shares memory with `tree`.
    """
    leaves, structure = jax.tree.flatten(tree)
    wanted = [shape.shape[1:] for shape in jax.tree.leaves(shapes)]
    changes = [leaf.shape[1:] != shape for leaf, shape in zip(leaves, wanted, strict=True)]
    results = [leaf if change else leaf.copy() for leaf, change in zip(leaves, changes, strict=True)]
    in_host = [leaf.sharding.memory_kind == "pinned_host" for leaf in leaves]
    moved = [index for index, change in enumerate(changes) if change and not in_host[index]]
    fitted = resize([leaves[index] for index in moved], shapes=tuple(wanted[index] for index in moved))
    for index, leaf in zip(moved, fitted, strict=True):
        results[index] = leaf
    for index, change in enumerate(changes):
        if change and in_host[index]:
            rows = fit(np.asarray(leaves[index]), (0, *wanted[index]), np)
            results[index] = jax.device_put(np.array(rows), leaves[index].sharding)
    return jax.tree.unflatten(structure, results)


@functools.partial(jax.jit, static_argnames="shapes")
def resize(leaves: list[Array], shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Return arrays in device memory [B, ...] whose rows are cut or zero-padded to `shapes`."""
    return [fit(leaf, (0, *shape), jnp) for leaf, shape in zip(leaves, shapes, strict=True)]
