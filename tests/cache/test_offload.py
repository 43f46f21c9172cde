"""The host tier: units written into its tail, what a fetch moves, and the counts of fetched bytes."""

import dataclasses
import re
import types
import warnings

import jax
import numpy as np
import pytest
from aot.compiler import place
from cases import STEPS, TINY, model, prefilled
from few import slow
from jax.sharding import SingleDeviceSharding
from kernel_lowering import TARGET, device_named

from jshadow.cache import accounting, offload
from jshadow.cache.records import HostArray, HostTier, HostWrite, Kept, Selection
from jshadow.cache.spec import HostLayout
from jshadow.engine import decode
from jshadow.engine.step import step_writes
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of, on_backend
from jshadow.planner.machine import abstract_state
from jshadow.policies import ShadowKV
from jshadow.policies.settings import with_settings
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


LLAMA = ModelConfig("llama", 256, 32, 4096, 256, 32, 8, 128, 1e-5, 2**20)


@pytest.mark.parametrize(
    ("values", "backend", "kernels"),
    [
        ("int4", "gpu", ["fetch_reconstruct"]),
        ("model", "gpu", ["fetch_reconstruct"]),
        ("int4", "cpu", ["fetch_reconstruct"]),
        ("model", "cpu", ["reconstruct_keys"]),
    ],
)
def test_a_kernel_reads_resident_values_on_a_gpu(values, backend, kernels):
    """On a GPU, states keep rows, and one kernel fetches the others. A state from a CPU keeps none.

    With exact values, XLA then gathers the values, which needs one kernel beside the one that rebuilds keys.
    """
    policy = with_settings(ShadowKV.packed(), {"values.dtype": values})
    sizes = {"batch": 1, "capacity": 1024, "prompt": 960, "dtype": "bfloat16", "fetch": "resident"}
    state = abstract_state(dataclasses.replace(TINY, context=1024), policy, **sizes)
    state = abstract_of(on_backend(state.specs, backend), state.policy)
    spec, layer = state.specs[0], state.layers[0]
    chosen = jax.ShapeDtypeStruct((1, spec.kv_heads, spec.policy.max_selected(1024)), np.int32)

    def fetch(layer, ids):
        step = types.SimpleNamespace(inverse=np.ones(spec.head_dim // 2, np.float32))
        kept = Kept(layer.live.values, layer.live.keys, ids, ids, ids[..., 0]) if spec.keep else None
        selection = Selection(ids, ids >= 0, rebuild=spec.policy.rebuild(spec, layer, step), kept=kept)
        return offload.fetch(spec, layer.host, selection, spec.policy.host_layout(spec))

    with device_named("NVIDIA H200"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        traced = jax.jit(fetch).trace(layer, chosen)
        on_gpu, on_cpu = (traced.lower(lowering_platforms=(one,)).as_text() for one in ("cuda", "cpu"))
    assert re.findall(r'name = "(\w+)"', on_gpu) == kernels
    assert TARGET not in on_cpu


@pytest.mark.slow
def test_a_turn_that_moves_more_than_four_gibibytes_a_row():
    """Sixteen queries at 262,700 tokens fetch more bytes than 32 bits can count, and the step can be traced."""
    sizes = {"batch": 1, "capacity": 262_700, "prompt": 262_000, "dtype": "bfloat16", "fetch": "device_put"}
    state = abstract_state(LLAMA, ShadowKV(), **sizes)
    tokens, new = jax.ShapeDtypeStruct((1, 16), np.int32), jax.ShapeDtypeStruct((1,), np.int32)
    step = jax.jit(lambda weights, tokens, new, reads, writes: step_writes(weights, LLAMA, tokens, new, reads, writes))
    traced = step.trace(*map(place, (abstract_weights(LLAMA), tokens, new, *state.split()))).out_info
    assert traced[1].counters.fetched.dtype == np.uint32
    assert 32 * 8 * 16 * state.policy.max_selected(262_700) * 8 * 128 * 2 >= 2**32


def test_a_turn_fetches_what_its_real_queries_select():
    """Padded queries and inactive rows fetch nothing, and within a turn no query reuses another query's rows."""
    _, state = prefilled("shadowkv", "restricted", "zero_copy")
    before, new = np.asarray(state.counters.fetched), np.array([7, 1, 0])
    _, state = decode.extend(model(), STEPS[:, :7], new, state, logits="all")
    chunks = np.array([4, 2, 0])  # a budget of 16 tokens; a row of 27 tokens has two chunks that can be selected
    one = TINY.num_layers * TINY.kv_heads * 4 * TINY.head_dim * 4  # bytes of a float32 chunk in all heads and layers
    counted = (np.asarray(state.counters.fetched) - before) * accounting.FETCH_QUANTUM
    assert counted.tolist() == (one * chunks * new).tolist()


def test_missed_chunks_are_counted_beyond_32_bits():
    sizes = {"batch": 2, "capacity": 4096, "prompt": 4000, "dtype": "bfloat16", "fetch": "zero_copy"}
    spec, units = abstract_state(LLAMA, ShadowKV(), **sizes).specs[0], 300_000
    missed = np.broadcast_to(np.arange(units, dtype=np.int32), (2, 8, units)).copy()
    missed[1, :, 1:] = units
    rows = jax.ShapeDtypeStruct((2, 8, units, 1024), "bfloat16")  # 10 GB, never allocated
    count = (missed < units).sum(axis=2)
    selection = Selection(missed, missed < units, kept=Kept(rows, rows, missed, missed, count))  # type: ignore[arg-type]
    layout = HostLayout(heads=8, units=units, unit=8)
    size = offload.unit_bytes(spec, layout)
    counted = jax.jit(accounting.missed_quanta, static_argnums=1)(count.sum(axis=1).astype(np.int32), size)
    assert counted.tolist() == [8 * units * 2048 // 64, 8 * 2048 // 64]
    assert 8 * units * 2048 > 2**32
    assert accounting.fetched_bytes(spec, selection, layout) == 0
