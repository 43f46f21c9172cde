"""A store of states in tiers, from the device to an object store. States are found by their token ids."""

import concurrent.futures
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Self

import numpy as np

from jshadow.cache.state import KVState, is_deleted, same_arrays
from jshadow.cache.system_memory import available_memory
from jshadow.engine.checks import check_capacity, check_ids, check_policy, check_state
from jshadow.engine.placement import fetch_for
from jshadow.engine.saved.state import ReadState, StateContent, place_state
from jshadow.engine.types import Fitted
from jshadow.errors import CapacityError, CheckpointError, ConfigError, DocumentError, JshadowError, StateMismatch
from jshadow.library.files import Files
from jshadow.library.shelf import Entry, Identity, Stored
from jshadow.library.tiers import (
    DEVICE,
    DISK,
    HOST,
    Held,
    MemoryTiers,
    Size,
    TierLimits,
    fits,
    size_of,
    to_device,
    to_host,
)
from jshadow.planner.bytes import Workload
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.checks import check_fitted
from jshadow.policies.full import or_full
from jshadow.weights.params import Params

_MOST_READY = 4  # number of states that may wait in host memory, read and not yet loaded
_SHARE, _UNKNOWN = 4, 2**34  # default of `limits.writing`: a share of the free memory, or bytes if that is not known


@dataclasses.dataclass(frozen=True)
class _Writing:
    """A state that is being written: its entry, and the future of its key, which has the error if there is one."""

    entry: Entry
    done: Future[str]


class Catalog:
    """Which beginnings of texts are stored, and where. All methods may be called from any thread.

    No lock is held during a call of the system for a file.

    Attributes:
        entries: entries by key, the least recently used first.
        reads: futures of the files that are being read, or wait to be loaded.
        writing: the states that are being written. One without an entry is listed when its file is complete.
    """

    def __init__(self, files: Files, tier_of: Callable[[str], str | None], forget: Callable[[str], None]) -> None:
        """List the files. `tier_of` returns the tier of a state in memory, and `forget` takes it out of memory."""
        self.files, self.tier_of, self.forget = files, tier_of, forget
        self.entries: dict[str, Entry] = {}
        self.reads: dict[str, Future[ReadState]] = {}
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
        """Do what `StateStore.look` does: list the store, and read the table of each new object."""
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
        self.refresh()
        return self.entries.get(key)

    def entry(self, key: str) -> Entry:
        """Return an entry. Raises DocumentError if there is no such state."""
        entry = self.find(key)
        if entry is None:
            raise DocumentError(f"key must be that of a stored state of this library, got {key!r:.80}")
        return entry

    def stored(self) -> list[Stored]:
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
        keys = self.files.identity.keys(ids, (length for length in lengths if 0 < length <= len(ids)))
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

    def drop(self, key: str) -> None:
        """Forget an entry and what was read of it."""
        with self.lock:
            self.reads.pop(key, None)
            self.entries.pop(key, None)

    def trim(self) -> None:
        """Remove copies of objects, the least recently used first, until they fit `limits.disk`."""
        if self.files.remote is None:
            return
        directory, limit = self.files.directory, self.files.limits.disk
        with self.lock:
            order = [(key, entry) for key, entry in self.entries.items() if key not in self.reads]
        for key, entry in order:
            if fits(directory.used(), limit):
                return
            if entry.file and entry.object:
                with contextlib.suppress(CheckpointError):  # the copy stays
                    directory.remove(key)
                    entry.file = 0

    def begin_writing(self, key: str, entry: Entry) -> Future[str]:
        """Note that the file of a state is being written. Return the future of its key."""
        done: Future[str] = Future()
        with self.lock:
            self.writing[key] = _Writing(entry, done)
        return done

    def unwritten_yet(self) -> list[_Writing]:
        """Return the states that are being written."""
        with self.lock:
            return list(self.writing.values())

    def written(self, key: str, entry: Entry) -> None:
        """List a state whose file is complete, and end the future of its writing."""
        self.put(key, entry)
        self.trim()
        with self.lock:
            done = self.writing.pop(key).done
        done.set_result(key)

    def unwritten(self, key: str, entry: Entry, error: BaseException) -> None:
        """Note that a file could not be written. A state that is not listed is forgotten, or if it is not in memory."""
        with self.lock:
            done = self.writing.pop(key).done
            listed = self.entries.get(key) is entry
            if listed and self.tier_of(key) is None and not entry.file and not entry.object:
                self.drop(key)
        if not listed:
            self.forget(key)
        done.set_exception(error)

    def wait(self, key: str) -> None:
        """Wait until a state is not being written."""
        if (writing := self.writing.get(key)) is not None:
            concurrent.futures.wait([writing.done])

    def reading(self, key: str) -> Future[ReadState]:
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
        """Note that a file was read. Return whether it is listed: it is not if its file was removed meanwhile."""
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


