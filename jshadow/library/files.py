"""The files of a library: its directory, and the object store behind it if there is one."""

import concurrent.futures
import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine.saved.state import ReadState, Stamp, StateContent, read_state, read_state_info, stamp_of
from jshadow.errors import CapacityError, CheckpointError, StateMismatch
from jshadow.library.remote import Remote, is_url
from jshadow.library.shelf import SUFFIX, Entry, Identity
from jshadow.library.tiers import TierLimits
from jshadow.policies import Policy
from jshadow.weights.convert.files import check_path, private_folder, remove_abandoned
from jshadow.weights.params import Params

_LOG = logging.getLogger(__name__)
# Upper bounds of the bytes of a file's header: for the record, and for each array.
HEADER, HEADER_ARRAY = 2**16, 2**10
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_RECENT = 10**8  # nanoseconds: after a change that is so recent, another one may have the same time


class _Directory:
    """The files of one library. All methods may be called from any thread, `write` from one at a time.

    The directory is created when the first file is written. `limit` is the maximum number of bytes of all files in it.
    """

    def __init__(self, root: Path, identity: Identity, limit: int | None) -> None:
        if root.exists() and not root.is_dir():
            raise CheckpointError(f"library {root} must be a directory, got another kind of file")
        self.root, self.identity, self.limit = root, identity, limit
        remove_abandoned(self.folder)

    @property
    def folder(self) -> Path:
        return self.root / self.identity.folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def change(self) -> int | None:
        """Return when the folder changed last, in ns, or 0 if it is missing.

        None: it changed so lately that a next change could have the same time.
        """
        try:
            time_ns = self.folder.stat().st_mtime_ns
        except OSError:
            return 0
        return time_ns if time_ns < time.time_ns() - _RECENT else None

    @contextlib.contextmanager
    def named(self, key: str) -> Iterator[None]:
        """A context manager in which errors about the file of a state name its key. The log has the path.

        The errors of a library reach the clients of a server, to whom its folders are nothing.
        """
        try:
            yield
        except (CheckpointError, StateMismatch) as error:
            _LOG.warning("%s", error)
            text = str(error).replace(str(self.path(key)), f"the file of state {key}")
            raise type(error)(
                text.replace(f"{self.root}/", "").replace(str(self.root), "the folder")
            ) from error.__cause__

    def is_gone(self, key: str) -> bool:
        """Whether it is certain that a state has no file. False if the system cannot tell."""
        try:
            self.path(key).stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError | NotADirectoryError)
        return False

    def files(self) -> dict[str, int]:
        """Return the bytes of each file of the library, by key. An empty file counts as 1 byte."""
        return {path.stem: max(1, size) for path, size in _listed(self.folder.glob(f"*{SUFFIX}"))}

    def bytes_of(self, key: str) -> int:
        """Return the bytes of a state's file, as `files` does, or 0 if there is none."""
        return sum(max(1, size) for _, size in _listed(iter([self.path(key)])))

    def used(self) -> int:
        """Return the bytes of all stored states below the directory, also those of other libraries."""
        return sum(size for _, size in _listed(self.root.glob(f"*/*{SUFFIX}")))

    def entry(self, key: str, size: int) -> Entry | None:
        """Return the entry of a file, with a problem if it cannot be used, or None if it cannot be read now."""
        try:
            with self.named(key):
                info = read_state_info(self.path(key))
                if info["tokens"] is None or len(info["tokens"]) != 1:
                    raise CheckpointError(f"{self.path(key)} must hold one row and its token ids")
                ids = np.asarray(info["tokens"][0], np.int32)
                if self.identity.key(ids) != key:
                    raise CheckpointError(f"{self.path(key)} must be named by its key {self.identity.key(ids)}")
            return Entry(ids, info["note"], size)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _PASSING:
                return None
            return Entry(np.zeros(0, np.int32), file=size, problem=str(error))

    def write(self, key: str, content: StateContent) -> int:
        if self.limit is not None:
            size, used = most_bytes(content), self.used()
            if used + size > self.limit:
                raise CapacityError(
                    f"limits.disk={self.limit} bytes must hold the state, got a state of {size} bytes beside {used} "
                    "bytes of stored states"
                )
        # The files hold the text of documents. Nobody but the user of this process may read them.
        try:
            for folder in (self.root, self.folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"file {self.path(key)} cannot be written: {error}") from error
        remove_abandoned(self.folder)
        return content.write(self.path(key), private=True)

    def remove(self, key: str) -> None:
        try:
            self.path(key).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path(key)} cannot be removed: {error.strerror}") from error


