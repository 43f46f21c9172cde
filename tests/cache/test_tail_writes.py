"""Writing units into the tail of a host tier, in device memory and in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshadow.cache import offload
from jshadow.cache.records import HostArray, HostTier, HostWrite
from pallas_kernels.append_rows.reference import scatter_rows, write_in_turn

SIZES = ((1, 2, 1), (4, 8, 8))  # rows, units of the tail, units that are written


def tail_of(rows, units, memory="device"):
    """A tier whose tail has `units` units of 4 numbers for each of 2 heads, and the extra unit."""
    space = jax.memory.Space.Device if memory == "device" else jax.memory.Space.Host
    return HostTier(None, HostArray(jax.device_put(np.full((rows, 2, units + 1, 4), -1, np.float32), space), memory))


def write_of(rng, rows, units, count, valid):
    """Random units for `count` different places in each row."""
    places = np.stack([rng.permutation(units)[:count] for _ in range(rows)]).astype(np.int32)
    if valid is not None:  # the place of a unit that is not written can be any number
        places = np.where(valid, places, rng.integers(-3, units + 3, places.shape)).astype(np.int32)
    data = rng.standard_normal((rows, 2, count, 4)).astype(np.float32)
    return HostWrite(jnp.asarray(data), jnp.asarray(places), None if valid is None else jnp.asarray(valid))


@pytest.mark.parametrize(
    ("rows", "units", "count"), [(3, 7, 4), *[pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SIZES]]
)
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("some", [False, True])
def test_the_tail_has_the_valid_units_and_no_others(rows, units, count, memory, some):
    write = jax.jit(offload.write, donate_argnums=0)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        valid = rng.random((rows, count)) < 0.5 if some else None
        new = write_of(rng, rows, units, count, valid)
        start, data = np.asarray(new.start), np.asarray(new.data)
        expected = np.full((rows, 2, units, 4), -1.0, np.float32)
        for row in range(rows):
            for unit in range(count):
                if valid is None or valid[row, unit]:
                    expected[row, :, start[row, unit]] = data[row, :, unit]
        written = write(tail_of(rows, units, memory), new)
        assert written.tail.memory == memory
        np.testing.assert_array_equal(np.asarray(written.tail.array)[:, :, :units], expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_scatter_writes_what_single_writes_do(seed):
    """A GPU scatters. On a CPU, rows are written one after another."""
    rng = np.random.default_rng(seed)
    buffer = jnp.asarray(rng.standard_normal((3, 2, 5, 4)), jnp.float32)
    rows = jnp.asarray(rng.standard_normal((3, 2, 2, 4)), jnp.float32)
    slots = jnp.asarray([rng.permutation(8)[:2] for _ in range(3)], jnp.int32)  # 5 to 7 are past the end
    scattered, in_turn = (jax.jit(write)(buffer, rows, slots) for write in (scatter_rows, write_in_turn))
    np.testing.assert_array_equal(scattered, in_turn)


def test_on_a_gpu_one_operation_writes_the_units_of_all_rows():
    """The number of operations must not grow with the rows: each write of a row alone is a kernel."""
    texts = []
    for rows in (2, 20):
        new = write_of(np.random.default_rng(0), rows, 8, 2, np.ones((rows, 2), bool))
        traced = jax.jit(offload.write).trace(tail_of(rows, 8), new)
        texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert [text.count('"stablehlo.scatter"') for text in texts] == [1, 1]
    assert [text.count("stablehlo.dynamic_update_slice") for text in texts] == [0, 0]
