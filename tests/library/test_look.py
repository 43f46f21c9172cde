"""A look at an object store: what other machines have put into it and removed from it is noticed."""

import pytest
from obstore.exceptions import GenericError
from small_state import equal

from jshadow.errors import CheckpointError
from jshadow.library import remote as remote_module


@pytest.fixture
def store(tmp_path):
    """The URL of an empty store of files."""
    return f"file://{tmp_path}/objects"


def test_a_look_notices_what_other_machines_put_and_removed(opened, text, store):
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


def test_a_look_costs_one_listing_and_the_new_tables(opened, text, store, monkeypatch):
    library, other, calls = opened(store), opened(store), []
    for seed in (1, 2):
        other.add(text(seed))
    for name in ("keys", "entry"):
        real = getattr(remote_module.Remote, name)
        monkeypatch.setattr(
            remote_module.Remote, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1]
        )
    library.look()
    assert sorted(calls) == ["entry", "entry", "keys"]
    calls.clear()
    library.look()
    assert calls == ["keys"]
    calls.clear()
    library.documents()
    library.longest(text(3))
    assert library.add(text(1)).tier == "remote"
    assert calls == []


def test_a_document_that_another_machine_has_read_is_not_read_again(opened, text, store, monkeypatch):
    library, key = opened(store), opened(store).add(text(1)).key
    monkeypatch.setattr(type(library), "_read_whole", None)
    assert library.add(text(1)).key == key


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


def test_a_look_at_a_store_that_fails(opened, text, store, monkeypatch):
    library = opened(store)
    key = library.add(text(1)).key

    def refuse(*_):
        raise GenericError("the store refuses")

    monkeypatch.setattr(library.files.remote, "store", type("Store", (), {"list": refuse})())
    with pytest.raises(CheckpointError, match="the store refuses"):
        library.look()
    assert library.longest(text(1), look=True).key == key  # it is known, so the store is not asked
