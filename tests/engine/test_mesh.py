"""One model over several devices: the same logits, tokens and selections as on one device."""

import mesh_cases
import pytest
from forced_devices import FOUR
from mesh_cases import MESHES, POLICIES

from jshadow.policies import H2O, InfLLM, ShadowKV, StreamingLLM
from jshadow.policies.shadowkv import Quirks

pytestmark = pytest.mark.xdist_group("mesh")
FETCHES = ("resident", "device_put", "zero_copy")
# Every policy on every mesh in one offloaded mode, and ShadowKV in all modes. `whole` has all modes of all policies.
QUICK = {(name, mesh, "device_put") for name in POLICIES for mesh in ("tp2", "tp2_sp2")}
QUICK |= {("shadowkv", mesh, "device_put") for mesh in MESHES} | {("full", mesh, "resident") for mesh in MESHES}
QUICK |= {("shadowkv", "tp2_sp2", fetch) for fetch in FETCHES}


def cases(quick: set[tuple[str, str, str]]) -> list:
    every = [(name, mesh, fetch) for name in POLICIES for mesh in MESHES for fetch in FETCHES]
    offloading = {"quest", "shadowkv", "packed", "shadowkv_plus", "exact"}
    every = [case for case in every if case[0] in offloading or case[2] == "resident" or case in quick]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.whole, id="-".join(case)) for case in every]


@pytest.mark.parametrize(("name", "mesh", "fetch"), cases(QUICK))
def test_a_mesh_gives_the_results_of_one_device(name, mesh, fetch):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, "split", fetch)
    assert seen["logits"] < 1e-4
    assert seen["tokens"]
    assert seen["chosen"]
    assert seen["counters"] == []
    assert seen["sets"] > 0 or name in ("full", "snapkv")


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("tp2_sp2", marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", ["shadowkv", "packed", pytest.param("shadowkv_plus", marks=pytest.mark.whole)])
def test_left_rows_may_lie_everywhere(name, mesh):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, "everywhere", "zero_copy")
    assert seen["logits"] < 1e-4
    assert seen["chosen"]
    assert seen["counters"] == []


FLOWS = {("shadowkv", "tp2_sp2"), ("shadowkv", "data2"), ("full", "sp4"), ("quest", "tp2")}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in FLOWS else pytest.mark.whole, id=f"{name}-{mesh}")
        for name in POLICIES
        for mesh in MESHES
    ],
)
def test_states_are_forked_taken_inserted_and_extended(name, mesh):
    """And get other windows, and share a prompt half."""
    assert max(FOUR.call(mesh_cases.compare_flow, name, mesh, "device_put")) < 1e-4


@pytest.mark.parametrize("mesh", ["tp2", "tp2_sp2"])
def test_a_long_turn_takes_blocks(mesh):
    assert FOUR.call(mesh_cases.long_turn, "shadowkv", mesh) < 1e-4


@pytest.mark.parametrize(
    ("mesh", "policy", "error"),
    [
        ([("tp", 3)], ShadowKV(), "ConfigError: mesh axis tp must divide the 4 KV heads, got tp=3"),
        ([("model", 2)], ShadowKV(), "ConfigError: mesh must have no axes but ('data', 'sp', 'tp'), got ('model',)"),
        ([("tp", 2)], InfLLM(), "ConfigError: mesh must be None for infllm, which is not split over devices"),
        ([("sp", 2)], H2O(), "ConfigError: mesh must have sp=1 for h2o, which cannot split a prompt"),
        ([("sp", 2)], StreamingLLM(), "ConfigError: mesh must have sp=1 for streaming_llm, which cannot split"),
        (
            [("sp", 2)],
            ShadowKV(quirks=Quirks(exact_preload=True), budget=16, outlier_chunks=0),
            "ConfigError: mesh must have sp=1 for shadowkv, which cannot split a prompt, got data=1, sp=2, tp=1",
        ),
    ],
)
def test_what_does_not_fit_a_mesh_is_refused(mesh, policy, error):
    assert FOUR.call(mesh_cases.refused, mesh, policy).startswith(error)


def test_left_is_a_known_place():
    assert FOUR.call(mesh_cases.refused, [("tp", 2)], ShadowKV(), "nowhere").startswith(
        "ConfigError: left must be one of ('split', 'everywhere'), got 'nowhere'"
    )


@pytest.mark.parametrize("mesh", ["tp2_sp2", pytest.param("data2", marks=pytest.mark.whole)])
def test_an_engine_answers_on_a_mesh(mesh):
    assert FOUR.call(mesh_cases.engine_answers, mesh) == [True] * 5
