"""The catalog of a library: which beginnings of texts are stored, and where. It reads files, and needs no device."""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from jshadow.cache.host_memory import available_memory
from jshadow.cache.state import KVState
from jshadow.engine.saved.state import ReadState, StateContent
from jshadow.errors import CapacityError, CheckpointError, DocumentError, JshadowError, StateMismatch
from jshadow.library.files import Files
from jshadow.library.shelf import Entry, Stored
from jshadow.library.tiers import Size

_MOST_READY = 4  # number of states that may wait in host memory, read and not yet loaded


@dataclasses.dataclass(frozen=True)
class _Writing:
    """A state that is being written: its entry, and the future of its key, which has the error if there is one."""

    entry: Entry
    done: "concurrent.futures.Future[str]"


class Catalog:
    """Entries by key, in the order in which they were last used. All methods may be called from any thread.

    No lock is held during a call of the system for a file.

    Attributes:
        files: the files of the library.
        entries: the entries.
        reads: futures of the files that are being read, or wait to be loaded.
        writing: the states that are being written. One without an entry is listed when its file is complete.
    """

    def __init__(self, files: Files, tier_of: Callable[[str], str | None], forget: Callable[[str], None]) -> None:
        """List the files.

        Args:
            files: the files of the library.
            tier_of: returns the tier of a state that is in memory.
            forget: takes a state out of memory.

        Raises:
            CheckpointError: the object store cannot be read.
        """
        self.files, self.tier_of, self.forget = files, tier_of, forget
        self.entries: dict[str, Entry] = {}
        self.reads: dict[str, concurrent.futures.Future[ReadState]] = {}
        self.writing: dict[str, _Writing] = {}
        self.lock = threading.RLock()
        self.seen: int | None = None  # the time of the folder's last change that is noticed
        self.refresh()
        self.look()

    def refresh(self) -> None:
        """Notice files that other processes added and removed. A state whose file was removed is forgotten."""
        directory, change = self.files.directory, self.files.directory.change()
        if change is not None and change == self.seen:
            return
        with self.lock:
            known = dict(self.entries)
        with_file = {key: entry for key, entry in known.items() if entry.file}
        found = directory.files()
        new = {key: directory.entry(key, size) for key, size in found.items() if key not in known}
        gone = [key for key in with_file.keys() - found.keys() if directory.is_gone(key)]
        with self.lock:
            for key, entry in new.items():
                if entry is not None:
                    self.entries.setdefault(key, entry)
            for key in found.keys() & known.keys():
                known[key].file = found[key]
            for key in gone:
                with_file[key].file = 0
                if self.entries.get(key) is with_file[key] and not with_file[key].object and key not in self.writing:
                    self.drop(key)
                    self.forget(key)
            self.seen = None if None in new.values() else change

    def look(self) -> None:
        """Notice the objects that other machines put into the store and removed from it. Without a store, do nothing.

        This lists the store, and reads the table of each new object. A state whose object was removed is forgotten.

        Raises:
            CheckpointError: the object store cannot be read.
        """
        remote = self.files.remote
        if remote is None:
            return
        with self.lock:
            known = {key for key, entry in self.entries.items() if entry.object}
        found = remote.keys()
        new = remote.entries(found - known)
        with self.lock:
            for key, entry in new.items():
                listed = self.entries.setdefault(key, entry)
                listed.object = listed.object or entry.object
            gone = known - found - self.writing.keys()
        for key in gone:
            with contextlib.suppress(CheckpointError):  # the copy stays, and is listed
                self.files.directory.remove(key)
                self.drop(key)
                self.forget(key)

    def find(self, key: str) -> Entry | None:
        """Return an entry, or None if there is no such state."""
        self.refresh()
        return self.entries.get(key)

    def entry(self, key: str) -> Entry:
        """Return an entry. Raises DocumentError if there is no such state."""
        entry = self.find(key)
        if entry is None:
            raise DocumentError(f"key must be that of a stored state of this library, got {key!r:.80}")
        return entry

    def stored(self) -> list[Stored]:
        """Return the descriptions of all entries, the least recently used first."""
        self.refresh()
        with self.lock:
            return [entry.stored(key, self.tier_of(key)) for key, entry in self.entries.items()]

    def longest(self, ids: np.ndarray) -> Stored | None:
        """Return the usable state that holds the most of the first tokens of `ids`, int32 [n], or None.

        The ids are hashed once, up to the longest stored length. The ids of the entry are compared too. A state that is
        being written counts while it is in memory.
        """
        self.refresh()
        with self.lock:
            held = {key: writing.entry for key, writing in self.writing.items() if self.tier_of(key) is not None}
            usable = {key: entry for key, entry in (self.entries | held).items() if entry.problem is None}
        lengths = {len(entry.ids) for entry in usable.values()}
        keys = self.files.maker.identity.keys(ids, (length for length in lengths if 0 < length <= len(ids)))
        for length in sorted(keys, reverse=True):
            entry = usable.get(key := keys[length])
            if entry is not None and np.array_equal(entry.ids, ids[:length]):
                return entry.stored(key, self.tier_of(key))
        return None

    def put(self, key: str, entry: Entry) -> None:
        """Add or replace an entry. It is the most recently used."""
        with self.lock:
            self.entries.pop(key, None)
            self.entries[key] = entry

    def trim(self) -> None:
        """Remove copies of objects, the least recently used first, until they fit `limits.disk`."""
        if self.files.remote is not None:
            with self.lock:
                order = [(key, entry) for key, entry in self.entries.items() if key not in self.reads]
            self.files.trim(order)

    def begin_writing(self, key: str, entry: Entry) -> "concurrent.futures.Future[str]":
        """Note that the file of a state is being written. Return the future of its key."""
        done: concurrent.futures.Future[str] = concurrent.futures.Future()
        with self.lock:
            self.writing[key] = _Writing(entry, done)
        return done

    def unwritten_yet(self) -> list[_Writing]:
        """Return the states that are being written."""
        with self.lock:
            return list(self.writing.values())

    def written(self, key: str, entry: Entry) -> "concurrent.futures.Future[str]":
        """List a state whose file is complete. Return the future of its writing."""
        with self.lock:
            self.put(key, entry)
        self.trim()
        with self.lock:
            return self.writing.pop(key).done

    def unwritten(self, key: str, entry: Entry) -> "tuple[bool, concurrent.futures.Future[str]]":
        """Note that a file could not be written. A state that is not in memory is forgotten.

        Return whether the state is still listed, and the future of its writing.
        """
        with self.lock:
            done = self.writing.pop(key).done
            listed = self.entries.get(key) is entry
            if listed and self.tier_of(key) is None and not entry.file and not entry.object:
                self.drop(key)
            return listed, done

    def wait(self, key: str) -> None:
        """Wait until a state is not being written."""
        if (writing := self.writing.get(key)) is not None:
            concurrent.futures.wait([writing.done])

    def drop(self, key: str) -> None:
        """Forget an entry and what was read of it."""
        with self.lock:
            self.reads.pop(key, None)
            self.entries.pop(key, None)

    def reading(self, key: str) -> "concurrent.futures.Future[ReadState]":
        """Return the future of a file that is being read, and begin to read it if it is not.

        A reading that fails is forgotten, so that the next one tries again.
        """
        with self.lock:
            if key not in self.reads:
                entry = self.entries.get(key)
                ids = None if entry is None or entry.problem is not None else entry.ids
                done = [old for old, read in self.reads.items() if read.done()]
                for old in done[: max(0, len(done) + 1 - _MOST_READY)]:
                    del self.reads[old]
                self.reads[key] = self.files.pool.submit(self._read, key, ids)
            return self.reads[key]

    def _read(self, key: str, ids: np.ndarray | None) -> ReadState:
        self.wait(key)
        try:
            return self.files.read(key, ids)
        except Exception as error:
            self.failed(key, error)
            raise

    def loaded(self, key: str, read: ReadState, size: Size) -> bool:
        """Note that a file was read and makes a state of this size.

        Return whether the state is listed. It is not if its file was removed meanwhile.
        """
        assert read.tokens is not None
        with self.lock:
            self.reads.pop(key, None)
            entry, remote = self.entries.get(key), self.files.remote is not None
            if entry is None and not remote:
                return False
            entry = entry or Entry(read.tokens[0])
            entry.ids, entry.problem, entry.size = read.tokens[0], None, size
            entry.file = read.stamp[2]
            entry.object = entry.object or (entry.file if remote else 0)
            self.put(key, entry)
            return True

    def failed(self, key: str, error: Exception) -> None:
        """Note that the file of a state cannot be used. If it is the copy of an object, it is removed.

        A file that the system could not read is not noted, because it may be readable the next time.
        """
        directory, entry = self.files.directory, self.entries.get(key)
        with self.lock:
            self.reads.pop(key, None)
        passing = isinstance(error.__cause__, OSError) and directory.bytes_of(key) > 0
        if entry is None or passing or not isinstance(error, CheckpointError | StateMismatch):
            return
        entry.problem = str(error)
        if self.files.remote is not None:
            directory.remove(key)
        entry.file = directory.bytes_of(key)
        if not entry.file and not entry.object:
            self.drop(key)


