"""Loading stored states: from the tier that has them to memory in which a step can use them."""

import dataclasses
import threading
from concurrent.futures import CancelledError

from jshadow.cache.state import KVState, is_deleted
from jshadow.engine.saved.state import ReadState, place_state
from jshadow.errors import CheckpointError, JshadowError
from jshadow.library.catalog import Catalog
from jshadow.library.memory import size_of, to_device
from jshadow.library.tiers import DEVICE, Held, MemoryTiers


@dataclasses.dataclass(frozen=True)
class Loader:
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
