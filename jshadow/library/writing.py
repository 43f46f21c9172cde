"""Writing the files of states, on a thread of the library."""

import concurrent.futures
import dataclasses
from collections.abc import Callable

from jshadow.cache.host_memory import available_memory
from jshadow.cache.state import KVState
from jshadow.engine.saved.state import StateContent
from jshadow.errors import CapacityError, JshadowError
from jshadow.library.catalog import Catalog, Writing
from jshadow.library.files import Files
from jshadow.library.shelf import Entry

Done = concurrent.futures.Future[str]
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

    def begin(self, key: str, entry: Entry, state: KVState, *, copied: bool) -> Done:
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
        while total(waiting := self.catalog.unwritten_yet()) > self.most // 2:
            concurrent.futures.wait([one.done for one in waiting], return_when=concurrent.futures.FIRST_COMPLETED)

    def _check(self, entry: Entry, waiting: list[Writing]) -> None:
        """Raise CapacityError if too many bytes would wait. A state that waits alone may have any size."""
        assert entry.size is not None
        if waiting and total(waiting) + entry.size.total > self.most:
            raise CapacityError(
                f"limits.writing={self.most} bytes must hold the states that wait for the disk, got a state of "
                f"{entry.size.total} bytes beside {total(waiting)}"
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


def total(waiting: list[Writing]) -> int:
    """Return the bytes of states that are being written."""
    return sum(0 if one.entry.size is None else one.entry.size.total for one in waiting)
