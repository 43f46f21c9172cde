"""A library in an object store: objects are put, listed and fetched; bad ones are told, and the others stay usable."""

import concurrent.futures
import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore
from small_state import equal

from jshadow.errors import CheckpointError, ConfigError
from jshadow.library import remote as remote_module

NOTHING = {"device": 0, "host": 0}


@pytest.fixture
def store(tmp_path):
    """The URL of an empty store of files."""
    return f"file://{tmp_path}/objects"


@pytest.fixture
def objects(tmp_path):
    """Returns the objects of the store by the ends of their names."""
    return lambda key: {path.suffix: path for path in (tmp_path / "objects").rglob(f"{key}.*")}


def damage(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def refuse(*_):
    raise GenericError("the store refuses")


def test_put_list_and_fetch(opened, text, store, objects):
    library = opened(store)
    stored = library.add(text(1), title="A book")
    state = library.load(stored.key)
    answer = library.ask(stored.key, [1, 2, 3], max_new_tokens=4).tokens
    assert objects(stored.key).keys() == {".json", ".safetensors"}
    again = opened(store)
    assert [(found.key, found.tier, found.title) for found in again.documents()] == [(stored.key, "remote", "A book")]
    assert again.longest([*text(1), 3]).key == stored.key
    assert again.ask(stored.key, [1, 2, 3], max_new_tokens=4).tokens == answer
    assert equal(again.load(stored.key), state)
    assert again.add(text(1)).tokens == 20
    again.remove(stored.key)
    assert objects(stored.key) == {}
    assert opened(store).documents() == again.documents() == []
    with pytest.raises(CheckpointError, match=r"object .* cannot be read"):
        opened(store).load(stored.key)
    folder = again.files.directory.root
    assert folder.exists()
    again.close()
    assert not folder.exists()


def test_any_store_of_obstore(opened, text, state_of, monkeypatch):
    memory = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda url, **_: memory)
    key = opened("s3://bucket/path").add(text(1)).key
    assert len([meta for batch in obstore.list(memory) for meta in batch]) == 2
    again = opened("s3://bucket/path")
    assert equal(again.load(key), state_of(1))
    again.remove(key)
    again.files.remote.remove(key)  # that it is missing is no error
    assert [meta for batch in obstore.list(memory) for meta in batch] == []


def edited(change):
    """Harms a table of a state."""
    return lambda path: path.write_text(change(json.loads(path.read_text())))


OBJECT, TABLE = ".safetensors", ".json"
BAD = [
    (OBJECT, damage, "is damaged"),
    (OBJECT, lambda path: os.truncate(path, 500), "truncated"),
    (OBJECT, lambda path: os.truncate(path, 0), "empty file"),
    (OBJECT, Path.unlink, "object .* cannot be read"),
    (TABLE, edited(lambda table: "{"), "json is damaged"),
    (TABLE, edited(lambda table: "[1]"), "json is damaged"),
    (TABLE, edited(lambda table: json.dumps(table | {"ids": [table["ids"][0] + 1, *table["ids"][1:]]})), "json is"),
    (TABLE, edited(lambda table: json.dumps({name: table[name] for name in table if name != "bytes"})), "json is"),
    (TABLE, Path.unlink, None),  # without it, an object is not complete
]


LISTED = [(False, *bad) for bad in BAD] + [(True, *bad) for bad in BAD if bad[0] == OBJECT]


@pytest.mark.parametrize(("listed", "kind", "harm", "message"), LISTED)
def test_a_bad_object_or_table_is_told_and_can_be_replaced(opened, text, store, objects, listed, kind, harm, message):
    """Whether the library has listed the object before or not."""
    first = opened(store)
    key, other = first.add(text(1)).key, first.add(text(2)).key
    library = opened(store) if listed else None
    harm(objects(key)[kind])
    library = library or opened(store)
    if kind == OBJECT:
        with pytest.raises(CheckpointError, match=message):
            library.load(key)
        assert not library.files.directory.path(key).exists()
    problems = {found.key: found.problem for found in library.documents()}
    assert problems.pop(other) is None
    assert [*problems] == ([] if message is None else [key])
    assert all(re.search(message, problem) for problem in problems.values())
    assert library.longest(text(1)) is None
    library.load(other)
    assert library.add(text(1)).key == key
    assert {found.key: found.problem for found in opened(store).documents()} == {key: None, other: None}
    assert equal(opened(store).load(key), library.load(key))


@pytest.mark.parametrize("call", [1, 2], ids=["object", "table"])
def test_a_put_that_fails(opened, text, store, monkeypatch, call):
    library, calls, real = opened(store), [], remote_module.Remote._create
    kept = library.add(text(2)).key

    def create(*args):
        calls.append(args)
        return refuse() if len(calls) == call else real(*args)

    monkeypatch.setattr(remote_module.Remote, "_create", create)
    with pytest.raises(CheckpointError, match="cannot be read or written: the store refuses"):
        library.add(text(1))
    assert list(library.files.directory.files()) == [kept]
    for one in (library, opened(store)):
        assert [found.key for found in one.documents()] == [kept]
    library.load(kept)
    key = library.add(text(1)).key
    assert equal(opened(store).load(key), library.load(key))


