"""Connections: little is read at once, tiny chunks are refused, and one on which no request comes is closed."""

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

READ_BYTES = 2**13  # of asyncio's 256 KiB, small parts would block the event loop for most of a second
MOST_CHUNKS, CHUNK_BYTES = 10_000, 16  # with more chunks of a body, so many bytes a chunk must come on average
HEAD_SECONDS = 30.0  # within which the head of the next request must be complete


class Connection(H11Protocol):
    """The connection of a client."""

    _head: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: h11.Connection = _Parser(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        # Without it a token waits until the client has acknowledged the one before, which can take 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._expect_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request. Bytes that are not yet a whole head do not end the time."""
        super().on_response_complete()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        if self._head is not None:
            self._head.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SECONDS, self._close_without_head)

    def _close_without_head(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Parser(h11.Connection):
    """A parser that refuses a body in many tiny chunks, each of which takes as long as a large one."""

    _chunks = _size = 0

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._size = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._size += len(event.data)
            if self._chunks > MOST_CHUNKS and self._size < CHUNK_BYTES * self._chunks:
                raise h11.RemoteProtocolError("chunks must not be tiny")
        return event
