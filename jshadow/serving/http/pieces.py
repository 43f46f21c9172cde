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


async def merged(answers: list[Answer]) -> AsyncIterator[tuple[int, Piece | None]]:
    """Yield (index, piece) of all answers in the order in which they arrive, and (index, None) at each end."""
    queue: asyncio.Queue[tuple[int, Piece | None, BaseException | None]] = asyncio.Queue(64)

    async def follow(index: int, answer: Answer) -> None:
        error = None
        try:
            async for piece in pieces(answer):
                await queue.put((index, piece, None))
        except Exception as raised:
            error = raised
        await queue.put((index, None, error))

    tasks = [asyncio.create_task(follow(index, answer)) for index, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            index, piece, error = await queue.get()
            if error is not None:
                raise error
            left -= piece is None
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()
