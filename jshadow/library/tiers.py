"""The memory tiers of a library: device memory and pinned host memory, with a limit of bytes for each."""

import collections
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from jshadow.cache.accounting import leaf_bytes
from jshadow.cache.records import HostArray
from jshadow.cache.state import KVState
from jshadow.engine.saved.state import is_place
from jshadow.errors import ConfigError

DEVICE, HOST, DISK, REMOTE = "device", "host", "disk", "remote"


@dataclasses.dataclass(frozen=True)
class TierLimits:
    """Limits of the tiers of a library in bytes. None means no limit, and 0 turns a tier off.

    Attributes:
        device: device memory of the states in the device tier.
        host: pinned host memory of the states in the host tier, and of the offloaded rows of those in the device tier.
        disk: files. In a directory, those of all models and policies count. For an object store, it limits the copies
            in `disk_folder`.
        disk_folder: folder for copies of objects, if the library is in an object store. None: a temporary folder, which
            `close` removes.
        writing: host memory of the states that `start_store` keeps until they are written, and of those that leave
            memory without a file. A further state is not stored, unless none waits. None: a quarter of what is free
            when the library is opened.

    Raises:
        ConfigError: a limit is neither None nor an integer of at least 0.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    disk_folder: str | os.PathLike[str] | None = None
    writing: int | None = None

    def __post_init__(self) -> None:
        for name in (DEVICE, HOST, DISK, "writing"):
            limit = getattr(self, name)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise ConfigError(f"limits.{name} must be None or a number of bytes of at least 0, got {limit!r}")


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of a state in device memory and in pinned host memory, while the state is ready for a step."""

    device: int
    host: int

    @property
    def total(self) -> int:
        return self.device + self.host


@dataclasses.dataclass
class Held[State]:
    """A state in memory."""

    state: State
    size: Size
    tier: str

    def taken(self, tier: str) -> int:
        if tier == DEVICE:
            return self.size.device if self.tier == DEVICE else 0
        return self.size.host if self.tier == DEVICE else self.size.total


class MemoryTiers[State]:
    """The states that are in memory, by key. The least recently used move down when a limit would be passed.

    A state of the device tier moves to the host tier. A state of the host tier leaves memory. If a state does not fit
    the host tier at all, it leaves memory at once.
    """

    def __init__(
        self, limits: TierLimits, lower: Callable[[State], State], leave: Callable[[str, State], None]
    ) -> None:
        """Begin with no states. `lower` moves one to the host tier. `leave` is called with one that leaves memory."""
        self.limits, self.lower, self.leave = limits, lower, leave
        self.held: collections.OrderedDict[str, Held[State]] = collections.OrderedDict()

    def used(self, tier: str) -> int:
        return sum(held.taken(tier) for held in list(self.held.values()))

    def tier_of(self, key: str) -> str | None:
        """Return the tier of a state, or None if it is not in memory."""
        held = self.held.get(key)
        return None if held is None else held.tier

    def fitting(self, size: Size) -> str | None:
        """Return the tier that a state of this size would be put into if the tiers were empty, or None."""
        host = self.limits.host
        if fits(size.device, self.limits.device) and fits(size.host, host):
            return DEVICE
        return HOST if fits(size.total, host) else None

    def make_room(self, size: Size) -> str | None:
        """Move other states down until a state of this size fits. Return the tier that it fits, or None."""
        tier = self.fitting(size)
        if tier is not None:
            new = Held(None, size, tier)
            self._settle(new.taken(DEVICE), new.taken(HOST))
        return tier

    def put(self, key: str, state: State, size: Size) -> str | None:
        """Put a state into the first tier that it fits. It is the most recently used. Return the tier, or None."""
        self.held.pop(key, None)
        tier = self.make_room(size)
        if tier is not None:
            self.held[key] = Held(self.lower(state) if tier == HOST else state, size, tier)
        return tier

    def get(self, key: str) -> Held[State] | None:
        """Return a state, which becomes the most recently used, or None."""
        held = self.held.get(key)
        if held is not None:
            self.held.move_to_end(key)
        return held

    def drop(self, key: str) -> None:
        """Forget a state. `leave` is not called. This may be called from any thread at any time."""
        self.held.pop(key, None)

    def _settle(self, device: int, host: int) -> None:
        """Move states down until `device` and `host` more bytes fit."""
        while not fits(self.used(DEVICE) + device, self.limits.device):
            if (found := self._oldest(DEVICE)) is None:
                continue
            key, held = found
            if fits(held.size.total, self.limits.host):
                held.state, held.tier = self.lower(held.state), HOST
            else:
                self._remove(key, held)
        while not fits(self.used(HOST) + host, self.limits.host):
            if (found := self._oldest(HOST)) is not None:
                self._remove(*found)

    def _oldest(self, tier: str) -> tuple[str, Held[State]] | None:
        """Return the least recently used state that takes bytes of a tier. None: all were dropped meanwhile."""
        return next(((key, held) for key, held in list(self.held.items()) if held.taken(tier)), None)

    def _remove(self, key: str, held: Held[State]) -> None:
        self.held.pop(key, None)
        self.leave(key, held.state)


def fits(size: int, limit: int | None) -> bool:
    """Whether a number of bytes is within a limit. None means no limit."""
    return limit is None or size <= limit


_PINNED = "pinned_host"


def size_of(state: KVState) -> Size:
    """Return the bytes of a state that is ready for a step. It may be abstract."""
    sizes = {False: 0, True: 0}
    for leaf in jax.tree.leaves(state, is_leaf=is_place):
        sizes[is_place(leaf) and leaf.memory == _PINNED] += sum(map(leaf_bytes, jax.tree.leaves(leaf)))
    return Size(device=sizes[False], host=sizes[True])


def to_host(state: KVState) -> KVState:
    """Copy all arrays of a state but its offloaded rows to pinned host memory. The result is not ready for a step."""
    return _moved(state, _PINNED)


def to_device(state: KVState) -> KVState:
    """Undo `to_host`. Offloaded rows stay in host memory."""
    return _moved(state, "device")


def _moved(state: KVState, memory: str) -> KVState:
    """Return a state with every array in a memory, except offloaded rows. The copies are complete when this returns."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, HostArray):
            return leaf if leaf.memory == _PINNED else HostArray(copied(leaf.array), leaf.memory)
        sharding = leaf.sharding
        return leaf if sharding.memory_kind == memory else jax.device_put(leaf, sharding.with_memory_kind(memory))

    result: KVState = jax.block_until_ready(jax.tree.map(copied, state, is_leaf=is_place))
    return result
