"""The choices of one prompt: their pieces as they arrive, and their ends."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from jshadow.serving import Answer, AnswerReport, Piece
from jshadow.serving.http.pieces import merged


class Ended(NamedTuple):
    """The end of a choice."""

    report: AnswerReport


async def followed(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece | Ended]]:
    """Yield (index, piece) of all choices as they arrive, and (index, Ended) at the end of each."""
    async for index, piece in merged(list(answers)):
        yield index, Ended(answers[index].result(0).report) if piece is None else piece


def reports_of(answers: Sequence[Answer]) -> list[AnswerReport]:
    """Return the figures of complete answers."""
    return [answer.result(0).report for answer in answers]
