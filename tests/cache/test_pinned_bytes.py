"""The bytes of arrays in pinned host memory."""

import gc

import jax
import numpy as np
from small_state import small

from jshadow import save_state
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


def test_shards_that_were_read_are_not_counted_again(tmp_path):
    """Counting and saving read the shards of an array. Reading a shard makes a second array of the same memory."""
    params, state = small()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"), memory_kind="pinned_host")
    gc.collect()
    before = pinned_bytes()
    array = jax.device_put(np.zeros((2 * len(jax.devices()), 5), np.float32), place)
    assert [pinned_bytes() - before for _ in range(2)] == [array.nbytes] * 2
    assert sum(shard.data.nbytes for shard in array.addressable_shards) == array.nbytes
    save_state(tmp_path / "state", state, params)
    assert pinned_bytes() - before == array.nbytes
    del array
    assert pinned_bytes() == before
