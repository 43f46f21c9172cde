"""Saved states of meshes: the same bits on one device and on every mesh, also of two processes, and damaged parts."""

import json
import math
import os
import shutil
import threading

import jax
import numpy as np
import pytest
import saved_cases
from forced_devices import FLAGS, FOUR
from mesh_cases import MESHES, POLICIES, meshes_of, model
from saved_cases import TOKENS
from several_processes import SUPPORT, ended, start_all
from small_state import file_size_limit

from jshadow import load_state, save_state
from jshadow.engine.saved.file import header_digest
from jshadow.engine.saved.state import read_state_info
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import TAGS, TensorFile, encode_header, write_payload

pytestmark = pytest.mark.xdist_group("mesh")
HANGS = 400  # seconds after which a process hangs
PAIR = ("shadowkv", "quest")


QUICK = {
    ("full", "sp4", "resident", False),
    ("quest", "tp2_sp2", "device_put", True),
    ("shadowkv", "tp2_sp2", "zero_copy", False),
    ("shadowkv", "data2", "device_put", True),
}
WHOLE = {(name, "tp2_sp2" if "tp2_sp2" in meshes_of(name) else "tp2", "device_put", True) for name in POLICIES}
WHOLE |= {("shadowkv", mesh, "device_put", False) for mesh in MESHES} | {("exact", "tp2", "device_put", False)}


def cases():
    """Some policies on some meshes. TESTS=all has all of them."""
    every = {
        (name, mesh, "device_put", step) for name in POLICIES for mesh in meshes_of(name) for step in (False, True)
    }
    chosen = QUICK | WHOLE | (every if os.environ.get("TESTS") == "all" else set())
    return [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(map(str, case)))
        for case in sorted(chosen)
    ]


def reported(process):
    """The next JSON object that a process prints on its standard error."""
    lines = []
    while not lines or not lines[-1].startswith("{"):
        lines.append(process.stderr.readline())
        assert lines[-1], (lines, process.wait())
    return json.loads(lines[-1])


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
    (folder / "hurt").mkdir()
    change_byte(parts_of(copied(folder / "quest", folder / "hurt"))[1], -1)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    second = [reported(process) for process in processes]
    assert [ended(process)[0] for process in processes] == [0, 0]
    for timer in timers:
        timer.cancel()
    return first, second, folder


def parts_of(index):
    """The parts of a state, by the number of their process."""
    folder = json.loads(TensorFile(index).metadata["parts"])[0]["file"].split("/")[0]
    return sorted((index.parent / folder).iterdir())


def copied(index, folder):
    """Copy a state in parts to another folder. Return its index."""
    parts = parts_of(index)[0].parent
    shutil.copytree(parts, folder / parts.name)
    return shutil.copy(index, folder / index.name)


def change_byte(path, at):
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edited(path, **texts):
    """Change texts in the metadata of a file, and give it the SHA-256 of its new header."""
    file = TensorFile(path)
    known = {**file.metadata, **texts}
    known.pop("header_sha256")
    dtypes = {tag: name for name, tag in TAGS.items()}
    layout = {name: (dtypes[file.tags[name]], shape) for name, shape in file.shapes.items()}
    values = {name: file.read(name) for name in layout}
    table = {name: (file.tags[name], file.shapes[name]) for name in layout}
    with path.open("wb") as opened:
        opened.write(encode_header(layout, known | {"header_sha256": header_digest(known, table)}))
        write_payload(opened, layout, values.__getitem__)


# The same bits everywhere


@pytest.mark.parametrize(("name", "mesh", "fetch", "stepped"), cases())
def test_a_state_of_any_mesh_is_the_same_on_any_other(tmp_path, name, mesh, fetch, stepped):
    """Its file has the bits of one device. Loaded and saved again on any mesh, it is the same file.

    It goes on as the saved state does, and no step is compiled again.
    """
    found = FOUR.call(saved_cases.one_case, str(tmp_path), name, mesh, fetch, stepped)
    assert found["one device"] == found["itself"] == "none"
    assert found["others"] == []
    assert found["logits"]
    assert found["compiled"] == 0


@pytest.mark.parametrize("name", PAIR)
def test_a_state_of_two_processes_is_the_same_on_four_devices(pair, tmp_path, name):
    FOUR.call(saved_cases.as_one_file, str(pair[2] / name), "tp4", str(tmp_path / "state"))
    assert (tmp_path / "state").read_bytes() == (pair[2] / f"{name}.alone").read_bytes()


def test_two_processes_load_what_they_saved(pair):
    """On a mesh whose processes each have whole weights, and on one whose weights are split over them."""
    for found in pair[0]:
        assert [found[name] for name in PAIR] == ["none", "none"]


def test_two_processes_load_what_one_device_saved(pair):
    for found in pair[1]:
        assert [found[name] for name in PAIR] == ["none", "none"]


def test_each_process_writes_what_lies_beside_its_devices(pair):
    """A part has half of what is split, and no number is in both."""
    for name in PAIR:
        parts = [TensorFile(path) for path in parts_of(pair[2] / name)]
        assert len(parts) == 2
        numbers = [sum(math.prod(shape) for shape in part.shapes.values()) for part in parts]
        index = TensorFile(pair[2] / name)
        leaves = json.loads(index.metadata["leaves"])
        assert sum(numbers) == sum(math.prod(shape) for key, (_, shape) in leaves.items() if key not in index.shapes)
        rows = [sum(math.prod(part.shapes[key]) for key in part.shapes if ".host.prompt@" in key) for part in parts]
        assert min(rows) >= (0.5 if name == "quest" else 0.3) * sum(rows)


