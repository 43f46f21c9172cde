"""The choices of one prompt: their pieces as they arrive, and their ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from jshadow.serving import Answer, AnswerReport, Piece
from jshadow.serving.http.pieces import pieces

MOST_READY = 64  # pieces that wait for the reader of all choices


class Ended(NamedTuple):
    """The end of a choice."""

    report: AnswerReport


async def followed(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece | Ended]]:
    """Yield (index, piece) of all choices as they arrive, and (index, Ended) at the end of each.

    An error of a choice ends the iteration. The pieces of a slow reader wait in the answers.
    """
    queue: asyncio.Queue[tuple[int, Piece | Ended | Exception]] = asyncio.Queue(MOST_READY)

    async def follow(index: int, answer: Answer) -> None:
        try:
            async for piece in pieces(answer):
                await queue.put((index, piece))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, Ended(answer.result(0).report)))

    tasks = [asyncio.create_task(follow(index, answer)) for index, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item, Ended)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


def reports_of(answers: Sequence[Answer]) -> list[AnswerReport]:
    """Return the figures of complete answers."""
    return [answer.result(0).report for answer in answers]
