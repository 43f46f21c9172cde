"""Several threads on one library: files are written aside, no lock is held meanwhile, and a document is read once."""

import concurrent.futures
import contextlib
import threading

import numpy as np
import pytest
from disk_calls import before_disk_calls
from small_state import equal

from jshadow import generate
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.saved import file as saved
from jshadow.engine.saved import file as saved_file
from jshadow.engine.saved import state as saved_state
from jshadow.errors import CapacityError, CheckpointError, ConfigError, StateMismatch
from jshadow.library import library as library_module
from jshadow.library.shelf import Entry

WAIT = 30  # seconds after which a test fails
ONE_PROGRAM = threading.Lock()  # programs that are compiled for tests must not run at once (tests/conftest.py)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


class Gate:
    """A function waits, where it is called, until the gate's block ends, also with an error: no thread is left."""

    def __init__(self, monkeypatch, owner=saved, name="write_payload"):
        self.real, self.open = getattr(owner, name), threading.Event()
        self.reached, self.threads = threading.Semaphore(0), []
        monkeypatch.setattr(owner, name, lambda *args, **options: self.wait_and_call(*args, **options))

    def wait_and_call(self, *args, **options):
        self.threads.append(threading.current_thread().name)
        self.reached.release()
        assert self.open.wait(WAIT)
        with ONE_PROGRAM:
            return self.real(*args, **options)

    def wait(self):
        assert self.reached.acquire(timeout=WAIT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open.set()


def test_a_state_is_written_aside(opened, text, state_of, pool, monkeypatch, params):
    """It is found in memory at once and listed when its file is complete. Others work meanwhile."""
    library, state = opened(), state_of(1)
    with pytest.raises(StateMismatch, match="must hold the 19 tokens"):
        library.start_store(text(1)[:19], state)
    assert not library.catalog.writing
    kept, other, expected = library.add(text(2)).key, state_of(3), state.with_room(0)
    with Gate(monkeypatch) as gate:
        future = library.start_store(text(1), state, title="later")
        gate.wait()
        assert not future.done()
        assert [stored.key for stored in library.documents()] == [kept]
        assert library.longest([*text(1), 5]).tokens == 20
        generate(params, [1, 2, 3], state=state.with_room(20), max_new_tokens=4)
        found = pool.submit(library.load, library.longest(text(1)).key).result(WAIT)  # from memory
        assert equal(found, expected)
        assert pool.submit(library.load, kept).result(WAIT)
        assert pool.submit(library.store, text(3), other, durable=False).result(WAIT)
        assert library.start_store(text(1), state) is future  # it is written once
    key = future.result(WAIT)
    assert gate.threads == ["jshadow-library-write_0"]
    assert [(stored.key, stored.title) for stored in library.documents()][-1] == (key, "later")
    assert equal(opened().load(key), expected)


def test_a_state_that_is_written_aside_is_found_only_where_it_is(opened, text, state_of, monkeypatch, pool):
    library, state = opened(limits={"device": 0, "host": 0}), state_of(1)
    key = library.identity.key(np.asarray(text(1), np.int32))
    with Gate(monkeypatch) as gate:
        future = library.start_store(text(1), state)
        gate.wait()
        assert library.longest(text(1)) is None
        loaded, removed = pool.submit(library.load, key), pool.submit(library.remove, key)
        assert not loaded.done()
        assert not removed.done()
    future.result(WAIT)
    with contextlib.suppress(CheckpointError):  # removed before it was read
        assert equal(loaded.result(WAIT), state.with_room(0))
    removed.result(WAIT)
    assert library.documents() == []


def test_nothing_is_hashed_or_written_under_a_lock(opened, text, state_of, monkeypatch):
    """A lock that another thread can take is not held."""
    library, again, calls = opened(limits={"device": 0, "host": 0}), opened(), []
    key, state = library.add(text(1)).key, state_of(2)
    locks = [lock for one in (library, again) for lock in (one.work, one.catalog.lock)]

    def is_free(lock):
        return lock.acquire(blocking=False) and not lock.release()

    def check(owner, name):
        def wrapped(*args):
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                calls.extend(other.map(is_free, locks))
            return real(*args)

        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, wrapped)

    check(saved, "sha256")
    check(saved_state, "staged_file")
    library.store(text(2), state)
    count = len(calls)
    check(saved_file, "sha256")
    check(saved_file.TensorFile, "read")
    library.files.verified.clear()
    library.load(key)
    assert min(count, len(calls) - count) > 6
    count = len(calls)
    assert len(again.documents()) == 2, "the headers of new files are read"
    assert len(calls) > count + 6
    assert all(calls)


