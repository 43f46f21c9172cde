"""Chat completions in OpenAI's form: whole, and as events."""

import dataclasses
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jshadow.engine.text import split_stops
from jshadow.serving import Answer, Piece, Request
from jshadow.serving.grammar import Allowed
from jshadow.serving.http.calls import HERMES, Format, tool_call
from jshadow.serving.http.choices import Ended, followed, reports_of
from jshadow.serving.http.logprobs import chat_logprobs
from jshadow.serving.http.marks import Delta, Ending, Splitter, Thoughts, Wanted
from jshadow.serving.http.schemas import ChatRequest
from jshadow.serving.http.service import Service
from jshadow.serving.http.usage import usage_of


def splitter_of(service: Service, body: ChatRequest, calls: Format | None, thoughts: Thoughts) -> Splitter:
    """Return what splits an answer to a chat."""
    wanted = None
    if body.tools and body.tool_choice != "none":
        names = tuple(tool.function.name for tool in body.tools)
        wanted = Wanted(calls or HERMES, names, 1 if body.parallel_tool_calls is False else math.inf)
    stops, stop_ids = split_stops(body.stop, service.params.tokenizer)
    ends = frozenset(service.params.config.eos_ids).union(stop_ids)
    return Splitter(service.params.tokenizer, thoughts=thoughts, wanted=wanted, stops=stops, ends=ends)


def with_stops(
    service: Service, body: ChatRequest, requests: Sequence[Request], calls: Format | None, thoughts: Thoughts
) -> list[Request]:
    """Return the requests of a chat, so that stop strings count in the content alone."""
    texts, stop_ids = split_stops(body.stop, service.params.tokenizer)
    config = service.params.config
    tools = body.tools and body.tool_choice != "none"
    if (thoughts == "none" and not tools) or not texts or not config.eos_ids:
        return list(requests)

    def ending(allowed: Allowed | None) -> Ending:
        splitter = splitter_of(service, body, calls, thoughts)
        return Ending(splitter, config.vocab_size, sorted(config.eos_ids), allowed)

    return [
        dataclasses.replace(request, stop=stop_ids or None, allowed=ending(request.allowed)) for request in requests
    ]


class Chat:
    """The answers to one chat."""

    def __init__(
        self, service: Service, body: ChatRequest, answers: Sequence[Answer], calls: Format | None, thoughts: Thoughts
    ) -> None:
        """Take the answers of all choices. `calls` tells how they write calls, and `thoughts` where they may reason."""
        self.service, self.body, self.answers = service, body, answers
        self.tokenizer = service.params.tokenizer
        self.splitters = [splitter_of(service, body, calls, thoughts) for _ in answers]
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the response."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for index, item in followed(self.answers):
            if isinstance(item, Piece):
                pieces[index].append(item)
        choices = [await self.service.slowly(self._choice, index, held) for index, held in enumerate(pieces)]
        usage = usage_of(reports_of(self.answers))
        return self.head | {"object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        splitter = self.splitters[index]
        deltas, said = [], []
        for piece in pieces:
            said += [] if splitter.stopped else [piece]
            deltas += splitter.push(piece.token)
        deltas += splitter.finish(self.answers[index].result(0).report.finish)
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = [tool_call(delta.call) for delta in deltas if delta.call is not None]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, said) if self.body.logprobs else None,
            "finish_reason": self._finish(index),
        }

    def _finish(self, index: int) -> str:
        splitter, finish = self.splitters[index], self.answers[index].result(0).report.finish
        if splitter.stopped:
            return "stop"
        return "tool_calls" if finish == "stop" and splitter.calls else finish

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        begun: set[int] = set()
        async for index, item in followed(self.answers):
            if index not in begun:  # not before the first token, whose time clients measure
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""}, usage=with_usage)
            splitter = self.splitters[index]
            if isinstance(item, Ended):
                for delta in self._deltas(index, splitter.finish(item.report.finish)):
                    yield self._chunk(index, delta, usage=with_usage)
                yield self._chunk(index, {}, finish=self._finish(index), usage=with_usage)
                continue
            wants = self.body.logprobs and not splitter.stopped
            logprobs = chat_logprobs(self.tokenizer, [item]) if wants else None
            deltas = self._deltas(index, splitter.push(item.token))
            for delta in deltas or ([{"content": ""}] if logprobs else []):
                yield self._chunk(index, delta, logprobs=logprobs, usage=with_usage)
                logprobs = None
        if with_usage:
            usage = usage_of(reports_of(self.answers))
            yield self.head | {"object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _deltas(self, index: int, parts: list[Delta]) -> list[dict[str, Any]]:
        splitter = self.splitters[index]
        deltas: list[dict[str, Any]] = []
        first = splitter.calls - sum(part.call is not None for part in parts)
        for part in parts:
            if part.call is not None:
                deltas.append({"tool_calls": [tool_call(part.call, first)]})
                first += 1
            elif part.reasoning:
                deltas.append({"reasoning_content": part.reasoning})
            else:
                deltas.append({"content": part.content})
        return deltas

    def _chunk(
        self, index: int, delta: dict, *, logprobs: dict | None = None, finish: str | None = None, usage: bool = False
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self.head | {"object": "chat.completion.chunk", "choices": [choice]}
        return chunk | {"usage": None} if usage else chunk
