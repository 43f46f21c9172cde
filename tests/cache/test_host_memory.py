"""Host memory is checked before allocation; the error names sizes that would fit and how to get more memory."""

import dataclasses
import gc
import re
import sys

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, TINY, model, prefilled, setting
from small_state import small

from jshadow import load_state, save_state
from jshadow.cache import host_memory, offload
from jshadow.cache.host_memory import GIB, POOL_VARIABLE, PREALLOCATE_VARIABLE, Pool, check_host_memory, pinned_bytes
from jshadow.cache.records import HostTier
from jshadow.engine import decode
from jshadow.errors import HostMemoryError
from jshadow.planner.bytes import cache_specs

OFFLOADING = ("shadowkv", "shadowkv_reference", "shadowkv_plus", "probe")


@pytest.fixture(autouse=True)
def fresh_pool(monkeypatch):
    """The pool is empty, and no environment variable sets its size."""
    monkeypatch.setattr(Pool, "taken", 0)
    monkeypatch.delenv(POOL_VARIABLE, raising=False)
    monkeypatch.delenv(PREALLOCATE_VARIABLE, raising=False)


def plan(name="shadowkv", *, batch=3, capacity=CAPACITY, shortest=5, fetch="device_put"):
    policy = setting(name, "restricted").resolve(TINY, CAPACITY)
    return cache_specs(TINY, policy, batch, capacity, shortest, "float32", fetch)


