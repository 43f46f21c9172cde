"""Files that are damaged, foreign or vanish: a typed error for their own state, and the others go on."""

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk_calls import before_disk_calls
from small_state import POLICY, SMALL, equal

import jshadow
from jshadow.engine.saved import state as saved_read
from jshadow.errors import CheckpointError, StateMismatch
from jshadow.library import files as library_files
from jshadow.library.shelf import Identity
from jshadow.weights.convert import safetensors_file
from jshadow.weights.params import init_params

IDS, OTHER = np.arange(20) % 13, np.arange(20) * 3 % 13
SETTINGS = {"policy": POLICY, "capacity": 40, "fetch": "device_put"}


@pytest.fixture(scope="module")
def made(params, tmp_path_factory):
    """A folder with two stored texts, and their keys. It is not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    with jshadow.Library(folder, params, **SETTINGS) as library:
        return folder, library.add(IDS).key, library.add(OTHER).key, library.load(library.longest(IDS).key)


@pytest.fixture
def copy(made, params, tmp_path):
    """A library over a copy of that folder, the path of the first text's file, and the keys."""
    shutil.copytree(made[0], tmp_path / "library")
    with jshadow.Library(tmp_path / "library", params, **SETTINGS) as library:
        yield library, library.files.directory.path(made[1]), made[1], made[2]


def check_mended(library, key, other):
    """A text with a bad file can be added again, while the other one is usable."""
    assert library.longest(IDS) is None or library.longest(IDS).key != key
    library.load(other)
    assert library.add(IDS).key == key
    assert np.asarray(library.load(key).lengths).tolist() == [20]


