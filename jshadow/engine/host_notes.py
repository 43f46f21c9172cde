"""Notes of the host about a state: a lower bound of the room that its rows have, and the thread that is consuming it.

The notes lie in the dictionary of the instance and not in fields, so they are no part of the pytree and cause no
compilation. Every new state begins without them: a fork, a taken row, a loaded state, the result of a user's own jit.
"""

import contextlib
from collections.abc import Iterator

import numpy as np

from jshadow.cache.state import CONSUMED, KVState, is_deleted
from jshadow.errors import StateMismatch

ROOM, USER = "_known_room", "_user"  # keys in the dictionary of a state


def known_room(state: KVState) -> np.ndarray | None:
    """A lower bound of the tokens that each row can take, int64 [B]; None if the host knows none."""
    room: np.ndarray | None = vars(state).get(ROOM)
    return room


def note_room(state: KVState, room: np.ndarray | None) -> KVState:
    """Note a lower bound of the tokens that each row can take, int64 [B]. Returns the same state."""
    vars(state)[ROOM] = room
    return state


def read_room(state: KVState) -> np.ndarray:
    """Tokens that each row can take, int64 [B]. Waits for the device."""
    return np.asarray(state.room()).astype(np.int64)


@contextlib.contextmanager
def consuming(state: KVState) -> Iterator[None]:
    """Let only one thread consume a state at a time. If the step fails, the state can be used again.

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
