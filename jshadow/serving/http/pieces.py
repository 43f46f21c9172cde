"""The pieces of an answer, as an asynchronous iterator."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jshadow.serving import Answer, Piece


async def pieces(answer: Answer) -> AsyncIterator[Piece]:
    """Yield the pieces of an answer while they arrive. If the request fails, its error follows the last piece."""
    loop, changed, place = asyncio.get_running_loop(), asyncio.Event(), 0

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(changed.set)

    answer.listen(notify)
    while True:
        changed.clear()
        new, done = answer.since(place)
        for piece in new:
            yield piece
        place += len(new)
        if done and not new:
            answer.result(0)  # raises the error of a request that failed
            return
        if not new:
            await changed.wait()