@pytest.mark.parametrize("remote", [False, True], ids=["directory", "object store"])
def test_no_thread_asks_the_disk_under_a_lock(opened, text, state_of, size, tmp_path, remote):
    """States move between all tiers, are written, read, replaced and removed."""
    state, under, calls = state_of(3), [], []
    limits = {"device": 0, "host": size.total}
    place = "library"
    if remote:
        pytest.importorskip("obstore")
        place, limits = (tmp_path / "store").as_uri(), limits | {"disk": 0, "disk_folder": tmp_path / "copies"}
    library, other = opened(place, limits=limits), opened(place)

    def note(name):
        calls.append(name)
        under.extend(name for lock in (library.work, library.catalog.lock) if lock._is_owned())

    with before_disk_calls(tmp_path, note):
        keys = [library.add(text(seed)).key for seed in (1, 2)]
        assert library.start_store(text(3), state).result(WAIT)
        library.store(text(4), state_of(4), durable=False)
        assert [library.load(key) for key in keys]
        assert library.prepare(keys[0]).result(WAIT)
        other.look()
        other.remove(keys[1])
        library.look()
        assert library.longest(text(2)) is None
        library.files.directory.path(keys[0]).unlink(missing_ok=True)
        library.remove(library.longest(text(3)).key)
        assert library.tier_bytes()
        assert len(library.documents()) == (2 if remote else 1)
    assert len(calls) > 50
    assert under == []


def test_arrays_on_the_device_are_copied_before_the_call_returns(opened, text, state_of, monkeypatch):
    """Offloaded rows are in host memory already. The thread that writes reads them there."""
    library, state, seen, real = opened(), state_of(1), [], saved_state.host_array

    def noted(leaf):
        memory = getattr(getattr(leaf, "sharding", None), "memory_kind", "numpy")
        seen.append((threading.current_thread().name, memory))
        return real(leaf)

    monkeypatch.setattr(saved_state, "host_array", noted)
    library.start_store(text(1), state).result(WAIT)
    assert {memory for thread, memory in seen if thread.startswith("jshadow-")} == {"numpy", "pinned_host"}
    assert {memory for thread, memory in seen if not thread.startswith("jshadow-")} == {"device"}


def test_files_are_written_one_after_the_other_within_the_limit(opened, text, state_of, pool, monkeypatch):
    first, second = state_of(1), state_of(2)
    one = opened("other").files.directory.used() // 2
    library = opened(limits={"disk": one + 2**17})  # the upper bound of one file
    with Gate(monkeypatch) as gate:
        stored = library.start_store(text(1), first), pool.submit(library.store, text(2), second)
        gate.wait()
        library.files.directory.limit = one + 100
    stored[0].result(WAIT)
    with pytest.raises(CapacityError, match=rf"limits\.disk={one + 100} .* beside \d+ bytes of stored states"):
        stored[1].result(WAIT)
    library.files.directory.limit = None
    library.start_store(text(2), second).result(WAIT)
    assert len(library.files.directory.files()) == 2


def test_only_so_many_bytes_wait_to_be_written(opened, text, state_of, size, pool, monkeypatch):
    """A further state is refused at once, and `store` waits."""
    library, states = opened(limits={"writing": 3 * size.total}), [state_of(seed) for seed in range(5)]
    with Gate(monkeypatch) as gate:
        futures = [library.start_store(text(seed), states[seed]) for seed in range(4)]
        message = rf"limits\.writing={3 * size.total} .* a state of {size.total} bytes beside {3 * size.total}$"
        with pytest.raises(CapacityError, match=message):
            futures.pop().result(0)
        assert library.longest(text(3)) is None
        patient = pool.submit(library.store, text(4), states[4])
        gate.wait()
        assert not patient.done()
        assert library.longest(text(4)) is None
    keys = [future.result(WAIT) for future in [*futures, patient]]
    assert [stored.key for stored in library.documents()] == keys
    library.start_store(text(3), states[3]).result(WAIT)


