"""One model over several devices, also of two processes: the results and the saved states are those of one device."""

import itertools
import json
import math
import shutil
import threading

import mesh_cases
import pytest
import saved_cases
from few import quick
from forced_devices import FLAGS, FOUR
from mesh_cases import CONVOLUTIONS, HYBRID, POLICIES, STATES, model
from saved_cases import TOKENS
from sealed import parts_of
from several_processes import SUPPORT, ended, reported, start_all
from several_processes import no_survivors as no_survivors

from jshadow import load_state, save_state
from jshadow.engine.saved.state import read_state_info
from jshadow.policies import InfLLM, ShadowKV
from jshadow.weights.convert.safetensors_file import TensorFile

# All tests but those of processes call functions in the one process with four devices. It compiles for itself, and its
# programs and seconds are not counted here.
pytestmark = [pytest.mark.xdist_group("mesh"), pytest.mark.process]
OFFLOADING = ("quest", "rocketkv", "rocketkv_kvzip", "shadowkv", "packed", "shadowkv_plus", "plus_int4", "exact")

# Each policy where rows and heads are split, each that offloads in one of the fetch modes; and the other meshes.
QUICK = (("shadowkv", "data2_tp2", "device_put"), ("quest", "data2", "device_put"))
FETCHES = itertools.cycle(("zero_copy", "resident", "device_put"))
CASES = [*QUICK, ("full", "tp4", "resident"), ("shadowkv_plus", "tp4", "zero_copy"), ("shadowkv", "tp2", "device_put")]
CASES += [(name, "data2_tp2", next(FETCHES) if name in OFFLOADING else "device_put") for name in POLICIES]


def check_steps(name, mesh, left, fetch):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, left, fetch)
    assert seen["logits"] < 1e-4
    assert (seen["tokens"], seen["chosen"], seen["counters"]) == (True, True, [])
    assert seen["sets"] > 0 or name not in OFFLOADING


@pytest.mark.parametrize(("name", "mesh", "fetch"), quick(QUICK, CASES))
def test_a_mesh_gives_the_results_of_one_device(name, mesh, fetch):
    check_steps(name, mesh, "split", fetch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "shadowkv"])
def test_attention_sinks_are_split_like_query_heads(name):
    assert FOUR.call(mesh_cases.sinks_apart, name, "data2_tp2") < 1e-4


HYBRIDS = [(HYBRID, "full", "tp4"), (HYBRID, "shadowkv", "data2_tp2"), (CONVOLUTIONS, "shadowkv", "data2_tp2")]
HYBRIDS.append((STATES, "shadowkv", "tp2"))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "name", "mesh"), HYBRIDS)
def test_recurrent_layers_are_split_by_head(config, name, mesh):
    seen = FOUR.call(mesh_cases.compare_steps, name, mesh, "split", "device_put", config)
    assert seen["logits"] < 1e-4
    assert (seen["tokens"], seen["chosen"], seen["counters"]) == (True, True, [])


@pytest.mark.slow
@pytest.mark.parametrize("config", [HYBRID, CONVOLUTIONS], ids=["hybrid", "convolutions"])
def test_states_of_a_hybrid_are_moved_saved_and_rewound_on_a_mesh(tmp_path, config):
    """Speculation gives back all proposals of this model, whose text does not repeat itself."""
    case = "shadowkv", "data2_tp2"
    assert max(FOUR.call(mesh_cases.compare_flow, *case, "device_put", config)) < 1e-4
    assert FOUR.call(mesh_cases.speculated, *case, config)[:2] == [True] * 2
    found = FOUR.call(saved_cases.one_case, str(tmp_path), *case, "device_put", True, config)
    assert found == {"one device": "none", "itself": "none", "others": [], "logits": True, "compiled": 0}


EVERYWHERE = [("packed", "data2_tp2"), ("shadowkv_plus", "tp2")]
FLOWS = [("shadowkv", "data2_tp2"), ("quest", "tp2"), ("shadowkv_plus", "tp4"), ("snapkv", "data2_tp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), EVERYWHERE)
def test_left_rows_may_lie_everywhere(name, mesh):
    check_steps(name, mesh, "everywhere", "zero_copy")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), FLOWS)
def test_states_are_forked_taken_inserted_and_extended(name, mesh):
    """And get other windows, and share a prompt half."""
    assert max(FOUR.call(mesh_cases.compare_flow, name, mesh, "device_put")) < 1e-4


@pytest.mark.slow
def test_an_engine_answers_on_a_mesh():
    assert FOUR.call(mesh_cases.engine_answers, "data2_tp2") == [True] * 5


@pytest.mark.slow
def test_what_else_a_mesh_does():
    """The window of sliding layers, a turn that takes blocks, a check against another state."""
    assert FOUR.call(mesh_cases.sliding, "data2_tp2") < 1e-4
    assert FOUR.call(mesh_cases.long_turn, "shadowkv", "data2_tp2") < 1e-4
    told = FOUR.call(mesh_cases.verified, "tp2")
    assert told == "StateMismatch: verify needs a state on one device, got one on a mesh"


@pytest.mark.slow
def test_speculation_changes_no_token():
    assert FOUR.call(mesh_cases.speculated, "shadowkv", "data2_tp2") == [True] * 3


@pytest.mark.parametrize(
    ("axis", "size", "policy", "left", "error"),
    [
        ("tp", 3, ShadowKV(), "split", "mesh axis tp must divide the 4 KV heads, got tp=3"),
        ("model", 2, ShadowKV(), "split", "mesh must have no axes but ('data', 'tp'), got ('model',)"),
        ("sp", 2, ShadowKV(), "split", "mesh must have no axes but ('data', 'tp'), got ('sp',); sp, which split the"),
        ("tp", 2, InfLLM(), "split", "mesh must be None for infllm, which is not split over devices"),
        ("tp", 2, ShadowKV(), "nowhere", "left must be one of ('split', 'everywhere'), got 'nowhere'"),
    ],
)
def test_what_does_not_fit_a_mesh_is_refused(axis, size, policy, left, error):
    assert FOUR.call(mesh_cases.refused, [(axis, size)], policy, left).startswith(f"ConfigError: {error}")


