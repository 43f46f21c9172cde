"""Where the arrays of a saved state lie on devices, and their parts on the devices of this process."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding

from jshadow.cache.records import HostArray, LayerState
from jshadow.cache.rows import layer_shapes, layer_splits
from jshadow.cache.spec import CacheSpec, Shards, local_spec, whole_shape
from jshadow.cache.state import KVState
from jshadow.engine.mesh.checks import check_shards
from jshadow.engine.saved.leaves import is_place
from jshadow.engine.saved.slices import Place, cut, padded, place_of, sizes, whole, within
from jshadow.weights.digest import host_array


def on_devices(state: KVState, shards: Shards | None) -> KVState:
    """Return a state with ShapeDtypeStructs that have shardings, as it lies on a mesh.

    Args:
        state: the state on one device, with ShapeDtypeStructs in place of arrays.
        shards: how its arrays are split. None: they lie on one device, and the result is `state`.

    Raises:
        ConfigError: a layer's cache cannot run on the mesh.
    """
    if shards is None:
        return state
    specs = tuple(local_spec(spec, shards) for spec in state.specs)
    check_shards([specs])
    made: dict[CacheSpec, LayerState] = {}
    for spec in specs:
        alike = dataclasses.replace(spec, layer=None)
        if alike not in made:
            made[alike] = layer_on_devices(alike, shards)
    layers = tuple(made[dataclasses.replace(spec, layer=None)] for spec in specs)
    everywhere = shards.sharding(PartitionSpec())

    def spread(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    others = ("shared", "lengths", "last", "counters", "fitted")
    rest = {name: jax.tree.map(spread, getattr(state, name)) for name in others}
    return state.replace(layers=layers, specs=specs, **rest)


def layer_on_devices(spec: CacheSpec, shards: Shards) -> LayerState:
    """Return a layer's state with ShapeDtypeStructs that have the shapes and shardings of the global arrays."""

    def spread(part: Any, split: Any) -> Any:
        if isinstance(part, HostArray):
            return HostArray(placed(part.array, split.array, part.memory), part.memory)
        return placed(part, split, "device")

    def placed(part: Any, split: PartitionSpec, memory: str) -> jax.ShapeDtypeStruct:
        shape = whole_shape(shards, split, part.shape)
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=shards.sharding(split, memory))

    leaves, structure = jax.tree.flatten(layer_shapes(spec), is_leaf=is_place)
    splits = jax.tree.leaves(layer_splits(spec), is_leaf=lambda node: is_place(node) or is_split(node))
    layer: LayerState = jax.tree.unflatten(structure, map(spread, leaves, splits))
    return layer


def spans_processes(shards: Shards | None) -> bool:
    """Return whether the devices of a mesh belong to several processes."""
    return shards is not None and len({device.process_index for device in shards.mesh.devices.flat}) > 1


def is_split(node: Any) -> bool:
    """Return whether a node of a pytree is a PartitionSpec, which counts as one leaf."""
    return isinstance(node, PartitionSpec)


def put(leaf: Any, shape: tuple[int, ...], memory: str, read: Callable[[Place], np.ndarray]) -> jax.Array:
    """Copy an array to its devices. It is committed to them, so that no step is compiled again.

    Args:
        leaf: the ShapeDtypeStruct of the array. Without a sharding, the array lies on the first device of this process.
        shape: the shape that is read, which may be shorter than `leaf`.
        memory: the memory kind, for a leaf without a sharding.
        read: returns a slice. It is called once for each slice that a device of this process has.
    """
    sharding: Sharding | None = leaf.sharding
    if sharding is None:
        return jax.device_put(read(whole(shape)), SingleDeviceSharding(jax.local_devices()[0], memory_kind=memory))
    parts: dict[Place, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        place = place_of(index, leaf.shape)
        if place not in parts:
            parts[place] = padded(place, shape, leaf.dtype, read)
        return parts[place]

    return jax.make_array_from_callback(leaf.shape, sharding, part)


@dataclasses.dataclass(frozen=True)
class Split:
    """An array that is split over devices, as a file has it.

    Attributes:
        shape: its shape on one device.
        dtype: its dtype.
        parts: the slices that this process writes, each with its array. Together, the processes have every number once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[Place, Any], ...]

    @classmethod
    def of(cls, array: jax.Array, shape: tuple[int, ...]) -> "Split":
        """Return an array of a mesh, without what follows the end of an array of this shape."""
        parts = []
        for shard in array.addressable_shards:
            outer = place_of(shard.index, array.shape)
            place = cut(outer, shape)
            if shard.replica_id == 0 and all(sizes(place)):
                parts.append((outer, shard.data))
        return cls(shape, np.dtype(array.dtype), tuple(parts))

    def pieces(self) -> list[tuple[Place, Callable[[], np.ndarray]]]:
        """Return the slices that this process writes, and for each a function that copies it to the host."""
        return [(cut(outer, self.shape), functools.partial(self.read, outer, data)) for outer, data in self.parts]

    def read(self, outer: Place, data: Any) -> np.ndarray:
        """Copy one of `parts` to the host, in C order, without what follows the end of the array."""
        return np.asarray(host_array(data)[within(cut(outer, self.shape), outer)], order="C")

    def on_host(self) -> np.ndarray:
        """Copy the whole array to the host. This process must have all slices."""
        out = np.empty(self.shape, self.dtype)
        for place, read in self.pieces():
            out[within(place, whole(self.shape))] = read()
        return out

    def copied(self, copy: Callable[[Any], Any]) -> "Split":
        """Return the array with a copy of each part."""
        return dataclasses.replace(self, parts=tuple((place, copy(data)) for place, data in self.parts))


def filled(shape: tuple[int, ...], dtype: Any, fill: int) -> Callable[[Place], np.ndarray]:
    """Return a function that returns slices of an array of one number."""
    return lambda place: np.full(sizes(place), fill, dtype)
