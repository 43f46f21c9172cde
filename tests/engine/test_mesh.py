"""One model over several devices: the same logits, tokens and selections as on one device."""

import json

import mesh_cases
import pytest
from few import quick
from forced_devices import FOUR
from mesh_cases import POLICIES, meshes_of
from several_processes import SUPPORT, ended, start_all
from several_processes import no_survivors as no_survivors

from jshadow.policies import H2O, InfLLM, ShadowKV, StreamingLLM
from jshadow.policies.shadowkv import Quirks

# All tests but one call functions in the one process with four devices. It compiles for itself, and its programs and
# seconds are not counted here.
pytestmark = [pytest.mark.xdist_group("mesh"), pytest.mark.process]
FETCHES = ("resident", "device_put", "zero_copy")
OFFLOADING = ("quest", "rocketkv", "rocketkv_kvzip", "shadowkv", "packed", "shadowkv_plus", "plus_int4", "exact")
OFFLOADING += ("channel",)

# Each policy on each mesh, and in each fetch mode on a mesh of both kinds.
QUICK = (("shadowkv", "tp2_sp2", "device_put"), ("quest", "data2", "device_put"))
CASES = [(name, mesh, "device_put") for name in POLICIES for mesh in meshes_of(name)]
CASES += [(name, "tp2_sp2", fetch) for name in OFFLOADING for fetch in FETCHES[::2] if "tp2_sp2" in meshes_of(name)]
CASES += [("full", "sp4", "resident"), ("shadowkv_plus", "tp4", "zero_copy"), ("snapkv", "data2", "resident")]


@pytest.mark.parametrize(("name", "mesh", "fetch"), quick(QUICK, CASES))
def test_a_mesh_gives_the_results_of_one_device(name, mesh, fetch):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, "split", fetch)
    assert seen["logits"] < 1e-4
    assert seen["tokens"]
    assert seen["chosen"]
    assert seen["counters"] == []
    assert seen["sets"] > 0 or name not in OFFLOADING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("shadowkv", "tp2"), ("packed", "tp2_sp2"), ("shadowkv_plus", "tp2"), ("shadowkv_plus", "tp2_sp2")],
)
def test_left_rows_may_lie_everywhere(name, mesh):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, "everywhere", "zero_copy")
    assert seen["logits"] < 1e-4
    assert seen["chosen"]
    assert seen["counters"] == []


FLOWS = [("shadowkv", "tp2_sp2"), ("full", "sp4"), ("quest", "tp2"), ("packed", "tp4"), ("shadowkv_plus", "sp4")]
FLOWS += [("snapkv", "tp2_sp2"), ("shadowkv", "data2")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), FLOWS)
def test_states_are_forked_taken_inserted_and_extended(name, mesh):
    """And get other windows, and share a prompt half."""
    assert max(FOUR.call(mesh_cases.compare_flow, name, mesh, "device_put")) < 1e-4


@pytest.mark.slow
def test_a_long_turn_takes_blocks():
    assert FOUR.call(mesh_cases.long_turn, "shadowkv", "tp2_sp2") < 1e-4


PRELOADED = ShadowKV(quirks=Quirks(exact_preload=True), budget=16, outlier_chunks=0)
OF_PROMPT = "mesh must have sp=1 for"


@pytest.mark.parametrize(
    ("axis", "size", "policy", "left", "error"),
    [
        ("tp", 3, ShadowKV(), "split", "mesh axis tp must divide the 4 KV heads, got tp=3"),
        ("model", 2, ShadowKV(), "split", "mesh must have no axes but ('data', 'sp', 'tp'), got ('model',)"),
        ("tp", 2, InfLLM(), "split", "mesh must be None for infllm, which is not split over devices"),
        ("sp", 2, H2O(), "split", f"{OF_PROMPT} h2o, which cannot split a prompt"),
        ("sp", 2, StreamingLLM(), "split", f"{OF_PROMPT} streaming_llm, which cannot split"),
        ("sp", 2, PRELOADED, "split", f"{OF_PROMPT} shadowkv, which cannot split a prompt, got data=1, sp=2, tp=1"),
        ("tp", 2, ShadowKV(), "nowhere", "left must be one of ('split', 'everywhere'), got 'nowhere'"),
    ],
)
def test_what_does_not_fit_a_mesh_is_refused(axis, size, policy, left, error):
    assert FOUR.call(mesh_cases.refused, [(axis, size)], policy, left).startswith(f"ConfigError: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2_sp2", "data2"])
def test_an_engine_answers_on_a_mesh(mesh):
    assert FOUR.call(mesh_cases.engine_answers, mesh) == [True] * 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "loki", "shadowkv"])
def test_a_budget_may_have_more_units_than_a_device(name):
    difference, counted = FOUR.call(mesh_cases.few_units, "sp4", name)
    assert difference < 1e-4
    assert counted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("shadowkv", "tp2_sp2"), ("full", "data2"), ("shadowkv_plus", "tp2")])
def test_speculation_changes_no_token(name, mesh):
    assert FOUR.call(mesh_cases.speculated, name, mesh) == [True] * 3


@pytest.mark.slow
def test_a_mesh_is_not_verified_and_sliding_layers_have_their_window_on_every_device():
    told = FOUR.call(mesh_cases.verified, "tp2")
    assert told == "StateMismatch: verify needs a state on one device, got one on a mesh"
    assert FOUR.call(mesh_cases.sliding, "tp2_sp2") < 1e-4


# The devices of two processes

FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_enable_concurrency_optimized_scheduler=false"
COMPILE_SECONDS = 540  # under the limit of a test
BY_TWO = ["shadowkv:sp=2,tp=2:device_put", "packed:tp=4:device_put", "shadowkv_plus:data=2,tp=2:zero_copy"]


@pytest.mark.slow
def test_two_processes_give_the_results_of_one_device():
    """Heads in a process and chunks between the processes, and heads or rows over all devices."""
    folders = (SUPPORT.parents[1], SUPPORT, SUPPORT.parent, SUPPORT.parent / "laws" / "oracle")
    path = ":".join(map(str, folders))
    running = start_all(2, [SUPPORT / "joined_model.py", *BY_TWO], XLA_FLAGS=FLAGS, PYTHONPATH=path)
    results = [ended(process, COMPILE_SECONDS) for process in running]
    assert [status for status, _, _ in results] == [0, 0], results[0][2][-3000:] + results[1][2][-3000:]
    told = json.loads(next(line for line in results[0][1].splitlines() if line.startswith("{")))
    assert list(told) == BY_TWO
    assert max(max(differences) for differences in told.values()) < 1e-4
