"""What the host notes about a state beside its arrays: the room that is left at least, and who is consuming it.

The notes lie in the instance's dictionary, not in fields. So they are no part of the pytree, compile nothing anew, and
are absent from every other state: a fork, a taken row, a loaded state or the result of a user's own jit has none.
"""

import contextlib
from collections.abc import Iterator

import numpy as np

from jshadow.cache.state import CONSUMED, KVState, is_deleted
from jshadow.errors import StateMismatch

ROOM, USER = "_known_room", "_user"  # keys in the dictionary of a state


def known_room(state: KVState) -> np.ndarray | None:
    """Tokens that each row can take at least, int64 [B]; None where the host does not know."""
    room: np.ndarray | None = vars(state).get(ROOM)
    return room


def note_room(state: KVState, room: np.ndarray | None) -> KVState:
    """The same state, with the tokens that each row can take at least, int64 [B], noted."""
    vars(state)[ROOM] = room
    return state


def read_room(state: KVState) -> np.ndarray:
    """Tokens that each row can take, int64 [B]. Waits for the device."""
    return np.asarray(state.room()).astype(np.int64)


@contextlib.contextmanager
def consuming(state: KVState) -> Iterator[None]:
    """Let one thread alone consume a state. A step that fails gives the state back.

    Raises:
        StateMismatch: another thread is consuming the state, or has consumed it.
    """
    user = object()
    # One call of the dictionary, so that no two threads can both be the first.
    if vars(state).setdefault(USER, user) is not user:
        raise StateMismatch("state is being consumed by another thread; give each thread a fork() of its own")
    try:
        if is_deleted(vars(state)["lengths"]):
            raise StateMismatch(CONSUMED)
        yield
    finally:
        del vars(state)[USER]
