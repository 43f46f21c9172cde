"""Text completions in OpenAI's form: whole, and as events."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jshadow.serving import Answer, Piece
from jshadow.serving.http.choices import Ended, followed, reports_of
from jshadow.serving.http.logprobs import TokenTexts, completion_logprobs
from jshadow.serving.http.schemas import CompletionRequest
from jshadow.serving.http.service import Service
from jshadow.serving.http.usage import total_usage, usage_of


class Completion:
    """The answers to the prompts of one request. Choice number c of prompt p has the index p * n + c."""

    def __init__(self, service: Service, body: CompletionRequest, answers: Sequence[Answer]) -> None:
        """Take the answers of all choices of all prompts."""
        self.service, self.body, self.answers = service, body, answers
        self.texts = [TokenTexts(service.params.tokenizer) for _ in answers]
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    def _usage(self) -> dict[str, Any]:
        reports, count = reports_of(self.answers), self.body.n or 1
        groups = [reports[first : first + count] for first in range(0, len(reports), count)]
        return total_usage([usage_of(group) for group in groups])

    def _choice(self, index: int, text: str, pieces: list[Piece], finish: str | None) -> dict[str, Any]:
        asked = self.body.logprobs is not None and pieces
        logprobs = completion_logprobs(pieces, self.texts[index]) if asked else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the response."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for index, item in followed(self.answers):
            if isinstance(item, Piece):
                pieces[index].append(item)
        ends = zip(pieces, reports_of(self.answers), strict=True)
        choices = [
            await self.service.slowly(self._choice, index, "".join(one.text for one in held), held, report.finish)
            for index, (held, report) in enumerate(ends)
        ]
        return self.head | {"choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        more: dict[str, Any] = {"usage": None} if with_usage else {}
        async for index, item in followed(self.answers):
            if isinstance(item, Ended):
                choice = self._choice(index, "", [], item.report.finish)
            elif item.text or self.body.logprobs is not None:
                choice = self._choice(index, item.text, [item], None)
            else:
                continue
            yield self.head | {"choices": [choice]} | more
        if with_usage:
            yield self.head | {"choices": [], "usage": self._usage()}
