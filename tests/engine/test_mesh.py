"""One model over several devices: the same logits, tokens and selections as on one device."""

import os

import mesh_cases
import pytest
from forced_devices import FOUR
from mesh_cases import POLICIES, meshes_of

from jshadow.policies import H2O, InfLLM, ShadowKV, StreamingLLM
from jshadow.policies.shadowkv import Quirks

pytestmark = pytest.mark.xdist_group("mesh")
FETCHES = ("resident", "device_put", "zero_copy")
OFFLOADING = (
    "quest",
    "rocketkv",
    "rocketkv_kvzip",
    "shadowkv",
    "packed",
    "shadowkv_plus",
    "plus_int4",
    "exact",
    "channel",
)


QUICK = {
    ("full", "sp4", "resident"),
    ("quest", "tp2_sp2", "device_put"),
    ("snapkv", "data2", "resident"),
    ("tova", "tp2_sp2", "resident"),
    ("rocketkv_kvzip", "tp2", "device_put"),
    ("shadowkv", "tp2_sp2", "device_put"),
    ("packed", "tp2_sp2", "zero_copy"),
    ("shadowkv_plus", "tp4", "zero_copy"),
    ("plus_int4", "tp2_sp2", "device_put"),
}
# Each policy on each mesh, and in each fetch mode on a mesh of both kinds. TESTS=all has all modes on all meshes.
WHOLE = {(name, mesh, "device_put") for name in POLICIES for mesh in meshes_of(name)}
WHOLE |= {(name, "tp2_sp2", fetch) for name in OFFLOADING for fetch in FETCHES if "tp2_sp2" in meshes_of(name)}


def cases() -> list:
    """The cases of TESTS, with those beyond the quick ones marked."""
    every = [(name, mesh, fetch) for name in POLICIES for mesh in meshes_of(name) for fetch in FETCHES]
    chosen = [case for case in every if case in QUICK | WHOLE or os.environ.get("TESTS") == "all"]
    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in chosen]


@pytest.mark.parametrize(("name", "mesh", "fetch"), cases())
def test_a_mesh_gives_the_results_of_one_device(name, mesh, fetch):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, "split", fetch)
    assert seen["logits"] < 1e-4
    assert seen["tokens"]
    assert seen["chosen"]
    assert seen["counters"] == []
    assert seen["sets"] > 0 or name not in OFFLOADING


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) == ("shadowkv", "tp2") else pytest.mark.slow)
        for name in ("shadowkv", "packed", "shadowkv_plus")
        for mesh in ("tp2", "tp2_sp2")
    ],
)
def test_left_rows_may_lie_everywhere(name, mesh):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, "everywhere", "zero_copy")
    assert seen["logits"] < 1e-4
    assert seen["chosen"]
    assert seen["counters"] == []


FLOWS = [("shadowkv", "tp2_sp2"), ("full", "sp4"), ("quest", "tp2"), ("packed", "tp4"), ("shadowkv_plus", "sp4")]
FLOWS += [("snapkv", "tp2_sp2"), ("shadowkv", "data2")]


def flows() -> list:
    """The flows of TESTS. The first one is quick."""
    chosen = (
        [(name, mesh) for name in POLICIES for mesh in meshes_of(name)] if os.environ.get("TESTS") == "all" else FLOWS
    )
    return [pytest.param(*one, marks=() if one == FLOWS[0] else pytest.mark.slow, id="-".join(one)) for one in chosen]


@pytest.mark.parametrize(("name", "mesh"), flows())
def test_states_are_forked_taken_inserted_and_extended(name, mesh):
    """And get other windows, and share a prompt half."""
    assert max(FOUR.call(mesh_cases.compare_flow, name, mesh, "device_put")) < 1e-4


@pytest.mark.parametrize("mesh", ["tp2_sp2", pytest.param("tp2", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("mesh", ["tp2_sp2", pytest.param("data2", marks=pytest.mark.slow)])
def test_an_engine_answers_on_a_mesh(mesh):
    assert FOUR.call(mesh_cases.engine_answers, mesh) == [True] * 5


@pytest.mark.parametrize(
    "name", ["quest", *(pytest.param(name, marks=pytest.mark.slow) for name in ("loki", "shadowkv"))]
)
def test_a_budget_may_have_more_units_than_a_device(name):
    difference, counted = FOUR.call(mesh_cases.few_units, "sp4", name)
    assert difference < 1e-4
    assert counted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("shadowkv", "tp2_sp2"), ("full", "data2"), ("shadowkv_plus", "tp2")])
def test_speculation_changes_no_token(name, mesh):
    assert FOUR.call(mesh_cases.speculated, name, mesh) == [True] * 3


def test_a_mesh_is_not_verified():
    assert (
        FOUR.call(mesh_cases.verified, "tp2") == "StateMismatch: verify needs a state on one device, got one on a mesh"
    )


def test_sliding_layers_have_their_window_on_every_device():
    assert FOUR.call(mesh_cases.sliding, "tp2_sp2") < 1e-4