def damaged_tensor(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def newer(path):
    content = path.read_bytes()
    assert content.count(b'"version":"4"') == 1
    path.write_bytes(content.replace(b'"version":"4"', b'"version":"9"'))


def other_ids(path):
    [other] = {*path.parent.glob("*.safetensors")} - {path}
    shutil.copy(other, path)


FAULTS = {
    "damaged": (damaged_tensor, "is damaged: .* does not have the SHA-256"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), r"empty file \(0 bytes\)"),
    "header alone": (lambda path: path.write_bytes(path.read_bytes()[:100]), "truncated"),
    "text": (lambda path: path.write_text("a text, not a state"), "must be a saved KV state"),
    "newer": (newer, "is of format version 9; this jshadow understands version 3 and 4"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    "gone": (Path.unlink, "there is no such file"),
    "other ids": (other_ids, "must hold the token ids of .*, got others"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("listed", [True, False], ids=["listed before", "new"])
def test_a_bad_file_is_told_and_can_be_replaced(copy, opened, fault, listed):
    library, path, key, other = copy
    harm, message = FAULTS[fault]
    harm(path)
    if not listed:
        library = opened()
    error = StateMismatch if fault == "other ids" else CheckpointError
    for load in (lambda: library.prepare(key).result(60), lambda: library.load(key)):
        with pytest.raises(error, match=message):
            load()
    found = {stored.key: stored.problem for stored in library.documents()}
    assert found.pop(other) is None
    assert [*found] == ([] if fault == "gone" else [key])
    assert all(found.values())
    if fault == "a folder":
        with pytest.raises(CheckpointError, match=r"cannot be (read|removed).*irectory|ermitted"):
            library.add(IDS)
        path.rmdir()
    check_mended(library, key, other)


def replaced(path):
    """As by another process that has written the same state."""
    fresh = path.with_name("fresh")
    shutil.copy(path, fresh)
    fresh.replace(path)


CHANGES = [(Path.unlink, point) for point in ("before the header", "before the tensors", "before the end")]
CHANGES += [(replaced, "before the tensors"), (replaced, "before the end"), (damaged_tensor, "before the end")]


@pytest.mark.parametrize(("change", "point"), CHANGES)
def test_a_file_that_changes_while_it_is_read(copy, made, monkeypatch, change, point):
    library, path, key, other = copy
    calls = at(monkeypatch, point, lambda: change(path))
    if change is replaced:
        assert equal(library.load(key), made[3]), "the new file is read"
        assert calls == [1, 2]
        return
    message = "is damaged" if change is damaged_tensor else r"cannot be read|must not change"
    with pytest.raises(CheckpointError, match=message):
        library.load(key)
    assert [stored.key for stored in library.documents() if not stored.problem] == [other]
    check_mended(library, key, other)


def test_a_file_that_changes_all_the_time_is_given_up(copy, monkeypatch):
    library, path, key, _ = copy
    calls = at(monkeypatch, "before the end", lambda: path.write_bytes(path.read_bytes()), once=False)
    with pytest.raises(CheckpointError, match="must not change while it is read"):
        library.load(key)
    assert len(calls) == library_files.ATTEMPTS


def test_a_tensor_that_is_read_again_is_of_the_same_file(copy, monkeypatch):
    """A tensor that does not fit into host memory is read twice. The file must not be another one then."""
    library, path, key, other = copy
    monkeypatch.setattr(saved_read, "spare_bytes", lambda _: 0)
    library.prepare(key).result(60)
    damaged_tensor(path)
    with pytest.raises(CheckpointError, match="must not change while it is read"):
        library.load(key)
    library.load(other)


def at(monkeypatch, point, act, *, once=True):
    """Call `act` while a state's file is read, at a point of it. Returns a list of the attempts."""
    owner, name = (safetensors_file, "safe_open") if point == "before the header" else (saved_read, "read_all")
    calls, real = [], getattr(owner, name)

    def wrapped(*args, **options):
        calls.append(len(calls) + 1)
        acts = len(calls) == 1 or not once
        if acts and point != "before the end":
            act()
        value = real(*args, **options)
        if acts and point == "before the end":
            act()
        return value

    monkeypatch.setattr(owner, name, wrapped)
    return calls


STRICTER = dataclasses.replace(SMALL, norm_eps=SMALL.norm_eps * 2)
OTHERS = {
    "model": ({"params": init_params(STRICTER)}, r"config\.norm_eps"),
    "weights": ({"params": init_params(SMALL, seed=1)}, "weights"),
    "dtype": ({"params": init_params(SMALL, dtype="bfloat16")}, "dtype"),
    "policy": ({"policy": dataclasses.replace(POLICY, budget=8)}, r"policy\.settings\.budget"),
    "capacity": ({"capacity": 39}, "capacity=40"),
    "fetch mode": ({"fetch": "resident"}, "fetch='device_put'"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_library(copy, opened, other):
    """Its key names what differs, its file under a key of this library too, and its arrays are refused."""
    first, path, key, _ = copy
    setting, message = OTHERS[other]
    library = opened(**setting)
    assert library.longest(IDS) is None
    assert library.documents() == []
    with pytest.raises(StateMismatch, match=message):
        library.load(key)
    moved = library.files.directory.path(library.identity.key(IDS))
    moved.parent.mkdir()
    shutil.copy(path, moved)
    [found] = library.documents()
    assert found.problem is None or "must be named by its key" in found.problem
    with pytest.raises(StateMismatch, match=message):
        library.load(moved.stem)
    if other not in ("model", "weights"):  # a state in memory does not know its weights
        with pytest.raises(StateMismatch):
            library.store(IDS, first.load(key))
    if other in ("weights", "policy", "fetch mode"):  # which compile least
        assert library.add(IDS).problem is None


def test_foreign_files_are_told_and_disturb_nobody(copy, opened):
    first, path, key, other = copy
    (path.parent / "notes.txt").write_text("a note")
    (path.parent / "notes.safetensors").write_text("a note")
    (path.parent / "deep").mkdir()
    (path.parent.parent / "file").write_text("x")
    library = opened()
    problems = {stored.key: stored.problem for stored in library.documents()}
    assert problems.keys() == {key, other, "notes"}
    assert problems[key] is problems[other] is None
    assert "must be a saved KV state" in problems["notes"]
    library.load(key)
    library.remove("notes")
    with pytest.raises(CheckpointError, match="key must be that of a stored state"):
        library.remove("notes")
    assert not (path.parent / "notes.safetensors").exists()
    assert (path.parent / "notes.txt").exists()
    assert first.longest(IDS).key == key


def test_two_texts_with_one_key(opened, text, monkeypatch):
    """The ids are compared although the hashes are equal."""
    monkeypatch.setattr(Identity, "keys", lambda self, ids, lengths: dict.fromkeys(lengths, "0" * 64))
    library, ids, others = opened(), text(1), text(2)
    key = library.add(ids).key
    state = library.load(key).fork()
    assert library.longest(ids).key == key
    assert library.longest(others) is None
    with pytest.raises(StateMismatch, match="got others with the same key"):
        library.add(others)
    assert library.ids(key).tolist() == ids
    assert equal(library.load(key), state)
    again = opened()
    assert again.longest(others) is None
    assert equal(again.load(key), state)


def test_a_disk_that_fails_for_a_moment_loses_nothing(opened, text):
    """What is known stays listed, and a new file whose header cannot be read now is no damaged file."""
    library, other, broken = opened(), opened(), []
    key = library.add(text(1)).key
    assert other.load(key)

    def fail(name):
        if name in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with before_disk_calls(library.files.directory.root, fail):
        new = library.add(text(2)).key
        broken += ["open"]
        assert [found.key for found in other.documents()] == [key]
        broken += ["stat", "scandir"]
        assert [found.key for found in other.documents()] == [key]
        assert other.longest(text(1)).key == key
        assert other.tier_bytes()[2][1] == 0
    assert {found.key: found.problem for found in other.documents()} == {key: None, new: None}
