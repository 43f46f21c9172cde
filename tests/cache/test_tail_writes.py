"""Writing units into the tail of a host tier, in device memory and in host memory."""

import jax
import numpy as np
import pytest
from few import slow
from jax.sharding import SingleDeviceSharding

from jshadow.cache import offload
from jshadow.cache.records import HostArray, HostTier, HostWrite
from pallas_kernels.append_rows.reference import scatter_rows, write_in_turn


def tail_of(rows, units, memory="device"):
    """A tier whose tail has `units` units of 4 numbers for each of 2 heads, and the extra unit."""
    place = SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    return HostTier(None, HostArray(jax.device_put(np.full((rows, 2, units + 1, 4), -1, np.float32), place), memory))


def write_of(rng, rows, units, count, valid):
    """Random units for `count` different places in each row. The place of one that is not written can be any number."""
    places = np.stack([rng.permutation(units)[:count] for _ in range(rows)])
    places = places if valid is None else np.where(valid, places, rng.integers(-3, units + 3, places.shape))
    return HostWrite(rng.standard_normal((rows, 2, count, 4), np.float32), places.astype(np.int32), valid)


@pytest.mark.parametrize(("rows", "units", "count"), [(3, 7, 4), slow((1, 2, 1)), slow((4, 8, 8))])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("some", [False, True])
def test_the_tail_has_the_valid_units_and_no_others(rows, units, count, memory, some):
    write = jax.jit(offload.write, donate_argnums=0)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        valid = rng.random((rows, count)) < 0.5 if some else None
        new, expected = write_of(rng, rows, units, count, valid), np.full((rows, 2, units, 4), -1.0, np.float32)
        for row, unit in np.argwhere(np.ones((rows, count), bool) if valid is None else valid):
            expected[row, :, new.start[row, unit]] = new.data[row, :, unit]
        written = write(tail_of(rows, units, memory), new)
        assert written.tail.memory == memory
        np.testing.assert_array_equal(np.asarray(written.tail.array)[:, :, :units], expected)


def test_a_scatter_writes_what_single_writes_do():
    """A GPU scatters. On a CPU, rows are written one after another."""
    scatter, in_turn = map(jax.jit, (scatter_rows, write_in_turn))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        buffer, rows = (rng.standard_normal((3, 2, count, 4), np.float32) for count in (5, 2))
        slots = np.stack([rng.permutation(8)[:2] for _ in range(3)]).astype(np.int32)  # 5 to 7 are past the end
        np.testing.assert_array_equal(scatter(buffer, rows, slots), in_turn(buffer, rows, slots))


def test_on_a_gpu_one_operation_writes_the_units_of_all_rows():
    """The number of operations must not grow with the rows: each write of a row alone is a kernel."""
    for rows in (2, 20):
        new = write_of(np.random.default_rng(0), rows, 8, 2, np.ones((rows, 2), bool))
        traced = jax.jit(offload.write).trace(tail_of(rows, 8), new)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert [text.count(f"stablehlo.{kind}") for kind in ('scatter"', "dynamic_update_slice")] == [1, 0], rows
