"""Saved states of meshes: the same bits on one device and on every mesh, also of two real processes."""

import json
import math
import shutil
import threading

import pytest
import saved_cases
from few import quick
from forced_devices import FLAGS, FOUR
from mesh_cases import MESHES, POLICIES, meshes_of, model
from saved_cases import TOKENS
from several_processes import SUPPORT, ended, reported, start_all

from jshadow import load_state, save_state
from jshadow.engine.saved.state import read_state_info
from jshadow.weights.convert.safetensors_file import TensorFile

pytestmark = [pytest.mark.xdist_group("mesh"), pytest.mark.process]
HANGS = 400  # seconds after which a process hangs
PAIR = ("shadowkv", "quest")

QUICK = ("shadowkv", "tp2_sp2", "zero_copy", True)  # one case: the process compiles for itself
CASES = {(name, "tp2_sp2" if "tp2_sp2" in meshes_of(name) else "tp2", "device_put", True) for name in POLICIES}
CASES |= {("shadowkv", mesh, "device_put", False) for mesh in MESHES} | {("exact", "tp2", "device_put", False)}
CASES |= {QUICK, ("full", "sp4", "resident", False), ("shadowkv", "data2", "device_put", True)}


@pytest.mark.parametrize(("name", "mesh", "fetch", "stepped"), quick([QUICK], sorted(CASES)))
def test_a_state_of_any_mesh_is_the_same_on_any_other(tmp_path, name, mesh, fetch, stepped):
    """Its file has the bits of one device. Loaded and saved again on any mesh, it is the same file.

    It goes on as the saved state does, and no step is compiled again.
    """
    found = FOUR.call(saved_cases.one_case, str(tmp_path), name, mesh, fetch, stepped)
    assert found["one device"] == found["itself"] == "none"
    assert found["others"] == []
    assert found["logits"]
    assert found["compiled"] == 0


# Two processes


def parts_of(index):
    """The parts of a state, by the number of their process."""
    folder = json.loads(TensorFile(index).metadata["parts"])[0]["file"].split("/")[0]
    return sorted((index.parent / folder).iterdir())


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
    what is split, and no number is in both.
    """
    first, second, folder = pair
    for found in (*first, *second):
        assert [found[name] for name in PAIR] == ["none", "none"]
    for name in PAIR:
        FOUR.call(saved_cases.as_one_file, str(folder / name), "tp4", str(tmp_path / "state"))
        assert (tmp_path / "state").read_bytes() == (folder / f"{name}.alone").read_bytes()
        parts = [TensorFile(path) for path in parts_of(folder / name)]
        assert len(parts) == 2
        numbers = [sum(math.prod(shape) for shape in part.shapes.values()) for part in parts]
        index = TensorFile(folder / name)
        leaves = json.loads(index.metadata["leaves"])
        assert sum(numbers) == sum(math.prod(shape) for key, (_, shape) in leaves.items() if key not in index.shapes)
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
