"""The bytes of arrays in pinned host memory."""

import gc

import jax
import numpy as np
import pytest
from small_state import small

from jshadow.cache.host_memory import pinned_bytes


def test_pinned_bytes_are_those_of_live_arrays():
    gc.collect()  # arrays of earlier tests
    before = pinned_bytes()
    _, state = small()
    fork = state.take([0, 1])
    tier = [layer.host.prompt.array for layer in fork.layers]
    assert pinned_bytes() >= before + sum(array.nbytes for array in tier) > before
    held = pinned_bytes()
    del fork
    assert pinned_bytes() == held  # `tier` still refers to its arrays
    del tier
    assert pinned_bytes() < held


@pytest.mark.parametrize("axis", ["x", None])
def test_pinned_arrays_are_counted_once_however_often(axis):
    """In an array on a mesh, each shard becomes an array of its own when it is read."""
    gc.collect()
    before, devices = pinned_bytes(), jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis), memory_kind="pinned_host")
    array = jax.device_put(np.zeros((2 * len(devices), 5), np.float32), place)
    copies = 1 if axis else len(devices)
    assert [pinned_bytes() - before for _ in range(3)] == [array.nbytes * copies] * 3
