"""A store of states in tiers, from the device to an object store. States are found by their token ids."""

import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Self

import numpy as np

from jshadow.cache.state import KVState, is_deleted, same_arrays
from jshadow.engine.checks import check_capacity, check_ids, check_policy, check_state
from jshadow.engine.placement import fetch_for
from jshadow.engine.saved.state import ReadState, place_state
from jshadow.engine.types import Fitted
from jshadow.errors import CheckpointError, ConfigError, JshadowError, StateMismatch
from jshadow.library.catalog import Catalog, Writer
from jshadow.library.files import Files, Maker
from jshadow.library.shelf import Entry, Identity, Stored
from jshadow.library.tiers import DEVICE, DISK, HOST, Held, MemoryTiers, TierLimits, size_of, to_device, to_host
from jshadow.planner.bytes import Workload
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.checks import check_fitted
from jshadow.policies.full import or_full
from jshadow.weights.params import Params


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Loads states.

    Attributes:
        catalog, tiers: those of the library.
        work: the lock that is held while states move between tiers. Nothing waits for the disk under it.
    """

    catalog: Catalog
    tiers: MemoryTiers[KVState]
    work: threading.RLock

    def load(self, key: str) -> KVState:
        """Return a state that is ready for a step. The errors are those of `Library.load`."""
        self.catalog.refresh()
        read = None
        while True:
            try:
                state = self.ready(key, read)
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

    def ready(self, key: str, read: ReadState | None) -> KVState | None:
        """Return a state that is in memory, or was read, ready for a step. None: it must be read."""
        with self.work:
            state = self._in_memory(key)
            if state is None and read is not None and "lengths" in read.tensors:  # else another thread has placed them
                state = self._placed(key, read)
            return state

    # Parts. `work` is held.

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

    def _placed(self, key: str, read: ReadState) -> KVState:
        """Return a state that was read from its file, and keep it in memory if it fits."""
        size = size_of(read.expected)
        self.tiers.make_room(size)
        with self.catalog.files.directory.named(key):
            state = place_state(read)
        if self.catalog.loaded(key, read, size):
            self.tiers.put(key, state, size)
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
            params: the model.
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
        self.files = Files(place, Maker(params, self.policy, self.identity), limits)
        self.tiers = MemoryTiers[KVState](limits, to_host, self._leave)
        self.catalog = Catalog(self.files, self.tiers.tier_of, self.tiers.drop)
        self.writer = Writer.of(self.files, self.catalog, self.tiers.drop)
        self.work = threading.RLock()  # held while states move between tiers, and never while the disk works
        self.loader = _Loader(self.catalog, self.tiers, self.work)
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

        Raises:
            CheckpointError: the object store cannot be read.
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

    def prepare(self, key: str) -> "concurrent.futures.Future[ReadState] | concurrent.futures.Future[None]":
        """Begin to read and check the file of a state in other threads, so that `load` need not wait for it.

        The arrays wait in host memory until `load` is called, for at most a few states. The future is done when they
        are read. It has the error that `load` would raise. If the state is in memory, it is done at once.
        """
        self._check_open()
        with self.work:
            if self.tiers.tier_of(key) is None:
                return self.catalog.reading(key)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done

    def prepared(self, key: str, read: ReadState | None) -> KVState | None:
        """Do what `load` does, but do not wait for the disk.

        Args:
            key: the state.
            read: the result of the future of `prepare`.

        Returns:
            The state, or None if it has left memory since `prepare` or another thread has taken what was read. Then it
            must be prepared again.
        """
        self._check_open()
        try:
            state = self.loader.ready(key, read)
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
        return self.loader.load(key)

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
        self.writer.wait()
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
    ) -> "concurrent.futures.Future[str]":
        """Begin to store a state as `store` does, and return the future of its key. A thread of the library writes.

        Arrays in device memory are copied to the host before this returns. It does not wait for the disk. `longest`
        finds the state at once if it is in memory. `documents` lists it when its file is complete. If the file cannot
        be written, the future has the error of `store`, and the state is forgotten. It has a CapacityError if the
        states that wait for the disk have more bytes than `limits.writing`.

        Raises:
            StateMismatch, PromptError: as in `store`.
        """
        return self._begin(ids, state, {"title": title, "ends": ends}, durable, copied=True)

    def remove(self, key: str) -> None:
        """Forget a state, and remove its file and its object. Also a damaged file can be removed.

        Raises:
            CheckpointError: there is no such state, or it cannot be removed.
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
        self.writer.pool.shutdown()
        self.files.close()
        with self.work:
            self.tiers.held.clear()
            self.catalog.reads.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Parts. `work` is held, except in `_begin`.

    def _begin(
        self, ids: Sequence[int] | np.ndarray, state: KVState, note: dict[str, str], durable: bool, *, copied: bool
    ) -> "concurrent.futures.Future[str]":
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
                done: concurrent.futures.Future[str] = concurrent.futures.Future()
                done.set_result(key)
                return done
            return self.writer.begin(key, entry, least, copied=copied)

    def _check_open(self) -> None:
        """Raise ConfigError if the library was closed."""
        if self.closed:
            raise ConfigError(f"library {self.files.directory.root} must be open, got one that was closed")

    def _leave(self, key: str, state: KVState) -> None:
        """Begin to write a state that has left memory and has no file. If there is no room for it, it is forgotten."""
        entry = self.catalog.entries.get(key)
        if entry is None or entry.file or entry.object or key in self.catalog.writing:
            return
        self.writer.begin(key, entry, state, copied=True)

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
