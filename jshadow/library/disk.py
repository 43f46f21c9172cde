"""The disk tier: a directory with one file for each stored state, which several processes may use at once.

A state lies at `<folder>/<key>.safetensors`, where the folder is named by the identity of the library. A file is named
by its content and is written completely or not at all. So a process that finds a file can use it.
"""

import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jshadow.engine.saved.state import StateContent, read_state_info
from jshadow.errors import CapacityError, CheckpointError, StateMismatch
from jshadow.library.identity import Identity
from jshadow.library.shelf import Entry
from jshadow.weights.convert.files import remove_abandoned

LOG = logging.getLogger(__name__)
SUFFIX = ".safetensors"
# Upper bounds of the bytes of a file's header: for the record, and for each array.
HEADER, HEADER_ARRAY = 2**16, 2**10
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
RECENT = 10**8  # nanoseconds: after a change that is so recent, another one may have the same time


class Directory:
    """The files of one library. All methods may be called from any thread, `write` from one at a time."""

    def __init__(self, root: Path, identity: Identity, limit: int | None) -> None:
        """Use a directory, which is created when the first file is written.

        Args:
            root: the directory.
            identity: that of the library.
            limit: maximum number of bytes of all files below `root`, or None.

        Raises:
            CheckpointError: `root` is not a directory.
        """
        if root.exists() and not root.is_dir():
            raise CheckpointError(f"library {root} must be a directory, got another kind of file")
        self.root, self.identity, self.limit = root, identity, limit
        remove_abandoned(self.folder)

    @property
    def folder(self) -> Path:
        """The folder of the library's files."""
        return self.root / self.identity.folder

    def path(self, key: str) -> Path:
        """Return the path of a state's file, which may be missing."""
        return self.folder / f"{key}{SUFFIX}"

    def change(self) -> int | None:
        """Return the time of the folder's last change in ns, or None if the next change may have the same time.

        A folder that is missing has the time 0.
        """
        try:
            time_ns = self.folder.stat().st_mtime_ns
        except OSError:
            return 0
        return time_ns if time_ns < time.time_ns() - RECENT else None

    @contextlib.contextmanager
    def named(self, key: str) -> Iterator[None]:
        """A context manager in which errors about the file of a state name its key. The log has the path.

        The errors of a library reach the clients of a server, to whom its folders are nothing.
        """
        try:
            yield
        except (CheckpointError, StateMismatch) as error:
            LOG.warning("%s", error)
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
        return {path.stem: max(1, size) for path, size in listed(self.folder.glob(f"*{SUFFIX}"))}

    def bytes_of(self, key: str) -> int:
        """Return the bytes of a state's file, as `files` does, or 0 if there is none."""
        return sum(max(1, size) for _, size in listed(iter([self.path(key)])))

    def used(self) -> int:
        """Return the bytes of all stored states below the directory, also those of other libraries."""
        return sum(size for _, size in listed(self.root.glob(f"*/*{SUFFIX}")))

    def entry(self, key: str, size: int) -> Entry | None:
        """Return the index entry of a file. If the file cannot be used, the entry says why.

        Return None if the system cannot read the file now.
        """
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
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in PASSING:
                return None
            return Entry(np.zeros(0, np.int32), file=size, problem=str(error))

    def write(self, key: str, content: StateContent) -> int:
        """Write the file of a state, and return its bytes.

        Raises:
            CapacityError: the file does not fit the limit.
            CheckpointError: the file cannot be written, such as on a full disk.
        """
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
        """Remove the file of a state, if there is one. Raises CheckpointError if it cannot be removed."""
        try:
            self.path(key).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path(key)} cannot be removed: {error.strerror}") from error


def most_bytes(content: StateContent) -> int:
    """Return an upper bound of the bytes of a file."""
    return content.nbytes + HEADER + HEADER_ARRAY * len(content.leaves)


def listed(paths: Iterator[Path]) -> list[tuple[Path, int]]:
    """Return paths with the bytes of their files. A file that was removed meanwhile or cannot be read is left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in paths:
            with contextlib.suppress(OSError):
                found.append((path, path.stat().st_size))
    return found
