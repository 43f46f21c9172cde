"""Several processes on one directory: they add, load and remove at the same time, and answer alike."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import shutil

import numpy as np
import pytest
from library_process import add, add_and_be_killed, ask, digest, ids_of, listed, load, open_library

from jshadow.weights.convert import files as convert_files


@pytest.fixture(scope="module")
def workers():
    with contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        yield [stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, context)) for _ in range(2)]


@pytest.fixture
def both(workers, tmp_path):
    """Calls a function in both processes at once, with the arguments of each. They have libraries over one folder."""

    def call(function, *arguments):
        futures = [worker.submit(function, *own) for worker, own in zip(workers, arguments or ((), ()), strict=True)]
        return lambda: [future.result() for future in futures]

    assert call(open_library, *[(tmp_path / "library",)] * 2)() == [{}, {}]
    return call


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_add_at_the_same_time(both, opened):
    """The same documents in the same order, and others, by turns. Then both answer alike."""
    orders = [100, 150, 101, 151, 102, 152, 103, 153], [100, 101, 999, 102, 103]
    keys = both(add, *((order,) for order in orders))()
    assert keys[0][::2] == keys[1][:2] + keys[1][3:]
    library, every = opened(), {*keys[0], *keys[1]}
    assert {found.key: found.problem for found in library.documents()} == dict.fromkeys(every)
    assert both(listed)() == [dict.fromkeys(every, ("disk", None))] * 2
    assert [library.ids(key).tolist() for key in keys[0]] == [ids_of(seed) for seed in orders[0]]
    assert both(load, *[(keys[0],)] * 2)() == [[digest(library.load(key)) for key in keys[0]]] * 2
    tokens = library.ask(keys[0][0], [1, 2, 3], max_new_tokens=4).tokens
    assert both(ask, *[(keys[0][0],)] * 2)() == [tokens, tokens]
    names = sorted(f"{key}.safetensors" for key in every)
    assert sorted(path.name for path in library.files.directory.folder.iterdir()) == names  # and nothing half-written


POINTS = 10


@pytest.mark.slow
@pytest.mark.process
def test_a_process_that_is_killed_while_it_writes_loses_nothing_and_leaves_nothing(opened, tmp_path):
    """At ten points of the writing. The next process removes what is half-written."""
    library = opened()
    kept = library.add(ids_of(1)).key
    expected, new, written = digest(library.load(kept)), library.identity.key(np.int32(ids_of(2))), []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["library_process"])

    def run(point):
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            return pool.submit(add_and_be_killed, tmp_path / "library", 2, point).result()

    count = run(None)
    assert count > POINTS
    for point in np.linspace(0, count - 1, POINTS, dtype=int).tolist():
        if library.longest(ids_of(2)) is not None:
            library.remove(new)
        with pytest.raises(concurrent.futures.process.BrokenProcessPool):
            run(point)
        after = opened()
        found = {one.key: one.problem for one in after.documents()}
        written.append(new in found)
        assert found == dict.fromkeys([kept, new] if written[-1] else [kept])
        assert sorted(path.stem for path in after.files.directory.folder.rglob("*")) == sorted(found)
        assert [path.name for path in (tmp_path / "library").iterdir()] == [after.identity.folder]
        assert digest(after.load(kept)) == expected
        assert after.add(ids_of(2)).key == new
    assert written == sorted(written)
    assert set(written) == {False, True}


@pytest.mark.slow
@pytest.mark.process
def test_one_process_removes_while_another_loads(both, opened):
    """Each load gives the exact state, or a typed error."""
    library = opened()
    keys = [library.add(ids_of(seed)).key for seed in (1, 2)]
    expected = {digest(library.load(key)) for key in keys}
    loads = both(load, *[(keys * 40,)] * 2)
    for _ in range(15):
        for key, seed in zip(keys, (1, 2), strict=True):
            library.remove(key)
            assert library.add(ids_of(seed)).key == key
    for found in loads():
        assert {*found} <= expected | {"CheckpointError"}
        assert {*found} & expected
    assert [{*found} for found in both(load, *[(keys,)] * 2)()] == [expected, expected]


def test_a_folder_that_another_process_removes_is_forgotten(opened, text, state_of):
    """A state in memory that never had a file stays."""
    library = opened()
    library.add(text(1))
    kept = library.store(text(3), state_of(3), durable=False)
    shutil.rmtree(library.files.directory.root)
    assert [found.key for found in library.documents()] == [kept]


def test_changes_at_the_same_time_are_noticed(opened, text):
    """Even if the folder's time of change stays the same."""
    library, other = opened(), opened()
    keys = [library.add(text(seed)).key for seed in (1, 2)]
    assert len(other.documents()) == 2
    folder = library.files.directory.folder
    changed = folder.stat().st_mtime_ns
    library.remove(keys[0])
    os.utime(folder, ns=(changed, changed))
    assert [found.key for found in other.documents()] == [keys[1]]


def test_a_temporary_folder_that_another_process_removes_is_made_again(opened, text, monkeypatch):
    """A process removes the folders that are not locked. One may be caught before its writer has locked it."""
    library, real, caught = opened(), os.open, []

    def removing(path, flags, *rest, **options):
        if not (".partial-" in str(path) and len(caught) < 2):
            return real(path, flags, *rest, **options)
        caught.append(path)
        handle = real(path, flags, *rest, **options) if len(caught) == 2 else None
        shutil.rmtree(path)
        return handle or real(path, flags, *rest, **options)

    monkeypatch.setattr(convert_files.os, "open", removing)
    key = library.add(text(1)).key
    assert len(caught) == 2
    assert [path.stem for path in library.files.directory.folder.iterdir()] == [key]
