"""The copy of a prompt's rows to the host tier, on one device or on each device of a mesh."""

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec, SingleDeviceSharding

from jshadow.cache.offload import memory_of, tier_shapes
from jshadow.cache.records import HostArray, HostTier, HostWrite
from jshadow.cache.shards import Shards, whole_shape
from jshadow.cache.spec import CacheSpec, HostLayout


def place(layout: HostLayout | None, spec: CacheSpec, prompt: HostWrite | None) -> HostTier:
    """Start to copy a layer's prompt rows to the host tier, and return without waiting. The tail is filled with zeros.

    Args:
        layout: the layer's layout, or None if the layer offloads nothing.
        spec: the layer.
        prompt: the rows of the prompt. None: zeros.
    """
    shapes = tier_shapes(layout, spec)
    if spec.shards is not None:
        return place_on_devices(spec.shards, shapes, prompt)
    sharding = SingleDeviceSharding(jax.local_devices()[0], memory_kind=memory_of(spec.fetch))

    def put(shape: HostArray | None, data: Array | np.ndarray | None) -> HostArray | None:
        if shape is None:
            return None
        if shape.memory == "device" and isinstance(data, Array):
            return HostArray(data, shape.memory)
        if data is None:
            data = np.zeros(shape.array.shape, shape.array.dtype)  # NumPy, so that no device memory is used
        return HostArray(jax.device_put(data, sharding), shape.memory)

    return HostTier(put(shapes.prompt, prompt.data if prompt else None), put(shapes.tail, None))


def place_on_devices(shards: Shards, shapes: HostTier, prompt: HostWrite | None) -> HostTier:
    """Start to copy a layer's prompt rows to the memory beside each device of a mesh, as `place` does.

    Args:
        shards: the mesh.
        shapes: the tier of one device, with ShapeDtypeStructs in place of arrays.
        prompt: the rows of the prompt, a global array. None: zeros.
    """

    def put(shape: HostArray | None, data: Array | None, split: PartitionSpec) -> HostArray | None:
        if shape is None:
            return None
        sharding = shards.sharding(split, shape.memory)
        if data is not None:
            return HostArray(jax.device_put(data, sharding), shape.memory)
        whole, one = whole_shape(shards, split, shape.array.shape), shape.array
        zeros = jax.make_array_from_callback(whole, sharding, lambda _: np.zeros(one.shape, one.dtype))
        return HostArray(zeros, shape.memory)

    rows = shards.spec("data", "tp")
    return HostTier(put(shapes.prompt, prompt.data if prompt else None, rows), put(shapes.tail, None, rows))
