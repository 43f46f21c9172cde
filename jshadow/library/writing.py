"""Writing the files of states, on the thread that asks for it or on a thread of the library."""

import concurrent.futures
import dataclasses
from collections.abc import Callable

from jshadow.cache.state import KVState
from jshadow.engine.saved.state import StateContent
from jshadow.errors import JshadowError
from jshadow.library.catalog import Catalog
from jshadow.library.files import Files
from jshadow.library.shelf import Entry

Done = concurrent.futures.Future[str]
MOST_WAITING = 4  # number of states that may wait to be written


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes states. The methods may be called from any thread.

    Attributes:
        files: the files of the library.
        catalog: its catalog.
        forget: called with the key of a state that cannot be written and is not listed. It is to leave memory.
        pool: the thread that writes.
    """

    files: Files
    catalog: Catalog
    forget: Callable[[str], None]
    pool: concurrent.futures.ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1, "jshadow-library-write")
    )

    def begin(self, key: str, entry: Entry, state: KVState, *, copied: bool) -> "tuple[Done, Callable[[], None]]":
        """Reserve the bytes of a file, and note that it is being written. Return its future, and what writes it.

        All errors are told on the future of the key, also that of a file that exceeds `limits.disk`.

        Args:
            key, entry: the state.
            state: its arrays.
            copied: whether arrays in device memory are copied to the host now. They must be for another thread.
        """
        done = self.catalog.begin_writing(key, entry)
        try:
            content = self.files.content(state, entry)
            self.files.directory.reserve(key, state, len(entry.ids))
            ready = content.copied() if copied else content
        except BaseException as error:
            self._fail(key, entry, error)
            if not isinstance(error, JshadowError):
                raise
            return done, lambda: None
        return done, lambda: self._write(key, entry, ready)

    def wait(self) -> None:
        """Wait until few enough states are being written that another one may be copied."""
        while len(waiting := self.catalog.unwritten_yet()) >= MOST_WAITING:
            concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)

    def _write(self, key: str, entry: Entry, content: StateContent) -> None:
        try:
            self.files.write(key, content, entry)
        except BaseException as error:
            self._fail(key, entry, error)
            if not isinstance(error, Exception):
                raise
        else:
            self.catalog.written(key, entry).set_result(key)

    def _fail(self, key: str, entry: Entry, error: BaseException) -> None:
        self.files.directory.release(key)
        listed, done = self.catalog.unwritten(key, entry)
        if not listed:
            self.forget(key)
        done.set_exception(error)