def test_a_disk_that_is_full_while_an_object_is_fetched(opened, text, store, monkeypatch):
    key, library = opened(store).add(text(1)).key, opened(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(CheckpointError, match="No space left on device"):
            library.load(key)
    assert [path for path in library.files.directory.root.rglob("*") if path.is_file()] == []
    library.load(key)


def test_a_large_object_is_put_in_parts_and_fetched_in_ranges(opened, text, store, state_of, monkeypatch):
    monkeypatch.setattr(remote_module, "ONE_PUT", 100)
    monkeypatch.setattr(remote_module, "RANGE", 100)
    key = opened(store).add(text(1)).key
    assert equal(opened(store).load(key), state_of(1))


def test_copies_are_kept_within_the_limit(opened, text, store, tmp_path):
    first = opened(store)
    keys = [first.add(text(seed)).key for seed in (1, 2, 3)]
    one = max(first.files.directory.files().values())
    limits = {"disk": 2 * one + 100, "disk_folder": tmp_path / "copies", **NOTHING}
    library = opened(store, limits=limits)
    for key in keys:
        library.load(key)
        assert library.files.directory.used() <= limits["disk"]
    assert [found.tier for found in library.documents()] == ["remote", "disk", "disk"]
    library.close()
    again = opened(store, limits=limits)
    assert len(again.files.directory.files()) == 2, "they stay"
    damage(again.files.directory.path(keys[2]))
    with pytest.raises(CheckpointError, match="is damaged"):
        again.load(keys[2])
    assert equal(again.load(keys[2]), first.load(keys[2])), "it is fetched again"


def test_no_copy_is_removed_while_it_is_read(opened, text, store):
    first, library = opened(store), opened(store, limits={"disk": 0, **NOTHING})
    keys = [first.add(text(seed)).key for seed in range(4)]
    library.look()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for state in pool.map(library.load, keys * 8):
            assert np.asarray(state.lengths).tolist() == [20]
    assert library.files.directory.files() == {}
    assert {(found.tier, found.problem) for found in library.documents()} == {("remote", None)}


def test_places_that_cannot_be_opened(opened, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="place must be the URL of an object store, got 'xyz://bucket'"):
        opened("xyz://bucket")
    (tmp_path / "file").write_text("x")
    with pytest.raises((CheckpointError, ConfigError)):
        opened(f"file://{tmp_path}/file").documents()
    with pytest.raises(CheckpointError, match="must be a directory"):
        opened("file")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"needs the package obstore: pip install 'jshadow\[store\]'"):
        opened("s3://bucket")
    assert not Path("s3:").exists()


def test_what_other_machines_put_and_removed_is_noticed(opened, text, store, monkeypatch):
    library, other = opened(store), opened(store)
    kept, removed = other.add(text(1), title="A book").key, other.add(text(2)).key
    assert library.documents() == []
    library.look()
    assert {found.key: found.tier for found in library.documents()} == {kept: "remote", removed: "remote"}
    assert equal(library.load(kept), other.load(kept))
    library.load(removed)
    other.remove(removed)
    library.look()
    assert [(found.key, found.title) for found in library.documents()] == [(kept, "A book")]
    assert library.tiers.tier_of(removed) is None
    assert list(library.files.directory.files()) == [kept]
    with pytest.raises(CheckpointError, match="cannot be read"):
        library.load(removed)
    new = other.add(text(3)).key
    monkeypatch.setattr(type(library), "_read_whole", None)
    assert library.add(text(3)).key == new, "it is not read again"
    monkeypatch.setattr(library.files.remote, "store", Mock(list=refuse))
    with pytest.raises(CheckpointError, match="the store refuses"):
        library.look()
    assert library.longest(text(1), look=True).key == kept, "it is known, so the store is not asked"


def test_a_look_costs_one_listing_and_the_new_tables(opened, text, store, monkeypatch):
    library, other, calls = opened(store), opened(store), []
    for seed in (1, 2):
        other.add(text(seed))
    for name in ("keys", "entry"):
        real = getattr(remote_module.Remote, name)
        noted = lambda *args, real=real, name=name: (calls.append(name), real(*args))[1]  # noqa: E731
        monkeypatch.setattr(remote_module.Remote, name, noted)
    for expected in (["entry", "entry", "keys"], ["keys"]):
        library.look()
        assert sorted(calls) == expected
        calls.clear()
    library.documents()
    library.longest(text(3))
    assert library.add(text(1)).tier == "remote"
    assert calls == []


def test_a_state_that_is_put_during_a_look_stays(opened, text, store, monkeypatch):
    """The list is older than the state."""
    library, keys, real = opened(store), [], remote_module.Remote.keys

    def listing(remote):
        found = real(remote)
        if not keys:
            keys.append(None)
            keys[0] = library.add(text(1)).key
        return found

    monkeypatch.setattr(remote_module.Remote, "keys", listing)
    library.look()
    assert [found.key for found in library.documents()] == keys
    library.look()
    assert [found.key for found in library.documents()] == keys


def test_copies_that_a_killed_process_left_are_removed(opened, store, monkeypatch, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    first = opened(store).files.directory.root
    assert first.stat().st_mode & 0o777 == 0o700
    shutil.copytree(first, f"{first}1")  # nothing locks it, as after a kill
    second = opened(store).files.directory.root
    assert {*folder.iterdir()} == {first, second}
