"""The files of a library: its directory, and the object store behind it if there is one."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine.saved.state import ReadState, Stamp, StateContent, read_state, stamp_of
from jshadow.errors import CheckpointError, StateMismatch
from jshadow.library.disk import SUFFIX, Directory
from jshadow.library.identity import Identity
from jshadow.library.remote import Remote, is_url
from jshadow.library.shelf import Entry
from jshadow.library.tiers import TierLimits, fits
from jshadow.policies import Policy
from jshadow.weights.convert.files import check_path, private_folder
from jshadow.weights.params import Params

READERS = 2  # number of states that are read at once; each is read by several threads
ATTEMPTS = 3  # how often a file is read that other processes replace meanwhile


@dataclasses.dataclass(frozen=True)
class Maker:
    """The model and the resolved policy that make the states of a library, and the identity of the states."""

    params: Params
    policy: Policy
    identity: Identity


class Files:
    """The files of a library. All methods may be called from any thread.

    Attributes:
        directory: the directory, or that of copies of objects.
        remote: the object store, or None.
        verified: stamps of the files whose digests were compared.
        pool: the threads that read.
    """

    def __init__(self, place: Any, maker: Maker, limits: TierLimits) -> None:
        """Open a directory or an object store. The arguments and errors are those of `Library`."""
        self.maker, self.limits = maker, limits
        self.remote = Remote(place, maker.identity) if is_url(place) else None
        self.temporary = contextlib.ExitStack()
        if self.remote is None:
            root, limit = check_path("place", place), limits.disk
        elif limits.disk_folder is not None:
            root, limit = check_path("limits.disk_folder", limits.disk_folder), None
        else:
            root, limit = self.temporary.enter_context(private_folder("jshadow-library")), None
        self.directory = Directory(root, maker.identity, limit)
        self.verified: set[Stamp] = set()
        self.pool = concurrent.futures.ThreadPoolExecutor(READERS, "jshadow-library")

    def content(self, state: KVState, entry: Entry) -> StateContent:
        """Return what the file of a state is to hold. Raises CheckpointError or StateMismatch as `save_state` does."""
        return StateContent.of(state, self.maker.params, [entry.ids.tolist()], entry.note)

    def write(self, key: str, content: StateContent, entry: Entry) -> None:
        """Write the file of a state, and put it into the object store if there is one.

        Raises:
            CapacityError: the file does not fit `limits.disk`.
            CheckpointError: the file or the object cannot be written. No file is left.
        """
        with self.directory.named(key):
            entry.file = self.directory.write(key, content)
        if self.remote is not None:
            try:
                entry.object = self.remote.put(key, self.directory.path(key), entry)
            except BaseException:
                self.directory.remove(key)
                entry.file = 0
                raise

    def read(self, key: str, ids: np.ndarray | None) -> ReadState:
        """Read and check the file of a state. It is fetched from the object store first if it is not on disk.

        Args:
            key: the state.
            ids: the token ids that it must hold, int32 [n]. None: they are not known.

        Raises:
            CheckpointError: there is no such state, or its file is damaged or of a newer version.
            StateMismatch: the state is of another model, policy, dtype, capacity or fetch mode, or holds other ids.
        """
        with self.directory.named(key):
            return self._read(key, ids)

    def _read(self, key: str, ids: np.ndarray | None) -> ReadState:
        path, maker = self.directory.path(key), self.maker
        if self.remote is None and not path.exists():
            path = next(iter(sorted(self.directory.root.glob(f"*/{key}{SUFFIX}"))), path)
        read = self._read_unchanged(key, path)
        if (theirs := Identity.of_record(read.record)) != maker.identity:
            expected = "capacity and fetch mode of this library, or its learned arrays"
            got = f"capacity={read.record.capacity} and fetch={read.record.fetch!r}"
            raise StateMismatch(f"{path} must have the {expected}, got {got} (identity {theirs.folder})")
        tokens = None if read.tokens is None else read.tokens[0]
        if tokens is None or maker.identity.key(tokens) != key or (ids is not None and not np.array_equal(tokens, ids)):
            raise StateMismatch(f"{path} must hold the token ids of {key}, got others")
        return read

    def _read_unchanged(self, key: str, path: Path) -> ReadState:
        """Read a file, and again if another process replaced it meanwhile, or if the copy of an object was removed."""
        for attempt in range(ATTEMPTS):
            if self.remote is not None and not path.exists():
                self.remote.fetch(key, path)
            before = stamp_of(path)
            try:
                return read_state(path, self.maker.params, self.maker.policy, self.verified)
            except CheckpointError:
                now = stamp_of(path)
                if now == before or (now is None and self.remote is None) or attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def trim(self, order: Iterable[tuple[str, Entry]]) -> None:
        """Remove copies of objects, in this order, until they fit `limits.disk`."""
        for key, entry in order:
            if fits(self.directory.used(), self.limits.disk):
                return
            if entry.file and entry.object:
                with contextlib.suppress(CheckpointError):  # the copy stays
                    self.directory.remove(key)
                    entry.file = 0

    def remove(self, key: str) -> None:
        """Remove the file and the object of a state. Raises CheckpointError if one cannot be removed."""
        if self.remote is not None:
            self.remote.remove(key)
        with self.directory.named(key):
            self.directory.remove(key)

    def close(self) -> None:
        """End the threads, and remove a temporary folder."""
        self.pool.shutdown(cancel_futures=True)
        self.temporary.close()
