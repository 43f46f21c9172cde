"""What fetch="auto" stands for: the fastest mode that fits, from sizes alone, and on a machine with a GPU."""

import dataclasses
import types

import jax
import pytest
from cases import TINY, model
from jax.sharding import AbstractMesh
from real_shapes import LLAMA_31_8B

import jshadow
from jshadow.cache import host_memory
from jshadow.cache.spec import Shards
from jshadow.cli.generate import notes
from jshadow.engine import placement
from jshadow.engine.options import workload_of
from jshadow.evaluation.speed import Request, mode_of
from jshadow.models.partition import AXES
from jshadow.planner import machine
from jshadow.planner.bytes import Workload
from jshadow.planner.fetch_choice import ModeFigures, choose_fetch
from jshadow.planner.gpu import capacity_plan
from jshadow.planner.gpu_specs import GIB, GPUS, gpu_of_device
from jshadow.planner.limits import MemoryLimits
from jshadow.planner.machine import abstract_state, footprint
from jshadow.policies import Full, Quest, ShadowKV
from jshadow.policies.settings import with_settings

RESIDENT = ModeFigures("resident", 37, 120 * GIB, 0, 2500.0)
GATHERED = ModeFigures("device_put", 37, 60 * GIB, 70 * GIB, 400.0)
KERNEL = ModeFigures("zero_copy", 37, 61 * GIB, 70 * GIB, 1700.0)
REFUSED = ModeFigures("zero_copy", 37, 0, 0, 0.0, "shadowkv with keys='exact'")
MODES = (RESIDENT, GATHERED, KERNEL)
CHOICES = {
    "all fit": (MODES, 130, 80, "resident"),
    "to the byte": (MODES, 120, 70, "resident"),
    "the device is too small": (MODES, 119, 80, "zero_copy"),
    "the host has no limit": (MODES, 119, None, "zero_copy"),
    "no kernel": ((RESIDENT, GATHERED, REFUSED), 119, 80, "device_put"),
    "no kernel, and all fits": ((RESIDENT, GATHERED, REFUSED), 120, 80, "resident"),
    "the host is too small": (MODES, 119, 69, "device_put"),  # nothing fits: the least device memory
    "nothing fits": (MODES, 50, 80, "device_put"),
    "a faster gather": ((RESIDENT, GATHERED._replace(tokens_per_second=1701.0), KERNEL), 119, 80, "device_put"),
    "equally fast": ((GATHERED._replace(tokens_per_second=1700.0), KERNEL), 119, 80, "device_put"),
    "more requests are faster": ((RESIDENT, KERNEL._replace(rows=200, tokens_per_second=2501.0)), 120, 80, "zero_copy"),
    "not one fits on the device": ((RESIDENT._replace(rows=0, device_bytes=9), KERNEL), 120, 80, "zero_copy"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_fastest_mode_that_fits(case):
    modes, device, host, wanted = CHOICES[case]
    limits = MemoryLimits(device * GIB, host and host * GIB)
    choice = choose_fetch(modes, limits)
    assert choice == choose_fetch(modes[::-1], limits)._replace(reason=choice.reason)
    assert choice.fetch == wanted
    assert choice.reason.startswith(f"{wanted}: ")


def test_the_reason_has_the_figures():
    assert choose_fetch(MODES, MemoryLimits(130 * GIB, 80 * GIB)).reason == (
        "resident: 37 requests fit into 120.0 of 130.0 GiB of device memory, predicted 2,500 tokens/s (device_put "
        "predicted 400 tokens/s with 37 requests; zero_copy predicted 1,700 tokens/s with 37 requests)"
    )
    assert choose_fetch((RESIDENT, GATHERED, REFUSED), MemoryLimits(119 * GIB)).reason == (
        "device_put: 37 requests fit into 60.0 of 119.0 GiB of device memory and 70.0 GiB of host memory, predicted "
        "400 tokens/s (resident needs 120.0 of 119.0 GiB of device memory; zero_copy has no kernel for shadowkv with "
        "keys='exact')"
    )
    assert choose_fetch((RESIDENT._replace(rows=1),), MemoryLimits(GIB)).reason == (
        "resident: no mode fits, and this one needs the least device memory (resident needs 120.0 of 1.0 GiB of device "
        "memory)"
    )
    few = MemoryLimits(130 * GIB, 69 * GIB)
    assert "zero_copy needs 70.0 of 69.0 GiB of host memory" in choose_fetch(MODES, few).reason


def planned(policy, fetch="auto", host=None, **settings):
    gpu = dataclasses.replace(GPUS["h200"], **host or {})
    return capacity_plan(LLAMA_31_8B, policy, gpu, Workload(122_880, fetch=fetch, **settings)).chosen


def test_a_plan_takes_the_mode_with_the_most_tokens_a_second():
    small, host = ShadowKV.packed(small=True), {"host_limit": 128 * GIB}
    best = planned(small, host=host)
    given = {mode: planned(small, mode, host) for mode in ("resident", "device_put", "zero_copy")}
    assert best.fetch == max(given, key=lambda mode: given[mode].step.tokens_per_second) == "resident"
    assert dataclasses.replace(best, fetch_reason=None) == given["resident"]
    assert [given[mode].fetch_reason for mode in given] == [None] * 3
    # So many requests do not fit on the device, and a kernel is faster than a gather.
    assert planned(ShadowKV.packed(), batch=30).fetch == planned(small, batch=60).fetch == "zero_copy"
    exact = planned(with_settings(ShadowKV(), {"keys": "exact"}), batch=8)
    assert exact.fetch == "device_put"
    assert "zero_copy has no kernel for shadowkv with keys='exact'" in exact.fetch_reason
    full = planned(Full())
    assert (full.fetch, full.fetch_reason) == ("resident", "resident: full keeps nothing in host memory")

    # Rows of Quest hold keys too, so the host gathers all of them in both modes.
    put, copied = (planned(Quest(), mode, batch=4) for mode in ("device_put", "zero_copy"))
    assert put.step == copied.step
    assert put.step.gather_seconds == put.step.pcie_bytes / 20e9 > put.step.pcie_seconds
    assert (put.repeat_share, copied.repeat_share) == (0, 0)
    assert "quest, which keeps keys beside the values" in planned(Quest(), batch=4).fetch_reason


def test_the_gather_is_a_figure_of_the_caller():
    rates, sizes = (5e9, 5e12), {"fetch": "device_put", "batch": 8}
    slow, fast = (planned(ShadowKV(), **sizes, host={"gather_bytes_per_second": rate}).step for rate in rates)
    assert slow.gather_seconds == pytest.approx(1000 * fast.gather_seconds)
    assert slow.bound_tokens_per_second == pytest.approx(8 / slow.gather_seconds)
    assert fast.bound_tokens_per_second == pytest.approx(8 / fast.pcie_seconds)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, whose free memories a test sets in bytes."""
    memory = types.SimpleNamespace(free=0, host=None)
    limit = lambda: memory.host and host_memory.Limit(memory.host, "there")  # noqa: E731
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(machine, "device_here", lambda: (GPUS["h200"], memory.free))
    monkeypatch.setattr(machine.host_memory, "least_limit", limit)
    return memory


BATCH = workload_of([122_880] * 8, 123_000, "bfloat16")


def modes(batch=BATCH):
    figures = machine.mode_figures(LLAMA_31_8B, ShadowKV(), batch, GPUS["h200"], True)
    return {one.fetch: one for one in figures}


def chosen(policy=None, fetch="auto", batch=BATCH, **options):
    return machine.fetch_here(LLAMA_31_8B, policy or ShadowKV(), batch.with_fetch(fetch), **options)


def test_sizes_decide_on_a_gpu(gpu, monkeypatch):
    sizes = modes()
    assert sizes["resident"].device_bytes > sizes["zero_copy"].device_bytes
    gpu.free = sizes["resident"].device_bytes
    assert chosen().fetch == "resident"
    gpu.free -= 1
    assert chosen().fetch == "zero_copy"
    gpu.host = sizes["zero_copy"].host_bytes
    assert chosen().fetch == "zero_copy"
    assert chosen(with_settings(ShadowKV(), {"keys": "exact"})).fetch == "device_put"
    assert chosen(Full()).fetch == "resident"
    assert chosen(fetch="device_put") == ("device_put", None)
    gpu.free, gpu.host = 2 * sizes["resident"].device_bytes + 1, None
    assert chosen(states=2).fetch == "resident"
    assert chosen(states=2, loading=2).fetch == "zero_copy"
    gpu.free -= 2
    assert chosen(states=2).fetch == "zero_copy"
    gpu.free //= 2
    prompt = {"capacity": 123_000, "prompt": 122_880}
    state = abstract_state(LLAMA_31_8B, ShadowKV(), batch=8, dtype="bfloat16", fetch="auto", **prompt)
    assert state.fetch == "zero_copy"
    assert footprint(LLAMA_31_8B, ShadowKV(), **prompt)["host_bytes"] == 0  # one row fits
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    gpu.free = 60 * GIB
    assert chosen().fetch == "device_put"
    assert "zero_copy has no kernel for a device that is not a GPU" in chosen().reason


def test_benchmarks_ask_for_their_sizes(gpu):
    """Before the weights of the model are on the device."""
    request = Request("no model", 32_768, dtype="bfloat16")
    batch = Workload(32_768, request.capacity - 32_768, 1)
    gpu.free = modes(batch)["resident"].device_bytes + 2 * 8_030_261_248
    assert mode_of(request, LLAMA_31_8B, ShadowKV(), "auto") == "resident"
    gpu.free -= 1
    assert mode_of(request, LLAMA_31_8B, ShadowKV(), "auto") == "zero_copy"


def test_a_device_tells_its_memory(monkeypatch):
    stats = {"bytes_limit": 100 * GIB, "bytes_in_use": 30 * GIB}
    device = types.SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert machine.device_here() == (GPUS["h200"], 70 * GIB - machine.SPARE)
    stats["bytes_in_use"] = 100 * GIB
    assert machine.device_here() == (GPUS["h200"], 0)
    stats.clear()
    assert machine.device_here() == (GPUS["h200"], int(0.75 * GPUS["h200"].memory_bytes) - machine.SPARE)
    device.device_kind, device.memory_stats = "some accelerator", lambda: None
    assert machine.device_here()[0] == machine.UNKNOWN


NAMES = """a100-80gb NVIDIA A100-SXM4-80GB, a100-40gb NVIDIA A100-SXM4-40GB, h100 NVIDIA H100 80GB HBM3,
h100-pcie NVIDIA H100 PCIe, h100-nvl NVIDIA H100 NVL, h200 NVIDIA H200, l40s NVIDIA L40S, l4 NVIDIA L4,
rtx-4090 NVIDIA GeForce RTX 4090, rtx-6000-ada NVIDIA RTX 6000 Ada Generation"""


def test_devices_are_known_by_their_kind():
    for name, kind in (line.strip().split(" ", 1) for line in NAMES.split(",")):
        assert gpu_of_device(kind).name == name, kind
    assert gpu_of_device("NVIDIA GH200 480GB") is gpu_of_device("cpu") is None


def test_several_devices_share_a_call(monkeypatch):
    """A device holds its part. No kernel serves a part of the left rows."""
    shards = {left: Shards(AbstractMesh((2, 4), AXES), left) for left in ("split", "everywhere")}
    one = modes()
    for left, parts in shards.items():
        four = modes(dataclasses.replace(BATCH, batch=2 * BATCH.batch, shards=parts))
        assert bool(four["zero_copy"].refusal) == (left == "split")
        assert four["device_put"].rows == BATCH.batch
        assert four["resident"].device_bytes < one["resident"].device_bytes
        assert 1 <= four["device_put"].host_bytes / (2 * one["device_put"].host_bytes) < 1.01
    monkeypatch.setattr(placement, "shards_of", lambda params, rows: shards["split"])
    monkeypatch.setattr(placement, "fetch_here", lambda config, policy, workload, states: workload.shards)
    assert placement.fetch_for(model(), ShadowKV(), BATCH) == shards["split"]


@pytest.mark.slow
def test_a_generation_runs_in_the_mode_that_was_chosen_and_says_why(monkeypatch):
    """The choice is asked for the sizes with which the state is made. Full attention has one program in all modes."""
    asked = []

    def choose(config, policy, workload, states):
        asked.append((policy, workload))
        auto = machine.FetchChoice("device_put", "device_put: for a test")
        return auto if workload.fetch == "auto" else machine.FetchChoice(workload.fetch, None)

    def generated(prompt=tuple(range(100)), **settings):
        sizes = {"policy": Full(), "capacity": 128} if "state" not in settings else {}
        return jshadow.generate(model(), list(prompt), max_new_tokens=2, **sizes, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(placement, "fetch_here", choose)
        report = generated().report
    assert (report.fetch, report.fetch_reason) == ("device_put", "device_put: for a test")
    resolved = Full().resolve(TINY, 128)
    workload = workload_of([100], 128, "float32")
    assert asked == [(resolved, workload.with_fetch(mode)) for mode in ("auto", "device_put")]
    assert (workload.context, workload.width) == (64, 128)
    out = generated()
    report = out.report
    assert report.fetch == "resident"
    assert report.fetch_reason == "resident: on a CPU, host memory and device memory are the same memory"
    assert report.to_json()["fetch_reason"] == report.fetch_reason
    assert not any("fetch" in sentence for sentence in notes([out]))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert notes([out]) == [f"fetch {report.fetch_reason}."]
    out = generated(fetch="device_put")
    assert out.report.fetch_reason is None
    assert generated([4], state=out.state).report.fetch_reason is None
