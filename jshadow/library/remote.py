"""The remote tier: an object store that holds the same files as a directory, through the package obstore.

An object is named by its content and is never replaced. Beside the object of a state, `<key>.json` has the token ids,
the title and the number of bytes. It is written last. So a state whose JSON object is found is complete.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from jshadow.errors import CheckpointError, ConfigError
from jshadow.library.shelf import SUFFIX, Entry, Identity
from jshadow.weights.convert.files import staged_file

_LOG = logging.getLogger(__name__)
RANGE = 2**24  # bytes of one ranged read
_READERS = 8  # number of ranged reads at once
ONE_PUT = 2**32  # a larger object is put in parts, which excludes that the store itself refuses a second put
_TABLE = ".json"


def is_url(place: object) -> bool:
    """Return whether a place is the URL of an object store."""
    return isinstance(place, str) and "://" in place


class Remote:
    """The objects of one library. All methods may be called from any thread."""

    def __init__(self, url: str, identity: Identity) -> None:
        """Open an object store such as "s3://bucket/path", "gs://...", "az://..." or "file:///...".

        Raises ConfigError if the package obstore is not installed, or if it does not know such a URL.
        """
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError(f"{url} needs the package obstore: pip install 'jshadow[store]'") from error
        self.url, self.identity, self.obstore = url, identity, obstore
        place = unquote(urlsplit(url).path) if url.startswith("file:") else url
        self.hidden = f"{place.rstrip('/')}/"  # the errors of a library reach clients, to whom its place is nothing
        try:
            self.store: Any = from_url(url, mkdir=True) if url.startswith("file:") else from_url(url)
        except Exception as error:
            raise ConfigError(f"place must be the URL of an object store, got {url!r}: {error}") from error

    def name(self, key: str, suffix: str = SUFFIX) -> str:
        return f"{self.identity.folder}/{key}{suffix}"

    @contextlib.contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """A context manager that turns errors of the object store into a CheckpointError."""
        try:
            yield
        except (self.obstore.exceptions.BaseError, OSError) as error:
            _LOG.warning("%s: object %s cannot be read or written: %s", self.url, name, error)
            text = str(error).partition("\n\n")[0].replace(self.hidden, "")
            raise CheckpointError(f"object {name} cannot be read or written: {text}") from error

    def keys(self) -> set[str]:
        """Return the keys of all complete states."""
        with self.errors(self.identity.folder):
            names = [meta["path"] for batch in self.store.list(f"{self.identity.folder}/") for meta in batch]
        return {Path(name).stem for name in names if name.endswith(_TABLE)}

    def entries(self, keys: set[str]) -> dict[str, Entry]:
        with ThreadPoolExecutor(_READERS) as pool:
            return dict(zip(keys, pool.map(self.entry, keys), strict=True))

    def entry(self, key: str) -> Entry:
        """Return the entry of a state. If its table cannot be used, the entry says why."""
        name = self.name(key, _TABLE)
        try:
            with self.errors(name):
                table = json.loads(bytes(self.store.get(name).bytes()))
            ids, note = np.asarray(table["ids"], np.int32), table["note"]
            if self.identity.key(ids) != key or not isinstance(note, dict):
                raise ValueError("its ids do not have this key")
            return Entry(ids, note, object=int(table["bytes"]))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            return Entry(np.zeros(0, np.int32), object=1, problem=f"object {name} is damaged: {error}")

    def put(self, key: str, path: Path, entry: Entry) -> int:
        """Put the file of a state into the store if it is absent. Return its bytes. Raises CheckpointError."""
        size = path.stat().st_size
        table = {"ids": entry.ids.tolist(), "note": entry.note, "bytes": size}
        with self.errors(self.name(key)):
            self._create(self.name(key), path, size)
            self._create(self.name(key, _TABLE), json.dumps(table).encode(), 0)
        return size

    def _create(self, name: str, content: Any, size: int) -> None:
        with contextlib.suppress(self.obstore.exceptions.AlreadyExistsError):
            if size <= ONE_PUT:
                self.store.put(name, content, mode="create", use_multipart=False)
            elif not self._exists(name):
                self.store.put(name, content)

    def _exists(self, name: str) -> bool:
        try:
            self.store.head(name)
        except (self.obstore.exceptions.NotFoundError, FileNotFoundError):
            return False
        return True

    def fetch(self, key: str, path: Path) -> None:
        """Copy the object of a state to a file by ranged reads, several at once. Raises CheckpointError."""
        name = self.name(key)
        with self.errors(name):
            size = int(self.store.head(name)["size"])
        with staged_file(path) as fresh, fresh.open("wb") as file:
            file.truncate(size)

            def copy(start: int) -> None:
                end = min(size, start + RANGE)
                with self.errors(name):
                    content = memoryview(self.store.get_range(name, start=start, end=end))
                while content:
                    written = os.pwrite(file.fileno(), content, start)
                    content, start = content[written:], start + written

            with ThreadPoolExecutor(_READERS) as pool:
                list(pool.map(copy, range(0, size, RANGE)))

    def remove(self, key: str) -> None:
        """Remove the objects of a state, first the table. Missing objects are not an error. Raises CheckpointError."""
        for name in (self.name(key, _TABLE), self.name(key)):
            with self.errors(name), contextlib.suppress(self.obstore.exceptions.NotFoundError, FileNotFoundError):
                self.store.delete(name)
