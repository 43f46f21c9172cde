"""Connections: little is read at once, and one on which no request comes is closed."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

READ_BYTES = (
    2**13
)  # Chunks of one byte each take the event loop 20 ms then, with the default of 256 KiB most of a second.
HEAD_SECONDS = 30.0  # within which the head of the next request must be complete


class Connection(H11Protocol):
    """The connection of a client."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
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
