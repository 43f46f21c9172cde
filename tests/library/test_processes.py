"""Several processes on one directory: they add, load and remove at the same time, and answer alike."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jshadow.errors import CheckpointError
from jshadow.weights.convert import files as convert_files

# Does what a line of JSON says, and answers with a line of JSON.
WORKER = """
import json, sys
import jax, numpy as np
import jshadow
from test_processes import digest, ids_of
from small_state import POLICY, SMALL
from jshadow.errors import JshadowError
from jshadow.library import TierLimits
from jshadow.weights.params import init_params

params = init_params(SMALL)
for line in sys.stdin:
    order = json.loads(line)
    try:
        if "open" in order:
            limits = TierLimits(**order["limits"])
            library = jshadow.Library(
                order["open"], params, POLICY, capacity=40, fetch="device_put", limits=limits)
            result = len(library.documents())
        elif "add" in order:
            result = [library.add(ids_of(seed)).key for seed in order["add"]]
        elif "load" in order:
            result = []
            for key in order["load"] * order["times"]:
                try:
                    result.append(digest(library.load(key)))
                except JshadowError as error:
                    result.append(type(error).__name__)
        elif "ask" in order:
            result = library.ask(order["ask"], [1, 2, 3], max_new_tokens=4).tokens
        else:
            result = {found.key: [found.tier, found.problem] for found in library.documents()}
    except JshadowError as error:
        result = f"{type(error).__name__}: {error}"
    print(json.dumps(result), flush=True)
"""


def ids_of(seed):
    """Token ids of a text of 20 tokens."""
    return np.random.default_rng(seed).integers(0, 13, 20).tolist()


def digest(state):
    """SHA-256 of all arrays of a state."""
    return hashlib.sha256(b"".join(np.array(leaf).tobytes() for leaf in jax.tree.leaves(state))).hexdigest()


class Worker:
    """A process that does what it is told."""

    def __init__(self, folders):
        paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def result(self):
        return json.loads(self.process.stdout.readline())

    def do(self, **order):
        self.tell(**order)
        return self.result()


@pytest.fixture(scope="module")
def workers(request):
    tests = request.path.parents[1]
    folders = [request.path.parent, tests / "support", tests, tests.parent]
    with contextlib.ExitStack() as stack:
        workers = [Worker(folders) for _ in range(2)]
        for worker in workers:
            stack.enter_context(worker.process)
            stack.callback(worker.process.stdin.close)
        yield workers


@pytest.fixture
def both(workers, tmp_path):
    """Both processes, each with a library over the directory."""
    for worker in workers:
        worker.tell(open=str(tmp_path / "library"), limits={"device": 0, "host": 0})
    assert [worker.result() for worker in workers] == [0, 0]
    return workers


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_add_at_the_same_time(both, opened, params):
    """The same documents in the same order, and others, by turns."""
    shared = [100, 101, 102, 103]
    orders = [seed for seed in shared for seed in (seed, seed + 50)], [seed for seed in shared for seed in (seed,)]
    orders[1].insert(2, 999)
    for worker, order in zip(both, orders, strict=True):
        worker.tell(add=order)
    keys = [worker.result() for worker in both]
    assert keys[0][::2] == keys[1][:2] + keys[1][3:]
    library = opened()
    assert {found.key for found in library.documents()} == {*keys[0], *keys[1]}
    assert {found.problem for found in library.documents()} == {None}
    assert [worker.do(list=True).keys() == {*keys[0], *keys[1]} for worker in both] == [True, True]
    for seed, key in zip(orders[0], keys[0], strict=True):
        assert library.ids(key).tolist() == ids_of(seed)
    assert [worker.do(load=keys[0], times=1) for worker in both] == [[digest(library.load(key)) for key in keys[0]]] * 2
    folder = library.files.directory.folder
    names = {f"{key}.safetensors" for key in (*keys[0], *keys[1])}
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)  # and nothing half-written


@pytest.mark.slow
@pytest.mark.process
def test_a_fresh_process_finds_a_document_and_answers_alike(both, opened):
    library = opened()
    key = library.add(ids_of(1)).key
    tokens = library.ask(key, [1, 2, 3], max_new_tokens=4).tokens
    for worker in both:
        assert worker.do(list=True) == {key: ["disk", None]}
        assert worker.do(ask=key) == tokens
        assert worker.do(load=[key], times=1) == [digest(library.load(key))]
    assert both[0].do(add=[1]) == [key]


@pytest.mark.slow
@pytest.mark.process
def test_one_process_removes_while_another_loads(both, opened):
    """Each load gives the exact state, or a typed error."""
    library = opened()
    seeds = [1, 2]
    keys = [library.add(ids_of(seed)).key for seed in seeds]
    expected = {digest(library.load(key)) for key in keys}
    for worker in both:
        worker.tell(load=keys, times=40)
    for _ in range(15):
        for key, seed in zip(keys, seeds, strict=True):
            library.remove(key)
            assert library.add(ids_of(seed)).key == key
    for worker in both:
        found = worker.result()
        assert {*found} <= expected | {"CheckpointError"}
        assert {*found} & expected
        assert set(worker.do(load=keys, times=1)) == expected


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_what_another_process_removes_is_forgotten(opened, text, tier):
    """Also if it is in memory. A state that never had a file stays."""
    limits = {"device": {}, "host": {"device": 0}, "disk": {"device": 0, "host": 0}}[tier]
    library, other = opened(limits=limits), opened()
    key, kept = library.add(text(1)).key, library.add(text(2)).key
    library.store(text(3), opened("away").load(opened("away").add(text(3)).key), durable=tier == "disk")
    assert {found.key: found.tier for found in library.documents()}[key] == tier
    other.remove(key)
    assert library.longest(text(1)) is None
    assert library.tiers.tier_of(key) is None
    with pytest.raises(CheckpointError, match="there is no such file"):
        library.load(key)
    assert [found.tokens for found in library.documents()] == [20, 20]
    assert library.load(kept)
    assert library.longest(text(3)) is not None
    assert library.add(text(1)).key == key
    shutil.rmtree(library.files.directory.root)  # all of them
    assert [found.tier for found in library.documents()] == ([] if tier == "disk" else [tier])


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
        if ".partial-" in str(path) and len(caught) < 2:
            caught.append(path)
            if len(caught) == 1:
                shutil.rmtree(path)
            else:
                handle = real(path, flags, *rest, **options)
                shutil.rmtree(path)
                return handle
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(convert_files.os, "open", removing)
    key = library.add(text(1)).key
    assert len(caught) == 2
    assert [path.stem for path in library.files.directory.folder.iterdir()] == [key]
