"""The windows of a state whose rows may take a given number of tokens after their prompts."""

import dataclasses
import functools
from typing import Any

import numpy as np

from jshadow.cache.spec import CacheSpec
from jshadow.errors import CapacityError
from jshadow.policies.base import LayerCache


def with_room(specs: tuple[CacheSpec, ...], room: int | None) -> tuple[CacheSpec, ...]:
    """Return the specs with windows in which every row can take `room` tokens after its prompt, of any length.

    None: return the specs as they are, so that a row may grow to the capacity.

    Raises:
        CapacityError: room is not an integer of at least 0.
    """
    check_room_size(room)
    if room is None:
        return specs
    windows = [window_with_room(spec.policy, spec.capacity, int(room)) for spec in specs]
    return tuple(dataclasses.replace(spec, window=window) for spec, window in zip(specs, windows, strict=True))


@functools.lru_cache(maxsize=256)
def window_with_room(cache: LayerCache, capacity: int, room: int) -> int:
    """Return the window in which a prompt of any length that fits the capacity can take `room` more tokens.

    A row still holds at most `capacity` tokens.
    """
    return max(cache.window_slots(min(prompt + room, capacity), prompt) for prompt in range(1, capacity + 1))


def check_room_size(room: Any) -> None:
    """Raise CapacityError unless room is None or an integer of at least 0."""
    if room is not None and (isinstance(room, bool) or not isinstance(room, int | np.integer) or room < 0):
        raise CapacityError(f"room must be an integer of at least 0, or None, got {room!r}")
