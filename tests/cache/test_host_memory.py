"""Host memory is checked before allocation; the error names sizes that would fit and how to get more memory."""

import gc
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, TINY, model, setting
from small_state import small

from jshadow import load_state, save_state
from jshadow.cache import host_memory, offload, system_memory
from jshadow.cache.host_memory import Pool, check_host_memory, pinned_bytes
from jshadow.cache.offload import place
from jshadow.cache.records import HostTier
from jshadow.cache.system_memory import GIB, POOL_VARIABLE, PREALLOCATE_VARIABLE
from jshadow.engine import decode
from jshadow.errors import HostMemoryError
from jshadow.planner.bytes import cache_specs


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
    return plan(batch=gib * GIB // offload.host_bytes(plan(batch=1)))


def refusal(*plans) -> str:
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(plans)
    return str(caught.value)


def system_has(monkeypatch, available):
    monkeypatch.setattr(host_memory, "available_memory", lambda: available)


def on_gpu(monkeypatch, *, available: int, taken: int = 0) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(host_memory, "pinned_bytes", lambda: taken)
    system_has(monkeypatch, available)


def test_a_system_tells_what_is_free_or_nothing(monkeypatch):
    free, [total] = system_memory.available_memory(), re.findall(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())
    assert free is not None
    assert 2**20 < free <= int(total) * 1024 == system_memory.total_memory()
    monkeypatch.setattr(system_memory, "open", Mock(side_effect=FileNotFoundError), raising=False)
    assert system_memory.available_memory() is None
    check_host_memory([huge(10**6)])


def test_a_container_s_limit_is_the_least_of_its_groups(tmp_path):
    """Version 2 has one tree, and version 1 one for each kind. A group without a limit says "max", or a huge number."""
    own = tmp_path / "own"
    assert system_memory.group_limit(tmp_path, own) is None
    own.write_text("0::/pods/one\n")
    inner = tmp_path / "pods" / "one"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    assert system_memory.group_limit(tmp_path, own) is None
    (inner.parent / "memory.max").write_text(f"{3 * GIB}\n")
    assert system_memory.group_limit(tmp_path, own) == 3 * GIB
    own.write_text("5:cpu:/pods/one\n4:memory:/job\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    for folder, limit in (("", 2**63 - 4096), ("job", 2 * GIB)):
        (tmp_path / "memory" / folder / "memory.limit_in_bytes").write_text(str(limit))
    assert system_memory.group_limit(tmp_path, own) == 2 * GIB


@pytest.mark.parametrize("name", ["shadowkv", "shadowkv_reference", "shadowkv_plus", "probe"])
def test_what_is_said_to_fit_does(monkeypatch, name):
    """The sizes in the error fit. One row more does not, and neither does a capacity that is 1/16 larger."""
    needed = offload.host_bytes(plan(name))
    for share in (0.9, 0.67, 0.34, 0.2):
        free = int(needed * share)
        system_has(monkeypatch, free)
        message = refusal(plan(name))
        for text in (f"at most {free} bytes", f"got {needed} bytes", f"for 3 rows at capacity={CAPACITY}; "):
            assert text in message
        found = re.search(r"(\d+) rows? at this capacity", message)
        rows, capacity = int(found[1]) if found else 0, int(re.search(r"3 rows at capacity=(\d+) would", message)[1])
        assert rows == int(3 * share)
        assert offload.host_bytes(plan(name, batch=max(rows, 1))) <= free or rows == 0
        assert offload.host_bytes(plan(name, batch=rows + 1)) > free
        assert 0 < offload.host_bytes(plan(name, capacity=capacity)) <= free
        assert offload.host_bytes(plan(name, capacity=capacity + capacity // 16 + 4)) > free


def test_states_count_together_and_resident_ones_ask_for_nothing(monkeypatch):
    resident, one = plan(fetch="resident"), offload.host_bytes(plan())
    system_has(monkeypatch, one)
    check_host_memory([plan(), resident, plan("full")])
    message = refusal(plan(), resident, plan())
    assert f"got {2 * one} bytes" in message
    assert "for 3 rows at capacity=96 in each of 2 states; 1 row at this capacity or 3 rows at capacity=" in message
    system_has(monkeypatch, 10)
    assert refusal(plan()).endswith("; not even a shorter row would fit")
    system_has(monkeypatch, 0)
    check_host_memory([resident, plan("full"), plan("streaming_llm")])
    check_host_memory([])


def test_a_prefill_is_refused_before_it_begins(monkeypatch):
    system_has(monkeypatch, 100)
    begun = sys.modules["jshadow.engine.prefill.whole"]
    monkeypatch.setattr(begun, "embed_prompt", lambda *_, **__: pytest.fail("began"))
    with pytest.raises(HostMemoryError, match=r"got \d+ bytes for 3 rows at capacity=96"):
        run()


POOL = "left in XLA's pinned-host pool (xla_gpu_host_bfc) of"


@pytest.mark.parametrize(
    ("environment", "available", "taken", "fits", "owner"),
    [
        ({}, 1000, 0, 64, POOL),
        ({POOL_VARIABLE: "100"}, 1000, 0, 100, POOL),
        ({POOL_VARIABLE: "many"}, 1000, 0, 64, POOL),
        ({PREALLOCATE_VARIABLE: "true"}, 1000, 0, 16, POOL),
        ({PREALLOCATE_VARIABLE: "0"}, 1000, 0, 64, POOL),
        ({PREALLOCATE_VARIABLE: "1", POOL_VARIABLE: "80"}, 1000, 0, 80, POOL),
        ({}, 1000, 40, 24, POOL),
        ({}, 20, 0, 20, "that the system has available; got"),
    ],
)
def test_the_limit_on_a_gpu(monkeypatch, environment, available, taken, fits, owner):
    """The pool is as large as the environment says. Live arrays take from it. The system may have less."""
    on_gpu(monkeypatch, available=available * GIB, taken=taken * GIB)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_host_memory([huge(fits)])
    message = refusal(huge(fits + 1))
    assert f"at most {fits * GIB} bytes ({fits}.0 GiB) {owner}" in message
    if owner == POOL:
        assert f"live arrays take {f'{taken * GIB} bytes ({taken}.0 GiB)' if taken else '0 bytes'}" in message
        assert "; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, set before jax starts, is its size in GiB; got" in message


def test_what_the_pool_has_taken_it_gives_again(monkeypatch):
    """Memory that the pool once took is not available to the system, but the next state can use it."""
    on_gpu(monkeypatch, available=10 * GIB, taken=60 * GIB)
    with host_memory.placing([plan()]):
        pass
    on_gpu(monkeypatch, available=10 * GIB)  # the state is gone
    check_host_memory([huge(60)])
    on_gpu(monkeypatch, available=3 * GIB, taken=50 * GIB)
    check_host_memory([huge(12)])
    assert "(13.0 GiB) that the system has available; got" in refusal(huge(14))
    on_gpu(monkeypatch, available=10 * GIB, taken=50 * GIB)
    assert "(14.0 GiB) left in XLA's" in refusal(huge(16))
    monkeypatch.undo()  # without a pool, memory goes back to the system
    monkeypatch.setattr(Pool, "taken", 60 * GIB)
    system_has(monkeypatch, 3 * GIB)
    assert f"at most {3 * GIB} bytes" in refusal(huge(4))


# Failures of the runtime


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


@pytest.mark.parametrize(("name", "call"), [("shadowkv", 1), ("shadowkv", 3), ("shadowkv_plus", 6)])
def test_the_runtime_lacks_memory_while_rows_are_placed(monkeypatch, name, call):
    run(name=name)
    gc.collect()
    before, error = pinned_bytes(), exhausted()
    refuse_puts(monkeypatch, "pinned_host", call, error)
    with pytest.raises(HostMemoryError) as caught:
        run(name=name)
    assert caught.value.__cause__ is error
    assert f"host_bytes={offload.host_bytes(plan(name))} for 3 rows at capacity=96" in str(caught.value)
    assert POOL_VARIABLE not in str(caught.value)
    del caught
    error.__traceback__ = None
    gc.collect()
    assert pinned_bytes() == before


def test_on_a_gpu_the_variable_is_named(monkeypatch):
    on_gpu(monkeypatch, available=GIB)
    with pytest.raises(HostMemoryError, match=POOL_VARIABLE), host_memory.placing([plan()]):
        raise exhausted()


@pytest.mark.parametrize(("host", "error"), [(True, HostMemoryError), (False, jax.errors.JaxRuntimeError)])
def test_rows_may_fail_on_their_way(monkeypatch, host, error):
    """Computation and copies are asynchronous. A failure on the device is not reported as lack of host memory."""
    real = jax.block_until_ready

    def wait(tree):
        parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, HostTier))
        if parts and isinstance(parts[0], HostTier) == host:
            raise exhausted()
        return real(tree)

    monkeypatch.setattr(jax, "block_until_ready", wait)
    assert not issubclass(HostMemoryError, jax.errors.JaxRuntimeError)
    with pytest.raises(error):
        run()


def test_other_failures_stay_what_they_are(monkeypatch):
    for memory, fetch, error in (("device", "resident", exhausted()), ("pinned_host", "device_put", exhausted("BUG"))):
        with monkeypatch.context() as patch:
            refuse_puts(patch, memory, 1, error)
            with pytest.raises(jax.errors.JaxRuntimeError) as caught:
                run(fetch)
            assert caught.value is error


def test_loading_lacks_memory(tmp_path, monkeypatch):
    """It asks first. That the device is full is not the host's fault."""
    params, state = small()
    save_state(tmp_path / "state", state, params)
    for memory, kind in (("pinned_host", HostMemoryError), ("device", jax.errors.JaxRuntimeError)):
        with monkeypatch.context() as patch:
            refuse_puts(patch, memory, 1, error := exhausted())
            with pytest.raises(kind) as caught:
                load_state(tmp_path / "state", params)
        if kind is HostMemoryError:
            assert "for 2 rows at capacity=16" in str(caught.value)
        assert error is (caught.value.__cause__ if kind is HostMemoryError else caught.value)
    system_has(monkeypatch, 3)
    with pytest.raises(HostMemoryError, match=r"at most 3 bytes that.*for 2 rows at capacity=16; not even"):
        load_state(tmp_path / "state", params)


def test_the_tail_of_a_tier_begins_as_zeros():
    """The tail is created in host memory, because the device may have no room for it."""
    for spec in plan("probe")[1:]:
        tail = place(spec.policy.host_layout(spec), spec, None).tail.array
        assert not np.asarray(tail).any()
        assert tail.sharding.memory_kind == "pinned_host"


# The bytes of arrays in pinned host memory


def test_pinned_bytes_are_those_of_live_arrays():
    _, state = small()
    gc.collect()  # arrays of earlier tests
    before = pinned_bytes()
    fork = state.take([0, 1])
    tier = [layer.host.prompt.array for layer in fork.layers]
    assert pinned_bytes() >= before + sum(array.nbytes for array in tier) > before
    held = pinned_bytes()
    del fork
    assert pinned_bytes() == held  # `tier` still refers to its arrays
    del tier
    assert pinned_bytes() == before


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
