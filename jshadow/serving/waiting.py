"""The queue of requests that wait for a row: by priority, then by arrival."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Protocol


class Prioritized(Protocol):
    """An item of the queue, with a priority."""

    @property
    def priority(self) -> int:
        """The items with the highest number come first."""


class WaitingQueue[Item: Prioritized]:
    """Items by priority, and items of one priority by arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, _, item in sorted(self._heap, key=lambda entry: entry[:2]))

    def push(self, item: Item) -> None:
        """Add an item."""
        heapq.heappush(self._heap, (-item.priority, next(self._arrivals), item))

    def remove(self, item: Item) -> bool:
        """Remove an item. Return whether it was in the queue."""
        kept = [entry for entry in self._heap if entry[2] is not item]
        found = len(kept) < len(self._heap)
        if found:
            self._heap = kept
            heapq.heapify(self._heap)
        return found