def test_the_index_tells_of_the_state_without_the_parts(pair, tmp_path):
    index = pair[2] / "quest"
    info, alone = read_state_info(index), read_state_info(pair[2] / "quest.alone")
    assert info["tokens"] == alone["tokens"] == TOKENS
    assert info["nbytes"] == index.stat().st_size + sum(part.stat().st_size for part in parts_of(index))
    assert {key for key in info if info[key] != alone[key]} == {"format", "version", "nbytes"}
    shutil.copy(index, tmp_path / "index")
    assert read_state_info(tmp_path / "index")["lengths"] == [60, 41]


# Nothing half-written


def test_a_full_disk_in_one_process_ends_the_saving_in_all(pair):
    for number, found in enumerate(pair[0]):
        for name in ("old", "new"):
            assert found[name].startswith("CheckpointError: "), found
            assert "cannot be written in parts by 2 processes, which must share its directory" in found[name]
            assert "File too large" in found[name]
            assert ("process 1 of 2 failed" in found[name]) == (number == 0)
        assert found["left"], "files are left, or the old state has changed"


def test_a_state_that_replaces_another_removes_its_parts(pair, tmp_path):
    index = copied(pair[2] / "quest", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    state = load_state(index, model())
    with file_size_limit(2000), pytest.raises(CheckpointError, match="too large"):
        save_state(index, state, model())
    load_state(index, model())
    save_state(index, state, model())
    assert os.listdir(tmp_path) == ["quest"]
    load_state(index, model())


# Damage


def test_two_processes_refuse_a_damaged_part_together(pair):
    for number, found in enumerate(pair[1]):
        assert found["damaged"].startswith("CheckpointError: "), found
        assert "1-of-2.safetensors is damaged: bytes" in found["damaged"]
        assert ("loading quest: process 1 of 2 failed" in found["damaged"]) == (number == 0)


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_is_missing_or_cut(pair, tmp_path, number):
    index = copied(pair[2] / "shadowkv", tmp_path)
    part = parts_of(index)[number]
    data = part.read_bytes()
    part.unlink()
    with pytest.raises(CheckpointError, match=rf"part {number} of 2: .*{number}-of-2.*no such file"):
        load_state(index, model())
    part.write_bytes(data[:-7])
    with pytest.raises(CheckpointError, match=rf"part {number} of 2: .*truncated"):
        load_state(index, model())


def test_any_changed_byte_is_noticed(pair, tmp_path):
    index = copied(pair[2] / "shadowkv", tmp_path)
    files = [index, *parts_of(index)]
    random = np.random.default_rng(0)
    for path in files:
        data = path.read_bytes()
        for at in [*random.integers(8, len(data), 25), len(data) - 1]:
            change_byte(path, at)
            with pytest.raises(CheckpointError):
                load_state(index, model())
            path.write_bytes(data)
    load_state(index, model())


def test_a_part_of_another_run_or_of_another_process(pair, tmp_path):
    index = copied(pair[2] / "shadowkv", tmp_path)
    first, second = parts_of(index)
    data = first.read_bytes()
    shutil.copy(parts_of(pair[2] / "quest")[0], first)
    run = TensorFile(index).metadata["run"].strip('"')
    with pytest.raises(CheckpointError, match=rf"part 0 of 2: .* must be of run '{run}', got '"):
        load_state(index, model())
    shutil.copy(second, first)
    with pytest.raises(CheckpointError, match=r"part 0 of 2: .* must have the header_sha256 that the index gives"):
        load_state(index, model())
    first.write_bytes(data)
    load_state(index, model())


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"version": "2"}, "format version 2; this jshadow understands version 1"),
        ({"parts": "[]"}, "parts must be a list of files in a folder beside the index"),
        ({"parts": '[{"file":"../x/y","bytes":1,"header_sha256":""}]'}, "parts must be a list of files"),
        ({"parts": '[{"file":"/y","bytes":1,"header_sha256":""}]'}, "parts must be a list of files"),
        ({"run": '"another"'}, "must be of run 'another', got '"),
        ({"leaves": "{}"}, "must be a slice of a tensor of the state"),
        ({"leaves": '{"last":["int32",[-1]]}'}, "leaves must have a dtype and a shape for each tensor"),
        ({"format": "something else"}, "got a safetensors file of format 'something else'"),
    ],
)
def test_an_index_that_is_not_as_jshadow_writes_it(pair, tmp_path, texts, told):
    index = copied(pair[2] / "quest", tmp_path)
    edited(index, **texts)
    with pytest.raises(CheckpointError, match=told):
        load_state(index, model())


def test_a_slice_that_is_missing_from_a_part(pair, tmp_path):
    """With right digests everywhere, the numbers of all slices are still counted."""
    index = copied(pair[2] / "quest", tmp_path)
    entries = json.loads(TensorFile(index).metadata["parts"])
    edited(index, parts=json.dumps(entries[:1]))
    with pytest.raises(CheckpointError, match=r"the parts must have \d+ of layers\.0\.\S+, got \d+"):
        load_state(index, model())


def test_the_states_of_one_device_have_the_file_that_they_had(tmp_path, pair):
    """The format of a single file and its version are those of older versions, which can read it."""
    metadata = TensorFile(pair[2] / "shadowkv.alone").metadata
    assert (metadata["format"], metadata["version"]) == ("jshadow KV state", "3")
    assert {"run", "parts", "leaves"} & metadata.keys() == set()
    assert jax.device_count() == 1