# Saved states

SAVED = ("shadowkv", "data2_tp2", "zero_copy", True)  # one case is quick: the process compiles for itself
# One of each sort of leaves of a state, and each mesh.
SORTS = ("full", "quest", "snapkv", "rocketkv", "packed", "plus_int4")
SAVED_CASES = [SAVED, *((name, "data2_tp2", "device_put", True) for name in SORTS)]
SAVED_CASES += [("shadowkv", "data2", "device_put", True), ("shadowkv", "tp4", "device_put", False)]
SAVED_CASES.append(("exact", "tp2", "device_put", False))


@pytest.mark.parametrize(("name", "mesh", "fetch", "stepped"), quick([SAVED], SAVED_CASES))
def test_a_state_of_any_mesh_is_the_same_on_any_other(tmp_path, name, mesh, fetch, stepped):
    """Its file has the bits of one device. Loaded and saved again on any mesh, it is the same file.

    It goes on as the saved state does, and no step is compiled again.
    """
    found = FOUR.call(saved_cases.one_case, str(tmp_path), name, mesh, fetch, stepped)
    assert found == {"one device": "none", "itself": "none", "others": [], "logits": True, "compiled": 0}


# The devices of two processes

COMPILE_SECONDS, HANGS = 540, 400  # under the limit of a test; after so many seconds a process hangs
BY_TWO = ["shadowkv:data=2,tp=2:device_put", "packed:tp=4:device_put", "shadowkv_plus:data=2,tp=2:zero_copy"]
PAIR = ("shadowkv", "quest")


@pytest.mark.slow
def test_two_processes_give_the_results_of_one_device():
    """Heads in a process and rows between the processes, and heads over all devices."""
    tests = SUPPORT.parent
    path = ":".join(map(str, (tests.parent, SUPPORT, tests, tests / "references", tests / "laws" / "oracle")))
    running = start_all(2, [SUPPORT / "joined_model.py", *BY_TWO], XLA_FLAGS=FLAGS.format(2), PYTHONPATH=path)
    results = [ended(process, COMPILE_SECONDS) for process in running]
    assert [status for status, _, _ in results] == [0, 0], results[0][2][-3000:] + results[1][2][-3000:]
    told = json.loads(next(line for line in results[0][1].splitlines() if line.startswith("{")))
    assert list(told) == BY_TWO
    assert max(max(differences) for differences in told.values()) < 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two processes found when they saved and loaded, and the folder with their states."""
    folder = tmp_path_factory.mktemp("pair")
    processes = start_all(2, [SUPPORT / "saved_by_two.py", folder], XLA_FLAGS=FLAGS.format(2))
    timers = [threading.Timer(HANGS, process.kill) for process in processes]
    for timer in timers:
        timer.daemon = True
        timer.start()
    first = [reported(process) for process in processes]
    for name in PAIR:
        save_state(folder / f"{name}.alone", load_state(folder / name, model()), model(), tokens=TOKENS)
    shutil.copytree(parts_of(folder / "quest")[0].parent, folder / "hurt" / parts_of(folder / "quest")[0].parent.name)
    damaged = parts_of(shutil.copy(folder / "quest", folder / "hurt" / "quest"))[1]
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    second = [reported(process) for process in processes]
    assert [ended(process)[0] for process in processes] == [0, 0]
    for timer in timers:
        timer.cancel()
    return first, second, folder


@pytest.mark.slow
def test_a_state_of_two_processes_is_the_same_elsewhere(pair, tmp_path):
    """On four devices, in the processes that saved it, and in those that load what one device saved.

    On a mesh whose processes each have whole weights, and on one whose weights are split over them. A part has half of
    what is split. That no number is in both is checked without processes, in `test_saved_states.py`.
    """
    first, second, folder = pair
    for found in (*first, *second):
        assert [found[name] for name in PAIR] == ["none", "none"]
    for name in PAIR:
        FOUR.call(saved_cases.as_one_file, str(folder / name), "tp4", str(tmp_path / "state"))
        assert (tmp_path / "state").read_bytes() == (folder / f"{name}.alone").read_bytes()
        parts = [TensorFile(path) for path in parts_of(folder / name)]
        assert len(parts) == 2
        rows = [sum(math.prod(part.shapes[key]) for key in part.shapes if ".host.prompt@" in key) for part in parts]
        assert min(rows) >= (0.5 if name == "quest" else 0.3) * sum(rows)
        assert read_state_info(folder / name)["tokens"] == TOKENS


@pytest.mark.slow
def test_a_full_disk_or_a_damaged_part_in_one_process_ends_the_work_in_all(pair):
    for number, (saved, loaded) in enumerate(zip(*pair[:2], strict=True)):
        for name in ("old", "new"):
            assert saved[name].startswith("CheckpointError: "), saved
            assert "cannot be written in parts by 2 processes, which must share its directory" in saved[name]
            assert "File too large" in saved[name]
            assert ("process 1 of 2 failed" in saved[name]) == (number == 0)
        assert saved["left"], "files are left, or the old state has changed"
        assert loaded["damaged"].startswith("CheckpointError: "), loaded
        assert "1-of-2.safetensors is damaged: bytes" in loaded["damaged"]
        assert ("loading quest: process 1 of 2 failed" in loaded["damaged"]) == (number == 0)
