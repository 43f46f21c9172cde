"""Full tiers and full disks: a typed error with both numbers, nothing half-written, and the other states stay."""

import errno
import os

import pytest
from small_state import equal

from jshadow.engine.saved import write as saved
from jshadow.errors import CapacityError, CheckpointError
from jshadow.library.memory import size_of

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


@pytest.fixture
def size(opened, text):
    """The size of a state of 20 tokens."""
    library = opened("measured")
    return size_of(library.load(library.add(text(99)).key))


def test_the_disk_limit(opened, text):
    first = opened().add(text(1))
    taken = opened().files.directory.used()
    library = opened(limits={"disk": taken + 100, **NOTHING})
    before = files_below(library)
    message = rf"limits\.disk={taken + 100} bytes must hold the state, got a state of \d+ bytes beside {taken} bytes"
    with pytest.raises(CapacityError, match=message):
        library.add(text(2))
    assert files_below(library) == before
    assert [stored.key for stored in library.documents()] == [first.key]
    state = library.load(first.key)
    with pytest.raises(CapacityError, match=message):
        library.start_store(text(2), opened("other").load(opened("other").add(text(2)).key)).result(60)
    assert equal(library.load(first.key), state)
    other = opened(capacity=39, limits={"disk": taken + 100})  # files of all libraries in the directory count
    with pytest.raises(CapacityError, match=message):
        other.add(text(2))
    library.remove(first.key)
    large = opened(limits={"disk": 10**6, **NOTHING})
    assert large.add(text(2)).tier == "disk"


@pytest.mark.parametrize("soon", [False, True], ids=["store", "start_store"])
def test_a_disk_that_is_full_half_way(opened, text, monkeypatch, soon):
    library = opened()
    kept = library.add(text(1)).key
    state = opened("other").load(opened("other").add(text(2)).key)
    before, held = files_below(library), library.tiers.used("host")
    end = fill_disk(monkeypatch)
    with pytest.raises(CheckpointError, match="No space left on device"):
        library.start_store(text(2), state).result(60) if soon else library.store(text(2), state)
    assert files_below(library) == before
    assert [stored.key for stored in library.documents()] == [kept]
    assert library.longest(text(2)) is None
    assert library.tiers.used("host") == held
    assert not library.files.directory.reserved
    library.load(kept)
    end()
    key = library.store(text(2), state)
    assert equal(opened().load(key), state.with_room(0))


def test_a_state_that_leaves_memory_for_a_full_disk_is_forgotten(opened, text, monkeypatch, size):
    library = opened(limits={"device": 0, "host": size.total})
    states = [opened("other").load(opened("other").add(text(seed)).key) for seed in (1, 2)]
    end = fill_disk(monkeypatch)
    first, second = (
        library.store(text(seed), state, durable=False) for seed, state in zip((1, 2), states, strict=True)
    )
    library.catalog.wait(first)
    assert [(stored.key, stored.tier) for stored in library.documents()] == [(second, "host")]
    with pytest.raises(CheckpointError, match="there is no such file"):
        library.load(first)
    end()
    assert library.store(text(1), states[0], durable=False) == first
    assert {stored.key: stored.tier for stored in library.documents()} == {first: "host", second: "disk"}
    assert equal(library.load(second), states[1].with_room(0))


def test_a_state_in_memory_stays_there_if_its_file_cannot_be_written(opened, text, monkeypatch):
    library = opened()
    state = opened("other").load(opened("other").add(text(1)).key)
    key = library.store(text(1), state, durable=False)
    end = fill_disk(monkeypatch)
    with pytest.raises(CheckpointError, match="No space left"):
        library.store(text(1), state)
    assert [(stored.key, stored.tier) for stored in library.documents()] == [(key, "device")]
    end()
    library.store(text(1), state)
    assert [stored.key for stored in opened().documents()] == [key]


def test_full_tiers_send_a_state_down(opened, text, size):
    """The first tier that can hold a state gets it."""
    limits = {
        "device": {"device": size.device, "host": size.host},
        "host": {"device": size.device - 1, "host": size.total},
        "disk": {"device": size.device - 1, "host": size.total - 1},
    }
    for tier, bytes_ in limits.items():
        library = opened(f"in {tier}", limits=bytes_)
        key = library.add(text(1)).key
        assert library.documents()[0].tier == tier
        assert library.tiers.used("device") <= bytes_["device"]
        assert library.tiers.used("host") <= bytes_["host"]
        again = opened(f"in {tier}", limits=bytes_)
        assert equal(again.load(key), library.load(key))
        assert again.documents()[0].tier == tier
    # host rows alone fill the host tier, so that the device tier cannot have it either
    library = opened("host rows", limits={"device": None, "host": size.host - 1})
    assert library.add(text(1)).tier == "disk"


def test_a_state_that_fits_no_tier(opened, text, size):
    state = opened("measured").load(opened("measured").add(text(1)).key)
    library = opened(limits={"device": size.device - 1, "host": size.total - 1, "disk": 50})
    for durable in (True, False):
        with pytest.raises(CapacityError, match=r"limits\.disk=50 bytes must hold the state, got a state of \d{4,} b"):
            library.store(text(1), state, durable=durable)
    assert library.documents() == []
    assert files_below(library) == []
    assert not library.tiers.held


def test_the_least_recently_used_leaves_first(opened, text, size):
    library = opened(limits={"device": 2 * size.device, "host": 3 * size.host + size.device})
    keys = [library.add(text(seed)).key for seed in range(4)]

    def tiers():
        found = {stored.key: stored.tier for stored in library.documents()}
        return " ".join(found[key] for key in keys)

    assert tiers() == "disk host device device"
    assert [stored.key for stored in library.documents()] == keys
    library.load(keys[2])
    library.load(keys[0])
    assert tiers() == "device disk device host"
    assert [stored.key for stored in library.documents()] == [keys[index] for index in (1, 3, 2, 0)]
    library.remove(keys[2])
    library.load(keys[1])
    found = {stored.key: stored.tier for stored in library.documents()}
    assert [found[keys[index]] for index in (0, 1, 3)] == ["device", "device", "host"]
