"""Full tiers and full disks: a typed error with both numbers, nothing half-written, and the other states stay."""

import errno
import os

import pytest
from small_state import equal

from jshadow.engine.saved import write as saved
from jshadow.errors import CapacityError, CheckpointError, ConfigError
from jshadow.library import TierLimits

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
    other = opened(capacity=39, limits={"disk": taken + 100})  # files of all libraries in the directory count
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
    assert not library.files.directory.reserved
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