def test_one_state_may_wait_whatever_its_size(opened, text, state_of):
    library = opened(limits={"writing": 0})
    assert library.start_store(text(1), state_of(1)).result(WAIT)
    assert library.store(text(2), state_of(2))


def test_closing_completes_what_is_being_written(opened, text, state_of, pool, monkeypatch):
    library, state = opened(), state_of(1)
    with Gate(monkeypatch) as gate:
        future = library.start_store(text(1), state)
        gate.wait()
        closing = pool.submit(library.close)
    closing.result(WAIT)
    key = future.result(0)
    assert equal(opened().load(key), state.with_room(0))
    for use in (lambda: library.load(key), lambda: library.store(text(1), state), lambda: library.prepare(key)):
        with pytest.raises(ConfigError, match="must be open, got one that was closed"):
            use()


def test_two_threads_that_add_one_document_read_it_once(opened, text, pool, monkeypatch):
    library = opened()
    with Gate(monkeypatch, library_module, "prefill_many") as gate:
        futures = [pool.submit(library.add, text(1)) for _ in range(3)]
        gate.wait()
        other = pool.submit(library.add, text(2))  # another document is read at the same time
        gate.wait()
        assert library.documents() == []  # no lock is held
    results = {future.result(WAIT).key for future in futures}
    assert len(results) == 1
    assert other.result(WAIT).key not in results
    assert len(gate.threads) == 2
    assert not library.making


def test_a_thread_that_fails_leaves_the_document_to_the_next(opened, text, pool, monkeypatch):
    library, first, real = opened(), threading.Event(), library_module.prefill_many

    def fail(*_, **__):
        monkeypatch.setattr(library_module, "prefill_many", real)
        assert first.wait(WAIT)
        raise CheckpointError("the disk failed")

    monkeypatch.setattr(library_module, "prefill_many", fail)
    futures = [pool.submit(library.add, text(1)) for _ in range(2)]
    first.set()
    assert sorted(str(future.exception(WAIT)) for future in futures) == ["None", "the disk failed"]
    assert len(library.documents()) == 1
    assert not library.making


def test_a_question_does_not_hold_up_others(opened, text, pool, monkeypatch):
    library = opened()
    key = library.add(text(1)).key
    expected, real = library.ask(key, [1, 2, 3], max_new_tokens=4).tokens, GenerationLoop.__iter__
    with Gate(monkeypatch, GenerationLoop, "__iter__") as gate:
        gate.real = lambda loop: iter(list(real(loop)))
        asked = [pool.submit(library.ask, key, [1, 2, 3], max_new_tokens=4) for _ in range(2)]
        gate.wait()
        gate.wait()
        assert library.load(key)
        assert library.add(text(2))
    assert [future.result(WAIT).tokens for future in asked] == [expected, expected]


def test_threads_that_load_one_state(opened, text, pool):
    """Each gets the state, whether a memory tier keeps it or not."""
    key = opened().add(text(1)).key
    expected = opened().load(key)
    for limits in ({}, {"device": 0, "host": 0}, {"device": 0}):
        assert all(equal(state, expected) for state in pool.map(opened(limits=limits).load, [key] * 6)), limits


def test_a_search_while_other_threads_begin_to_write(opened, text, monkeypatch):
    """Both go through the table of what is being written. Without one lock for both, Python raises an error here.

    Another thread begins to write in the middle of the search, and waits for it.
    """
    library, others = opened(), []
    entry, catalog, tier_of = Entry(np.int32(text(1))), library.catalog, library.catalog.tier_of

    def begun_meanwhile(key):
        others.append(threading.Thread(target=catalog.begin_writing, args=(f"new {len(others)}", entry)))
        others[-1].start()
        others[-1].join(0.05)  # it ends only if nothing keeps it from the table
        return tier_of(key)

    for key in ("first", "second"):
        catalog.begin_writing(key, entry)
    monkeypatch.setattr(catalog, "tier_of", begun_meanwhile)
    assert library.longest(np.int32(text(2))) is None
    assert len(others) == 2
    for thread in others:
        thread.join(WAIT)
    assert catalog.writing.keys() == {"first", "second", "new 0", "new 1"}
    catalog.writing.clear()