_Done = concurrent.futures.Future[str]
SHARE, UNKNOWN = 4, 2**34  # default of `limits.writing`: a share of the free memory, or bytes if that is not known


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes states. The methods may be called from any thread. Only `wait` waits for the disk.

    Attributes:
        files: the files of the library.
        catalog: its catalog.
        forget: called with the key of a state that cannot be written and is not listed. It is to leave memory.
        most: bytes of the copied states that may wait for the disk.
        pool: the thread that writes.
    """

    files: Files
    catalog: Catalog
    forget: Callable[[str], None]
    most: int
    pool: concurrent.futures.ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1, "jshadow-library-write")
    )

    @classmethod
    def of(cls, files: Files, catalog: Catalog, forget: Callable[[str], None]) -> "Writer":
        """Return a writer with the limit of the library or of this machine."""
        most, free = files.limits.writing, available_memory()
        return cls(files, catalog, forget, (UNKNOWN if free is None else free // SHARE) if most is None else most)

    def begin(self, key: str, entry: Entry, state: KVState, *, copied: bool) -> _Done:
        """Give a state to the thread that writes, and return the future of its key.

        All errors are told on the future, also that of a state beyond `most`, and of a file beyond `limits.disk`.

        Args:
            key, entry: the state.
            state: its arrays.
            copied: whether arrays in device memory are copied to the host now, because the caller does not wait for the
                future. Then the bytes of the state count.
        """
        waiting = self.catalog.unwritten_yet()
        done = self.catalog.begin_writing(key, entry)
        try:
            if copied:
                self._check(entry, waiting)
            content = self.files.content(state, entry)
            self.pool.submit(self._write, key, entry, content.copied() if copied else content)
        except BaseException as error:
            self._fail(key, entry, error)
            if not isinstance(error, JshadowError):
                raise
        return done

    def wait(self) -> None:
        """Wait until at most half of the bytes that may wait for the disk do."""
        while _total(waiting := self.catalog.unwritten_yet()) > self.most // 2:
            concurrent.futures.wait([one.done for one in waiting], return_when=concurrent.futures.FIRST_COMPLETED)

    def _check(self, entry: Entry, waiting: list[_Writing]) -> None:
        """Raise CapacityError if too many bytes would wait. A state that waits alone may have any size."""
        assert entry.size is not None
        if waiting and _total(waiting) + entry.size.total > self.most:
            raise CapacityError(
                f"limits.writing={self.most} bytes must hold the states that wait for the disk, got a state of "
                f"{entry.size.total} bytes beside {_total(waiting)}"
            )

    def _write(self, key: str, entry: Entry, content: StateContent) -> None:
        try:
            found = self.catalog.find(key)
            if found is not None and found.problem is not None:
                self.files.remove(key)
                self.catalog.drop(key)
                found = None
            if found is None or not (found.file or found.object):  # else another process has written it
                self.files.write(key, content, entry)
                found = entry
            found.size = entry.size
        except BaseException as error:
            self._fail(key, entry, error)
            if not isinstance(error, Exception):
                raise
        else:
            self.catalog.written(key, found).set_result(key)

    def _fail(self, key: str, entry: Entry, error: BaseException) -> None:
        listed, done = self.catalog.unwritten(key, entry)
        if not listed:
            self.forget(key)
        done.set_exception(error)


def _total(waiting: list[_Writing]) -> int:
    """Return the bytes of states that are being written."""
    return sum(0 if one.entry.size is None else one.entry.size.total for one in waiting)
