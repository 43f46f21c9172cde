"""The queue of requests that wait for a row: by arrival, where a higher priority counts as an earlier one."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Protocol

AGE_SECONDS = 10.0  # by which an item counts as earlier for each step of its priority


class Prioritized(Protocol):
    """An item of the queue, with a priority and the time of its arrival."""

    arrived: float  # in seconds

    @property
    def priority(self) -> int:
        """An item with a higher number comes before those that arrived a short time earlier."""


class WaitingQueue[Item: Prioritized]:
    """Items by priority, and items of one priority by arrival. No item waits for ever, because its age counts too."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, _, item in sorted(self._heap, key=lambda entry: entry[:2]))

    def push(self, item: Item) -> None:
        """Add an item."""
        heapq.heappush(self._heap, (item.arrived - AGE_SECONDS * item.priority, next(self._arrivals), item))

    def remove(self, item: Item) -> bool:
        """Remove an item. Return whether it was in the queue."""
        kept = [entry for entry in self._heap if entry[2] is not item]
        found = len(kept) < len(self._heap)
        if found:
            self._heap = kept
            heapq.heapify(self._heap)
        return found