def huge(gib: int):
    """A plan of about `gib` GiB, by its number of rows. It is never allocated."""
    one = plan(batch=1)
    return plan(batch=gib * GIB // offload.host_bytes(one))


def refusal(plans) -> str:
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(plans)
    return str(caught.value)


def on_gpu(monkeypatch, *, available: int, taken: int = 0) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(host_memory, "available_memory", lambda: available)
    monkeypatch.setattr(host_memory, "pinned_bytes", lambda: taken)


def test_the_system_tells():
    free = host_memory.available_memory()
    assert free is not None
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 2**20 < free <= total


def test_other_systems_tell_otherwise_or_nothing(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(host_memory, "open", missing, raising=False)
    assert host_memory.available_memory() is None
    check_host_memory([huge(10**6)])


@pytest.mark.parametrize("name", OFFLOADING)
@pytest.mark.parametrize("share", [0.9, 0.67, 0.34, 0.2])
def test_what_is_said_to_fit_does(monkeypatch, name, share):
    """The sizes in the error fit. One row more does not, and neither does a capacity that is 1/16 larger."""
    specs = plan(name)
    needed = offload.host_bytes(specs)
    free = int(needed * share)
    monkeypatch.setattr(host_memory, "available_memory", lambda: free)
    message = refusal([specs])
    assert f"at most {free} bytes" in message
    assert f"got {needed} bytes" in message
    assert f"for 3 rows at capacity={CAPACITY}; " in message
    rows, capacity = (
        int(re.search(pattern, message)[1]) if re.search(pattern, message) else 0
        for pattern in (r"(\d+) rows? at this capacity", r"3 rows at capacity=(\d+) would")
    )
    assert rows == int(3 * share)
    assert offload.host_bytes(plan(name, batch=max(rows, 1))) <= free or rows == 0
    assert offload.host_bytes(plan(name, batch=rows + 1)) > free
    assert 0 < offload.host_bytes(plan(name, capacity=capacity)) <= free
    assert offload.host_bytes(plan(name, capacity=capacity + capacity // 16 + 4)) > free


def test_nothing_that_fits(monkeypatch):
    monkeypatch.setattr(host_memory, "available_memory", lambda: 10)
    assert refusal([plan()]).endswith("; not even a shorter row would fit")


def test_states_that_are_made_at_once_count_together(monkeypatch):
    one = offload.host_bytes(plan())
    monkeypatch.setattr(host_memory, "available_memory", lambda: one)
    check_host_memory([plan(), plan(fetch="resident"), plan("full")])
    message = refusal([plan(), plan(fetch="resident"), plan()])
    assert f"got {2 * one} bytes" in message
    assert "for 3 rows at capacity=96 in each of 2 states; 1 row at this capacity or 3 rows at capacity=" in message


def test_resident_states_ask_for_nothing(monkeypatch):
    monkeypatch.setattr(host_memory, "available_memory", lambda: 0)
    check_host_memory([plan(fetch="resident"), plan("full"), plan("streaming_llm")])
    check_host_memory([])


def test_a_prefill_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(host_memory, "available_memory", lambda: 100)
    monkeypatch.setattr(
        sys.modules["jshadow.engine.prefill.partial"], "embed_prompt", lambda *_, **__: pytest.fail("began")
    )
    with pytest.raises(HostMemoryError, match=r"got \d+ bytes for 3 rows at capacity=96"):
        decode.prefill(model(), PROMPT, LENGTHS, setting("shadowkv", "restricted"), capacity=96, fetch="device_put")


@pytest.mark.parametrize(
    ("environment", "gib"),
    [
        ({}, 64),
        ({POOL_VARIABLE: "100"}, 100),
        ({POOL_VARIABLE: "many"}, 64),
        ({PREALLOCATE_VARIABLE: "true"}, 16),
        ({PREALLOCATE_VARIABLE: "0"}, 64),
        ({PREALLOCATE_VARIABLE: "1", POOL_VARIABLE: "80"}, 80),
    ],
)
def test_the_pool_is_as_large_as_the_environment_says(monkeypatch, environment, gib):
    on_gpu(monkeypatch, available=1000 * GIB)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_host_memory([huge(gib)])
    message = refusal([huge(gib + 1)])
    assert f"at most {gib * GIB} bytes ({gib}.0 GiB) left in XLA's pinned-host pool (xla_gpu_host_bfc)" in message
    assert "; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, set before jax starts, is its size in GiB; got" in message


def test_live_arrays_take_from_the_pool(monkeypatch):
    on_gpu(monkeypatch, available=1000 * GIB, taken=40 * GIB)
    check_host_memory([huge(24)])
    message = refusal([huge(30)])
    assert f"at most {24 * GIB} bytes (24.0 GiB) left" in message
    assert f"live arrays take {40 * GIB} bytes (40.0 GiB)" in message


def test_the_system_may_have_less_than_the_pool(monkeypatch):
    on_gpu(monkeypatch, available=20 * GIB)
    assert f"at most {20 * GIB} bytes (20.0 GiB) that the system has available; got" in refusal([huge(30)])


def test_what_the_pool_has_taken_it_gives_again(monkeypatch):
    """Memory that the pool once took is not available to the system, but the next state can use it."""
    on_gpu(monkeypatch, available=10 * GIB, taken=60 * GIB)
    with host_memory.placing([plan()]):
        pass
    on_gpu(monkeypatch, available=10 * GIB)  # the state is gone
    check_host_memory([huge(60)])
    on_gpu(monkeypatch, available=3 * GIB, taken=50 * GIB)
    check_host_memory([huge(12)])
    assert "(13.0 GiB) that the system has available; got" in refusal([huge(14)])
    on_gpu(monkeypatch, available=10 * GIB, taken=50 * GIB)
    assert "(14.0 GiB) left in XLA's" in refusal([huge(16)])


def test_without_a_pool_memory_goes_back_to_the_system(monkeypatch):
    monkeypatch.setattr(Pool, "taken", 60 * GIB)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 3 * GIB)
    assert f"at most {3 * GIB} bytes" in refusal([huge(4)])


def exhausted(text="RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 1073741824 bytes"):
    return jax.errors.JaxRuntimeError(text)


def refuse_puts(monkeypatch, memory: str, call: int, error: Exception) -> None:
    """Make the device_put number `call` (from 1) to that memory kind raise the error."""
    real, calls = jax.device_put, []

    def put(value, place=None, **options):
        if getattr(place, "memory_kind", None) == memory and not isinstance(value, jax.core.Tracer):
            calls.append(place)
            if len(calls) == call:
                raise error
        return real(value, place, **options)

    monkeypatch.setattr(jax, "device_put", put)


def run(fetch="device_put", name="shadowkv"):
    return decode.prefill(model(), PROMPT, LENGTHS, setting(name, "restricted"), capacity=CAPACITY, fetch=fetch)


@pytest.mark.parametrize(("name", "call"), [("shadowkv", 1), ("shadowkv", 3), ("probe", 2), ("shadowkv_plus", 6)])
def test_the_runtime_lacks_memory_while_rows_are_placed(monkeypatch, name, call):
    run(name=name)
    gc.collect()
    before = pinned_bytes()
    error = exhausted()
    refuse_puts(monkeypatch, "pinned_host", call, error)
    with pytest.raises(HostMemoryError) as caught:
        run(name=name)
    assert caught.value.__cause__ is error
    needed = offload.host_bytes(plan(name))
    assert f"host_bytes={needed} for 3 rows at capacity=96" in str(caught.value)
    assert POOL_VARIABLE not in str(caught.value)
    del caught
    error.__traceback__ = None
    gc.collect()
    assert pinned_bytes() == before


def test_on_a_gpu_the_variable_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(HostMemoryError, match=POOL_VARIABLE), host_memory.placing([plan()]):
        raise exhausted()


@pytest.mark.parametrize("late", ["host", "device"])
def test_rows_may_fail_on_their_way(monkeypatch, late):
    """Computation and copies are asynchronous. A failure on the device is not reported as lack of host memory."""
    real = jax.block_until_ready

    def wait(tree):
        host = any(isinstance(x, HostTier) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, HostTier)))
        if jax.tree.leaves(tree) and host == (late == "host"):
            raise exhausted()
        return real(tree)

    monkeypatch.setattr(jax, "block_until_ready", wait)
    with pytest.raises(HostMemoryError if late == "host" else jax.errors.JaxRuntimeError) as caught:
        run()
    assert isinstance(caught.value, HostMemoryError) == (late == "host")


def test_other_failures_stay_what_they_are(monkeypatch):
    for memory, fetch, error in (("device", "resident", exhausted()), ("pinned_host", "device_put", exhausted("BUG"))):
        with monkeypatch.context() as patch:
            refuse_puts(patch, memory, 1, error)
            with pytest.raises(jax.errors.JaxRuntimeError) as caught:
                run(fetch)
            assert caught.value is error


def test_loading_lacks_memory(tmp_path, monkeypatch):
    params, state = small()
    save_state(tmp_path / "state", state, params)
    error = exhausted()
    refuse_puts(monkeypatch, "pinned_host", 1, error)
    with pytest.raises(HostMemoryError, match=r"for 2 rows at capacity=16") as caught:
        load_state(tmp_path / "state", params)
    assert caught.value.__cause__ is error


def test_loading_onto_a_full_device_is_not_the_hosts_fault(tmp_path, monkeypatch):
    params, state = small()
    save_state(tmp_path / "state", state, params)
    error = exhausted()
    refuse_puts(monkeypatch, "device", 1, error)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        load_state(tmp_path / "state", params)
    assert caught.value is error


def test_loading_asks_first(tmp_path, monkeypatch):
    params, state = small()
    save_state(tmp_path / "state", state, params)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 3)
    with pytest.raises(HostMemoryError, match=r"at most 3 bytes that.*for 2 rows at capacity=16; not even"):
        load_state(tmp_path / "state", params)


def test_the_tail_of_a_tier_begins_as_zeros():
    """The tail is created in host memory, because the device may have no room for it."""
    _, state = prefilled("probe", "restricted", "device_put")
    for layer in state.layers[1:]:
        assert not np.asarray(layer.host.tail.array).any()
        assert layer.host.tail.array.sharding.memory_kind == "pinned_host"
    assert dataclasses.asdict(state.specs[1])["fetch"] == "device_put"
