"""Notes on a state that only the host has: a lower bound on the room of its rows, and whether a thread consumes it.

The notes are entries in the `__dict__` of the instance and not fields. So they are not part of the pytree, and cause no
compilation. A fork, a taken row, a loaded state and the result of a user's own jit begin without notes.
"""

import contextlib
from collections.abc import Iterator

import numpy as np

from jshadow.cache.state import CONSUMED, KVState, is_deleted
from jshadow.errors import StateMismatch

ROOM, USER = "_known_room", "_user"  # keys in the `__dict__` of a state


def known_room(state: KVState) -> np.ndarray | None:
    """Return the noted lower bound on the tokens that each row can still take, int64 [B], or None without a note."""
    room: np.ndarray | None = vars(state).get(ROOM)
    return room


def note_room(state: KVState, room: np.ndarray | None) -> KVState:
    """Note a lower bound on the tokens that each row can still take, int64 [B]. Return the same state."""
    vars(state)[ROOM] = room
    return state


def read_room(state: KVState) -> np.ndarray:
    """Return the number of tokens that each row can still take, int64 [B]. This waits for the device."""
    return np.asarray(state.room()).astype(np.int64)


@contextlib.contextmanager
def consuming(state: KVState) -> Iterator[None]:
    """A context manager in which one thread consumes a state. If the step fails, the state can be used again.

    Raises:
        StateMismatch: another thread is consuming the state, or has consumed it.
    """
    user = object()
    # setdefault is atomic, so only one of two threads finds its own object there.
    if vars(state).setdefault(USER, user) is not user:
        raise StateMismatch("state is being consumed by another thread; give each thread a fork() of its own")
    try:
        if is_deleted(vars(state)["lengths"]):
            raise StateMismatch(CONSUMED)
        yield
    finally:
        del vars(state)[USER]