_NO_LIMITS = TierLimits()


class StateStore:
    """The part of `Library` that stores, finds and loads states."""

    def __init__(
        self,
        place: str | os.PathLike[str],
        params: Params,
        policy: Policy | None = None,
        *,
        capacity: int,
        fetch: str = "auto",
        limits: TierLimits = _NO_LIMITS,
        fitted: Fitted | None = None,
    ) -> None:
        """Open a library, or begin one.

        Args:
            place: a directory, which need not exist, or the URL of an object store ("s3://bucket/path").
            policy: how keys and values are kept. None means ShadowKV().
            capacity: maximum number of tokens that a state can ever hold, with questions and answers.
            fetch: "auto", "resident", "device_put" or "zero_copy".
            limits: limits of the tiers in bytes.
            fitted: arrays that the policy learned, or None.

        Raises:
            CapacityError: capacity is not within the model's context.
            ConfigError: a setting is out of range, or `place` is a URL and the package obstore is missing.
            CheckpointError: `place` is not a directory, or the object store cannot be read.
        """
        check_capacity(params.config, capacity, 1)
        policy = ShadowKV() if policy is None else policy
        check_policy(policy)
        check_fitted(policy, params.config, fitted)
        self.params, self.capacity, self.fitted, self.limits = params, capacity, fitted, limits
        self.policy, _ = or_full(policy.resolve(params.config, capacity), params.config, capacity)
        self.fetch = fetch_for(params, self.policy, Workload(capacity, 0, 1, str(params.dtype), fetch)).fetch
        self.identity = Identity.of(params, self.policy, fitted, capacity, self.fetch)
        self.files = Files(place, params, self.policy, self.identity, limits)
        self.tiers = MemoryTiers[KVState](limits, to_host, self._leave)
        self.catalog = Catalog(self.files, self.tiers.tier_of, self.tiers.drop)
        free = available_memory()
        most = _UNKNOWN if free is None else free // _SHARE
        self.most_writing = most if limits.writing is None else limits.writing  # bytes of copies that wait for the disk
        self.write_pool = concurrent.futures.ThreadPoolExecutor(1, "jshadow-library-write")
        self.work = threading.RLock()  # held while states move between tiers, and never while the disk works
        self.making: dict[str, threading.Event] = {}  # the documents that are being read, by key
        self.closed = False

    def longest(self, ids: Sequence[int] | np.ndarray, *, look: bool = False) -> Stored | None:
        """Return the stored state that holds the most of the first tokens of `ids`, int [n], or None.

        `look` calls the method `look` if no known state holds all of `ids`. Then its errors can be raised.
        """
        tokens = np.asarray(ids, np.int32)
        found = self.catalog.longest(tokens)
        if look and (found is None or found.tokens < len(tokens)):
            self.look()
            found = self.catalog.longest(tokens)
        return found

    def documents(self) -> list[Stored]:
        """Return all stored states, the least recently used first, and the files that cannot be used."""
        return self.catalog.stored()

    def look(self) -> None:
        """Notice the states that other machines put into the object store and removed from it.

        The other methods do not list the store. In a directory, all methods notice the files of other processes.
        Raises CheckpointError if the object store cannot be read.
        """
        self.catalog.look()

    def tier_bytes(self) -> list[tuple[str, int, int | None]]:
        """Return the name, the used bytes and the limit in bytes (None: no limit) of device, host and disk."""
        with self.work:
            used = self.tiers.used(DEVICE), self.tiers.used(HOST)
        files = self.files.directory.used()
        limits = self.limits.device, self.limits.host, self.limits.disk
        return list(zip((DEVICE, HOST, DISK), (*used, files), limits, strict=True))

    def ids(self, key: str) -> np.ndarray:
        """Return the token ids of a stored state, int32 [n]. Raises CheckpointError if there is no such state."""
        return self.catalog.entry(key).ids

    def prepare(self, key: str) -> Future[ReadState] | Future[None]:
        """Begin to read and check the file of a state in other threads, so that `load` need not wait for it.

        The arrays wait in host memory until `load` is called, for at most a few states. The future is done when they
        are read. It has the error that `load` would raise. If the state is in memory, it is done at once.
        """
        self._check_open()
        with self.work:
            if self.tiers.tier_of(key) is None:
                return self.catalog.reading(key)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def prepared(self, key: str, read: ReadState | None) -> KVState | None:
        """Do what `load` does with what was `read`, the result of `prepare`. It does not wait for the disk.

        Return None if the state has left memory since, or if another thread has taken what was read. Then it must be
        prepared again.
        """
        self._check_open()
        try:
            state = self._ready(key, read)
        except JshadowError as error:
            self.files.pool.submit(self.catalog.failed, key, error)
            raise
        self.files.pool.submit(self.catalog.trim)
        return state

    def load(self, key: str) -> KVState:
        """Return a stored state of one row, ready for a step. Its rows have the least window.

        The library keeps the state too. So it must not be consumed: call `with_room`, `share` or `fork` first.

        Raises:
            CheckpointError: there is no such state, or its file is damaged, was removed or is of a newer version.
            StateMismatch: the file is of another model, policy, dtype, capacity or fetch mode.
            HostMemoryError: the host lacks the memory for the offloaded rows.
        """
        self._check_open()
        self.catalog.refresh()
        read = None
        while True:
            try:
                state = self._ready(key, read)
            except JshadowError as error:
                self.catalog.failed(key, error)
                raise
            if state is not None:
                self.catalog.trim()
                return state
            try:
                read = self.catalog.reading(key).result()
            except CancelledError:
                raise CheckpointError(f"state {key} cannot be read: the library was closed meanwhile") from None

    def store(
        self,
        ids: Sequence[int] | np.ndarray,
        state: KVState,
        *,
        title: str = "",
        ends: str = "",
        durable: bool = True,
    ) -> str:
        """Store a state, and return its key. The state stays usable, and later steps do not change what is stored.

        Args:
            ids: the token ids that the state holds, int [n].
            state: a state of one row, of this library's model, policy, capacity and fetch mode.
            title: a title for `documents`.
            ends: what the last tokens are, "document", "answer" or "". A question in `ask` is framed by it.
            durable: whether a file is written at once. If not, the state is written only when it leaves memory, and it
                is forgotten if the disk has no room then.

        Raises:
            StateMismatch: the state is another model's or another library's, holds another number of tokens, or was
                consumed.
            PromptError: a token id is out of range.
            CapacityError: the state fits no tier. The message has the limit and its bytes.
            CheckpointError: the file cannot be written. Nothing half-written is left.
        """
        while _total(waiting := self.catalog.unwritten_yet()) > self.most_writing // 2:
            concurrent.futures.wait([one.done for one in waiting], return_when=concurrent.futures.FIRST_COMPLETED)
        self.catalog.refresh()
        return self._begin(ids, state, {"title": title, "ends": ends}, durable, copied=False).result()

    def start_store(
        self,
        ids: Sequence[int] | np.ndarray,
        state: KVState,
        *,
        title: str = "",
        ends: str = "",
        durable: bool = True,
    ) -> Future[str]:
        """Begin to store a state as `store` does, and return the future of its key. A thread of the library writes.

        Arrays in device memory are copied to the host before this returns. It does not wait for the disk. `longest`
        finds the state at once if it is in memory. `documents` lists it when its file is complete. If the file cannot
        be written, the future has the error of `store`, and the state is forgotten. It has a CapacityError if the
        states that wait for the disk have more bytes than `limits.writing`. Raises StateMismatch and PromptError.
        """
        return self._begin(ids, state, {"title": title, "ends": ends}, durable, copied=True)

    def remove(self, key: str) -> None:
        """Forget a state, and remove its file and its object. Also a damaged file can be removed.

        Raises CheckpointError if there is no such state, or if it cannot be removed.
        """
        self.catalog.wait(key)
        self.catalog.entry(key)
        self.files.remove(key)
        with self.work:
            self.tiers.drop(key)
            self.catalog.drop(key)

    def close(self) -> None:
        """Free the memory of all states, and end the threads. States that have no file are forgotten.

        States that are being written are written completely.
        """
        self.closed = True
        self.write_pool.shutdown()
        self.files.close()
        with self.work:
            self.tiers.held.clear()
            self.catalog.reads.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Loading

    def _ready(self, key: str, read: ReadState | None) -> KVState | None:
        """Return a state that is in memory, or was read, ready for a step. None: it must be read."""
        with self.work:
            state = self._in_memory(key)
            if state is None and read is not None and "lengths" in read.tensors:  # else another thread has placed them
                size = size_of(read.expected)
                self.tiers.make_room(size)
                with self.files.directory.named(key):
                    state = place_state(read)
                if self.catalog.loaded(key, read, size):
                    self.tiers.put(key, state, size)
            return state

    def _in_memory(self, key: str) -> KVState | None:
        """Return a state that is in memory, or None. It becomes the most recently used."""
        held, entry = self.tiers.get(key), self.catalog.entries.get(key)
        if held is None:
            return None
        if is_deleted(vars(held.state)["lengths"]):  # a step has consumed it
            self.tiers.drop(key)
            if entry is not None and not entry.file and not entry.object:
                self.catalog.drop(key)
            return None
        state = self._raised(key, held)
        if entry is not None:
            self.catalog.put(key, entry)
        return state

    def _raised(self, key: str, held: Held[KVState]) -> KVState:
        """Return a state that is in memory, and move it to the device tier if it fits."""
        if held.tier == DEVICE:
            return held.state
        if self.tiers.fitting(held.size) != DEVICE:
            return to_device(held.state)
        self.tiers.drop(key)  # so that its bytes do not count while room is made
        try:
            self.tiers.make_room(held.size)
            state = to_device(held.state)
        except Exception:
            self.tiers.held[key] = held
            raise
        self.tiers.put(key, state, held.size)
        return state

    # Storing

    def _begin(
        self, ids: Sequence[int] | np.ndarray, state: KVState, note: dict[str, str], durable: bool, *, copied: bool
    ) -> Future[str]:
        """Put a state into memory, and begin to write its file. Return the future of its key."""
        self._check_open()
        tokens = check_ids(self.params.config, np.asarray(ids), (None,), "ids")
        self._check_own(state, len(tokens))
        key = self.identity.key(tokens)
        with self.work:
            writing, entry = self.catalog.writing.get(key), self.catalog.entries.get(key)
            if entry is None or entry.problem is not None:
                entry = Entry(tokens, note) if writing is None else writing.entry
            if not np.array_equal(entry.ids, tokens):
                raise StateMismatch(f"ids must be those of the stored state {key}, got others with the same key")
            least = state.with_room(0)
            entry.size = size_of(least)
            in_memory = self.tiers.put(key, least, entry.size) is not None
            if writing is not None:
                return writing.done
            if entry.file or entry.object or (in_memory and not durable):
                self.catalog.put(key, entry)
                done: Future[str] = Future()
                done.set_result(key)
                return done
            return self._begin_writing(key, entry, least, copied=copied)

    def _begin_writing(self, key: str, entry: Entry, state: KVState, *, copied: bool) -> Future[str]:
        """Give a state to the thread that writes, and return the future of its key, which has any JshadowError.

        `copied`: arrays in device memory are copied to the host now, because the caller does not wait for the future.
        Then the bytes of the state count, and must not exceed `limits.writing`, unless it waits alone.
        """
        waiting = self.catalog.unwritten_yet()
        done = self.catalog.begin_writing(key, entry)
        try:
            assert entry.size is not None
            if copied and waiting and _total(waiting) + entry.size.total > self.most_writing:
                raise CapacityError(
                    f"limits.writing={self.most_writing} bytes must hold the states that wait for the disk, got a "
                    f"state of {entry.size.total} bytes beside {_total(waiting)}"
                )
            content = self.files.content(state, entry)
            self.write_pool.submit(self._write, key, entry, content.copied() if copied else content)
        except BaseException as error:
            self.catalog.unwritten(key, entry, error)
            if not isinstance(error, JshadowError):
                raise
        return done

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
            self.catalog.unwritten(key, entry, error)
            if not isinstance(error, Exception):
                raise
        else:
            self.catalog.written(key, found)

    def _check_open(self) -> None:
        """Raise ConfigError if the library was closed."""
        if self.closed:
            raise ConfigError(f"library {self.files.directory.root} must be open, got one that was closed")

    def _leave(self, key: str, state: KVState) -> None:
        """Begin to write a state that has left memory and has no file. If there is no room for it, it is forgotten."""
        entry = self.catalog.entries.get(key)
        if entry is None or entry.file or entry.object or key in self.catalog.writing:
            return
        self._begin_writing(key, entry, state, copied=True)

    def _check_own(self, state: KVState, tokens: int) -> None:
        """Raise StateMismatch unless a state is one row of this library, and holds this number of tokens."""
        check_state(self.params, state, self.policy)
        ours, theirs = (self.capacity, self.fetch, 1), (state.capacity, state.fetch, state.batch)
        if ours != theirs:
            raise StateMismatch(f"state must have (capacity, fetch, rows) = {ours}, got {theirs}")
        if not same_arrays(self.fitted, state.fitted):
            raise StateMismatch("state must have the learned arrays (fitted) of this library, got others")
        if (length := int(np.asarray(state.lengths)[0])) != tokens:
            raise StateMismatch(f"state must hold the {tokens} tokens of ids, got {length}")


def _total(waiting: list[_Writing]) -> int:
    """Return the bytes of states that are being written."""
    return sum(0 if one.entry.size is None else one.entry.size.total for one in waiting)