def most_bytes(content: StateContent) -> int:
    """Return an upper bound of the bytes of a file."""
    return content.nbytes + HEADER + HEADER_ARRAY * len(content.leaves)


def _listed(paths: Iterator[Path]) -> list[tuple[Path, int]]:
    """Return paths with the bytes of their files. A file that was removed meanwhile or cannot be read is left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in paths:
            with contextlib.suppress(OSError):
                found.append((path, path.stat().st_size))
    return found


_READERS = 2  # number of states that are read at once; each is read by several threads
ATTEMPTS = 3  # how often a file is read that other processes replace meanwhile


class Files:
    """The files of a library. All methods may be called from any thread.

    Attributes:
        directory: the directory, or that of copies of objects.
        remote: the object store, or None.
        verified: stamps of the files whose digests were compared.
        pool: the threads that read.
    """

    def __init__(self, place: Any, params: Params, policy: Policy, identity: Identity, limits: TierLimits) -> None:
        """Open a directory or an object store. The arguments and errors are those of `Library`."""
        self.params, self.policy, self.identity, self.limits = params, policy, identity, limits
        self.remote = Remote(place, identity) if is_url(place) else None
        self.temporary = contextlib.ExitStack()
        if self.remote is None:
            root, limit = check_path("place", place), limits.disk
        elif limits.disk_folder is not None:
            root, limit = check_path("limits.disk_folder", limits.disk_folder), None
        else:
            root, limit = self.temporary.enter_context(private_folder("jshadow-library")), None
        self.directory = _Directory(root, identity, limit)
        self.verified: set[Stamp] = set()
        self.pool = concurrent.futures.ThreadPoolExecutor(_READERS, "jshadow-library")

    def content(self, state: KVState, entry: Entry) -> StateContent:
        """Return what the file of a state is to hold. Raises CheckpointError or StateMismatch as `save_state` does."""
        return StateContent.of(state, self.params, [entry.ids.tolist()], entry.note)

    def write(self, key: str, content: StateContent, entry: Entry) -> None:
        """Write the file of a state, and put it into the object store if there is one. If that fails, no file is left.

        Raises CapacityError if the file does not fit `limits.disk`, and CheckpointError if it cannot be written.
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

        `ids` are the token ids that it must hold, int32 [n], if they are known. The errors are those of `Library.load`.
        """
        with self.directory.named(key):
            path, identity = self.directory.path(key), self.identity
            if self.remote is None and not path.exists():
                path = next(iter(sorted(self.directory.root.glob(f"*/{key}{SUFFIX}"))), path)
            read = self._read_unchanged(key, path)
            if (theirs := Identity.of_record(read.record)) != identity:
                expected = "capacity and fetch mode of this library, or its learned arrays"
                got = f"capacity={read.record.capacity} and fetch={read.record.fetch!r}"
                raise StateMismatch(f"{path} must have the {expected}, got {got} (identity {theirs.folder})")
            tokens = None if read.tokens is None else read.tokens[0]
            if tokens is None or identity.key(tokens) != key or (ids is not None and not np.array_equal(tokens, ids)):
                raise StateMismatch(f"{path} must hold the token ids of {key}, got others")
            return read

    def _read_unchanged(self, key: str, path: Path) -> ReadState:
        """Read a file, and again if another process replaced it meanwhile, or if the copy of an object was removed."""
        for attempt in range(ATTEMPTS):
            if self.remote is not None and not path.exists():
                self.remote.fetch(key, path)
            before = stamp_of(path)
            try:
                return read_state(path, self.params, self.policy, self.verified)
            except CheckpointError:
                now = stamp_of(path)
                if now == before or (now is None and self.remote is None) or attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def remove(self, key: str) -> None:
        """Remove the file and the object of a state. Raises CheckpointError if one cannot be removed."""
        if self.remote is not None:
            self.remote.remove(key)
        with self.directory.named(key):
            self.directory.remove(key)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.temporary.close()
