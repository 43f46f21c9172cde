"""Stored states: found by their ids, loaded bit for bit from every tier, and safe where tiers and disks are full."""

import errno
import os
import stat
import threading

import jax
import numpy as np
import pytest
from small_state import SMALL, equal

from jshadow import generate, load_state
from jshadow.engine.saved import file as saved
from jshadow.engine.saved import file as saved_file
from jshadow.engine.saved.state import bare, cache_fills, places
from jshadow.errors import CapacityError, CheckpointError, ConfigError, NumericalError
from jshadow.library import TierLimits
from jshadow.library import library as library_module
from jshadow.library.tiers import to_device, to_host
from jshadow.weights.params import init_params


def test_a_document_is_read_once_and_found_after_a_restart(opened, text, monkeypatch):
    ids, library = text(1), opened()
    stored = library.add(ids, title="A book")
    state = library.load(stored.key)
    assert (stored.tokens, stored.title, stored.tier) == (20, "A book", "device")
    assert np.asarray(state.lengths).tolist() == [20]
    assert np.asarray(state.room())[0] < 20  # the least window
    monkeypatch.setattr("jshadow.library.library.prefill_many", None)  # a second read fails
    assert library.add(ids) == stored
    again = opened()
    assert [(found.key, found.tier, found.title) for found in again.documents()] == [(stored.key, "disk", "A book")]
    assert again.add(ids).key == stored.key
    assert equal(again.load(stored.key), state)
    assert again.documents()[0].tier == "device"
    assert equal(load_state(library.files.directory.path(stored.key), library.params), state)


def test_the_longest_stored_beginning_is_found(opened, text):
    library, ids = opened(), text(2, 30)
    keys = {length: library.add(ids[:length]).key for length in (5, 12, 29)}
    library.add(text(3, 13))
    for asked, expected in ((30, 29), (29, 29), (28, 12), (12, 12), (11, 5), (5, 5), (4, None)):
        found = library.longest(ids[:asked])
        assert (None if found is None else found.key) == keys.get(expected), asked
    assert library.longest([*ids[:11], (ids[11] + 1) % 13, *ids[12:]]).tokens == 5
    assert library.longest([]) is None


@pytest.mark.parametrize(("beginning", "unused"), [(14, "prefill_many"), (11, "extend")])
def test_a_long_beginning_is_extended_and_a_short_one_is_not(opened, text, monkeypatch, beginning, unused):
    library, ids, steps = opened(), text(7, 24), []
    library.add(ids[:beginning])
    monkeypatch.setattr(f"jshadow.library.library.{unused}", None)
    state = library.load(library.add(ids, progress=steps.append).key)
    assert steps
    assert np.asarray(state.lengths).tolist() == [24]
    assert int(np.asarray(state.last)[0]) == ids[-1]


@pytest.mark.parametrize("beginning", [0, 14, 19])
def test_a_document_whose_logits_are_nan_is_not_stored(opened, text, monkeypatch, beginning):
    """Neither one that is read whole, nor one whose stored beginning is extended. It fails each time."""
    library, ids = opened(), text(7)
    if beginning:
        library.add(ids[:beginning])
    with monkeypatch.context() as patch:
        for name in ("prefill_many", "extend"):
            whole = getattr(library_module, name)

            def poisoned(*args, whole=whole, **options):
                made = whole(*args, **options)
                (logits, state), many = (made[0], True) if isinstance(made, list) else (made, False)
                made = np.full_like(np.asarray(logits), np.nan), state
                return [made] if many else made

            patch.setattr(library_module, name, poisoned)
        for _ in range(2):
            with pytest.raises(NumericalError, match="NaN in those of the document's last token"):
                library.add(ids)
            assert [stored.tokens for stored in library.documents()] == [beginning] * bool(beginning)
    assert library.add(ids).tokens == 20


def test_a_state_in_host_memory_is_moved_and_its_offloaded_rows_are_not(opened, text, size):
    library = opened(limits={"device": size.device, "host": 2 * size.total})
    first, second = (library.add(text(seed)).key for seed in (10, 11))
    assert [(stored.key, stored.tier) for stored in library.documents()] == [(first, "host"), (second, "device")]
    low = library.tiers.held[first].state
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(low)} == {"pinned_host"}
    state = library.load(first)
    assert equal(state, opened("other").load(opened("other").add(text(10)).key))
    assert [(stored.key, stored.tier) for stored in library.documents()] == [(second, "host"), (first, "device")]
    low = to_host(state)
    assert low.layers[0].host.prompt.array is state.layers[0].host.prompt.array
    assert equal(to_device(low), state)


def test_a_file_is_hashed_once_and_off_the_thread_that_loads(opened, text, monkeypatch):
    key = opened().add(text(16)).key
    library, threads, digest = opened(limits={"device": 0, "host": 0}), [], saved_file.sha256
    monkeypatch.setattr(saved_file, "sha256", lambda content: threads.append(threading.get_ident()) or digest(content))
    library.documents()
    threads.clear()
    library.prepare(key).result(60)
    assert threads
    assert threading.get_ident() not in threads
    threads.clear()
    first = library.load(key)
    assert equal(library.load(key), first)
    assert len(threads) <= 1  # the digest of the header
    path = library.files.directory.path(key)
    path.write_bytes(path.read_bytes())  # another time of change
    library.load(key)
    assert len(threads) > 2


def test_at_most_a_few_states_wait_in_memory(opened, text):
    keys = [opened().add(text(seed)).key for seed in range(20, 26)]
    library = opened()
    for key in keys:
        library.prepare(key).result(60)
    assert len(library.catalog.reads) == 4
    assert equal(library.load(keys[0]), opened().load(keys[0]))


