"""The queue of requests that wait for a row. Clients take turns, and the requests of one come by priority and age."""

import bisect
import heapq
import itertools
from collections.abc import Iterator
from typing import Protocol

AGE_SECONDS = 10.0  # by which an item counts as earlier for each step of its priority
MOST_TURNS = 4096  # clients whose last turn is known


class Waiting(Protocol):
    """An item of the queue."""

    arrived: float  # in seconds

    @property
    def priority(self) -> int:
        """An item with a higher number comes before those of its client that arrived a short time earlier."""

    @property
    def client(self) -> str:
        """Who asks."""


class WaitingQueue[Item: Waiting]:
    """Items by the turns of their clients, and those of one client by priority and arrival.

    The client whose last turn is the longest ago comes first, so that many requests of one client delay another one by
    few. (Nagle, RFC 970, 1985) No item waits for ever: within one client its age counts too.
    """

    def __init__(self) -> None:
        self._items: dict[str, list[tuple[float, int, Item]]] = {}
        self._last: dict[str, int] = {}  # the number of each client's last turn, from the oldest to the newest
        self._arrivals, self._turns, self._size = itertools.count(), itertools.count(1), 0

    def __len__(self) -> int:
        """Return the number of items. Any thread may ask for it, and for `count`."""
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in the order in which they would have their turns."""
        items = {client: list(entries) for client, entries in self._items.items()}
        turns = [(self._last.get(client, 0), entries[0][:2], client, 0) for client, entries in items.items()]
        heapq.heapify(turns)
        later = itertools.count(max(self._last.values(), default=0) + 1)
        while turns:
            _, _, client, place = heapq.heappop(turns)
            yield items[client][place][2]
            if place + 1 < len(items[client]):
                heapq.heappush(turns, (next(later), (0.0, 0), client, place + 1))

    def count(self, client: str) -> int:
        """Return the number of items of a client."""
        return len(self._items.get(client, ()))

    def push(self, item: Item, place: int = 0) -> None:
        """Add an item. `place` is its number among those that came with it, each of which counts as less urgent."""
        rank = item.arrived - AGE_SECONDS * (item.priority - place)
        bisect.insort(self._items.setdefault(item.client, []), (rank, next(self._arrivals), item))
        self._size += 1

    def take(self, item: Item) -> None:
        """Remove an item that has its turn."""
        self.remove(item)
        self._last.pop(item.client, None)
        self._last[item.client] = next(self._turns)
        if len(self._last) > MOST_TURNS:
            del self._last[next(iter(self._last))]

    def hold(self, item: Item) -> None:
        """Keep the turn of an item's client: no client that comes later is before it."""
        self._last.pop(item.client, None)

    def remove(self, item: Item) -> bool:
        """Remove an item. Return whether it was in the queue."""
        entries = self._items.get(item.client, [])
        kept = [entry for entry in entries if entry[2] is not item]
        if kept:
            self._items[item.client] = kept
        else:
            self._items.pop(item.client, None)
        self._size -= len(entries) - len(kept)
        return len(kept) < len(entries)
