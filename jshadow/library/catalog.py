"""The catalog of a library: which beginnings of texts are stored, and where. It reads files, and needs no device."""

import concurrent.futures
import threading
from collections.abc import Callable

import numpy as np

from jshadow.engine.saved.read import ReadState
from jshadow.errors import CheckpointError, JshadowError, StateMismatch
from jshadow.library.files import Files
from jshadow.library.shelf import Entry, Stored

MOST_READY = 4  # number of states that may wait in host memory, read and not yet loaded


class Catalog:
    """Entries by key, in the order in which they were last used. All methods may be called from any thread.

    Attributes:
        files: the files of the library.
        entries: the entries.
        reads: futures of the files that are being read, or wait to be loaded.
    """

    def __init__(self, files: Files, tier_of: Callable[[str], str | None]) -> None:
        """List the files. `tier_of` returns the tier of a state that is in memory. Raises CheckpointError."""
        self.files, self.tier_of = files, tier_of
        self.entries: dict[str, Entry] = {}
        self.reads: dict[str, concurrent.futures.Future[ReadState]] = {}
        self.lock = threading.RLock()
        files.refresh(self.entries, remote=True)

    def refresh(self) -> None:
        """Notice files that other processes added and removed. States that are nowhere any more are forgotten."""
        with self.lock:
            self.files.refresh(self.entries)
            for key, entry in list(self.entries.items()):
                if not entry.file and not entry.object and self.tier_of(key) is None:
                    del self.entries[key]

    def find(self, key: str) -> Entry | None:
        """Return an entry, or None if there is no such state."""
        with self.lock:
            self.refresh()
            return self.entries.get(key)

    def entry(self, key: str) -> Entry:
        """Return an entry. Raises CheckpointError if there is no such state."""
        entry = self.find(key)
        if entry is None:
            raise CheckpointError(f"key must be that of a stored state of this library, got {key!r:.80}")
        return entry

    def stored(self) -> list[Stored]:
        """Return the descriptions of all entries, the least recently used first."""
        with self.lock:
            self.refresh()
            return [entry.stored(key, self.tier_of(key)) for key, entry in self.entries.items()]

    def longest(self, ids: np.ndarray) -> Stored | None:
        """Return the usable state that holds the most of the first tokens of `ids`, int32 [n], or None.

        The ids are hashed once, up to the longest stored length. The ids of the entry are compared too.
        """
        with self.lock:
            self.refresh()
            usable = {len(entry.ids) for entry in self.entries.values() if entry.problem is None}
            identity = self.files.maker.identity
            keys = identity.keys(ids, (length for length in usable if 0 < length <= len(ids)))
            for length in sorted(keys, reverse=True):
                entry = self.entries.get(key := keys[length])
                if entry is not None and entry.problem is None and np.array_equal(entry.ids, ids[:length]):
                    return entry.stored(key, self.tier_of(key))
            return None

    def put(self, key: str, entry: Entry) -> None:
        """Add or replace an entry. It is the most recently used."""
        with self.lock:
            self.entries.pop(key, None)
            self.entries[key] = entry
            self.files.trim(self.entries.items())

    def drop(self, key: str) -> None:
        """Forget an entry and what was read of it."""
        with self.lock:
            self.reads.pop(key, None)
            self.entries.pop(key, None)

    def reading(self, key: str) -> "concurrent.futures.Future[ReadState]":
        """Return the future of a file that is being read, and begin to read it if it is not."""
        with self.lock:
            if key not in self.reads:
                entry = self.entries.get(key)
                ids = None if entry is None or entry.problem is not None else entry.ids
                done = [old for old, read in self.reads.items() if read.done()]
                for old in done[: max(0, len(done) + 1 - MOST_READY)]:
                    del self.reads[old]
                self.reads[key] = self.files.pool.submit(self.files.read, key, ids)
            return self.reads[key]

    def loaded(self, key: str, tokens: np.ndarray) -> Entry:
        """Note that a file was read and holds these token ids, int32 [n]. Return its entry."""
        with self.lock:
            self.reads.pop(key, None)
            self.refresh()
            entry = self.entries.get(key) or Entry(tokens)
            entry.ids, entry.problem, entry.file = tokens, None, self.files.directory.files().get(key, 0)
            self.put(key, entry)
            return entry

    def failed(self, key: str, error: JshadowError) -> None:
        """Note that the file of a state cannot be used. If it is the copy of an object, it is removed."""
        with self.lock:
            self.reads.pop(key, None)
            entry = self.entries.get(key)
            if entry is None or not isinstance(error, CheckpointError | StateMismatch):
                return
            entry.problem = str(error)
            if self.files.remote is not None:
                self.files.directory.remove(key)
                entry.file = 0
            self.refresh()