def test_an_answer_is_that_of_generate(opened, text, params):
    library, question = opened(), [1, 2, 3]
    stored = library.add(text(30))  # 20 tokens, which leave room for 20
    reply = library.ask(stored.key, question, max_new_tokens=4, store=True)
    assert library.prompt(stored.key, question) == [*text(30), *question]
    state = library.load(stored.key).with_room(20)
    assert reply.tokens == generate(params, question, state=state, max_new_tokens=4).tokens
    again = opened()
    assert again.ask(stored.key, question, max_new_tokens=4).tokens == reply.tokens
    assert again.ask(stored.key, question, max_new_tokens=4).key is None
    assert again.ids(reply.key).tolist() == [*text(30), *question, *reply.tokens]
    mine, theirs = (places(one.load(reply.key)) for one in (again, library))
    for name in mine.keys() - cache_fills(library.load(reply.key)).keys():  # a cache is empty after loading
        assert np.array_equal(bare(mine[name]), bare(theirs[name])), name
    next_turn = again.ask(reply.key, [4], max_new_tokens=2)
    assert next_turn.tokens == generate(params, [4], state=reply.state.with_room(13), max_new_tokens=2).tokens


def test_a_stored_state_stays_whatever_becomes_of_the_caller_s(opened, text, params):
    library = opened()
    key = library.add(text(31)).key
    state = library.load(key)
    kept, other = state.fork(), opened("other", limits={"disk": 0})
    in_memory = other.store(text(31), state, durable=False)
    generate(params, [1, 2, 3], state=state.with_room(20), max_new_tokens=4)
    assert equal(other.load(in_memory), kept)
    jax.tree.map(lambda leaf: leaf.delete(), state.split()[1])  # as a step does that consumes it
    assert equal(library.load(key), kept)


NOTHING = {"device": 0, "host": 0}  # the limits of a library that keeps no state in memory


def files_below(library):
    """All files and folders of a library, by name."""
    root = library.files.directory.root
    return sorted(str(path.relative_to(root)) for path in root.rglob("*")) if root.exists() else []


def fill_disk(monkeypatch):
    """The disk has room for half of each file. Returns a function that ends this."""
    real = saved.write_payload

    def refuse(file, layout, read):
        file.write(b"0" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saved, "write_payload", refuse)
    return lambda: monkeypatch.setattr(saved, "write_payload", real)


def tiers_of(library):
    return {stored.key: stored.tier for stored in library.documents()}


def test_the_disk_limit(opened, text, state_of):
    key, state = opened().add(text(1)).key, state_of(2)
    taken = opened().files.directory.used()
    library = opened(limits={"disk": taken + 100, **NOTHING})
    # Files of all libraries in the directory count.
    other = opened(params=init_params(SMALL, seed=1), limits={"disk": taken + 100})
    before, first = files_below(library), library.load(key)
    message = rf"limits\.disk={taken + 100} bytes must hold the state, got a state of \d+ bytes beside {taken} bytes"
    for add in (
        lambda: library.add(text(2)),
        lambda: library.start_store(text(2), state).result(60),
        lambda: other.add(text(2)),
    ):
        with pytest.raises(CapacityError, match=message):
            add()
        assert files_below(library) == before
        assert [*tiers_of(library)] == [key]
        assert equal(library.load(key), first)
    library.remove(key)
    assert opened(limits={"disk": 10**6, **NOTHING}).add(text(2)).tier == "disk"


@pytest.mark.parametrize("soon", [False, True], ids=["store", "start_store"])
@pytest.mark.parametrize("held", [False, True], ids=["new", "in memory"])
def test_a_disk_that_is_full_half_way(opened, text, state_of, monkeypatch, soon, held):
    """A state that was in memory stays there."""
    library, state = opened(), state_of(2)
    kept = library.add(text(1)).key
    if held:
        library.store(text(2), state, durable=False)
    before, tiers, used = files_below(library), tiers_of(library), library.tiers.used("host")
    end = fill_disk(monkeypatch)
    with pytest.raises(CheckpointError, match="No space left on device"):
        library.start_store(text(2), state).result(60) if soon else library.store(text(2), state)
    assert files_below(library) == before
    assert tiers_of(library) == tiers
    assert bool(library.longest(text(2))) == held
    assert library.tiers.used("host") == used
    library.load(kept)
    end()
    key = library.store(text(2), state)
    assert {*tiers_of(opened())} == {kept, key}
    assert equal(opened().load(key), state.with_room(0))


def test_a_state_that_leaves_memory_for_a_full_disk_is_forgotten(opened, text, state_of, monkeypatch, size):
    library, states = opened(limits={"device": 0, "host": size.total}), [state_of(seed) for seed in (1, 2)]
    end = fill_disk(monkeypatch)
    first, second = (library.store(text(seed), states[seed - 1], durable=False) for seed in (1, 2))
    library.catalog.wait(first)
    assert tiers_of(library) == {second: "host"}
    assert library.documents()[0].bytes == size.total
    with pytest.raises(CheckpointError, match="there is no such file"):
        library.load(first)
    end()
    assert library.store(text(1), states[0], durable=False) == first
    assert tiers_of(library) == {first: "host", second: "disk"}
    assert equal(library.load(second), states[1].with_room(0))


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1"])
def test_a_limit_is_a_number_of_bytes(wrong):
    with pytest.raises(ConfigError, match=r"limits\.host must be None or a number of bytes"):
        TierLimits(host=wrong)


def test_only_the_user_reads_the_library(opened, text, tmp_path):
    """Its folders have the mode 0700, and its files 0600, whatever the process allows others."""
    before = os.umask(0)
    try:
        opened().add(text(1))
    finally:
        os.umask(before)
    found = [tmp_path / "library", *(tmp_path / "library").rglob("*")]
    assert any(path.is_file() for path in found)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in found}
