"""The bodies and the events of the answers: text or chat, their choices, log-probabilities and usage."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from fastapi.responses import StreamingResponse

from jshadow.engine.text import UNFINISHED, TextStream, split_stops
from jshadow.serving import Answer, AnswerReport, Piece, Request
from jshadow.serving.http.errors import api_error, body_of, too_late
from jshadow.serving.http.marks import HERMES, Delta, Ending, Format, Splitter, Thoughts, Wanted, tool_call
from jshadow.serving.http.schemas import ChatRequest, CompletionRequest
from jshadow.serving.http.service import Service, pieces
from jshadow.serving.requests import Allowed
from jshadow.weights.tokenizer import decode

_MOST_READY = 64  # pieces that wait for the reader of all choices


class _Ended(NamedTuple):
    """The end of a choice."""

    report: AnswerReport


async def _followed(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece | _Ended]]:
    """Yield (index, piece) of all choices as they arrive, and (index, Ended) at the end of each.

    An error of a choice ends the iteration. The pieces of a slow reader wait in the answers.
    """
    queue: asyncio.Queue[tuple[int, Piece | _Ended | Exception]] = asyncio.Queue(_MOST_READY)

    async def follow(index: int, answer: Answer) -> None:
        try:
            async for piece in pieces(answer):
                await queue.put((index, piece))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, _Ended(answer.result(0).report)))

    tasks = [asyncio.create_task(follow(index, answer)) for index, answer in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item, _Ended)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


def _reports_of(answers: Sequence[Answer]) -> list[AnswerReport]:
    """Return the figures of complete answers."""
    return [answer.result(0).report for answer in answers]


def _usage_of(*prompts: Sequence[AnswerReport]) -> dict[str, Any]:
    """Return OpenAI's `usage` of prompts, each with the figures of its choices. The tokens of a prompt count once.

    An engine that speculates tells of it too.
    """
    reports = [report for choices in prompts for report in choices]
    read, new = sum(choices[0].prompt_tokens for choices in prompts), sum(one.generated_tokens for one in reports)
    usage: dict[str, Any] = {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": sum(choices[0].stored_tokens for choices in prompts)},
    }
    if any(one.proposed_tokens is not None for one in reports):
        kept, proposed = sum(one.accepted_tokens for one in reports), sum(one.proposed_tokens or 0 for one in reports)
        details = {"accepted_prediction_tokens": kept, "rejected_prediction_tokens": proposed - kept}
        reasons = [one.plain for one in reports if one.plain is not None]
        usage["completion_tokens_details"] = details | ({"not_speculated": reasons[0]} if reasons else {})
    return usage


def chat_logprobs(tokenizer: Any, pieces: list[Piece]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat."""
    return {"content": [_entry(tokenizer, piece) for piece in pieces], "refusal": None}


def _entry(tokenizer: Any, piece: Piece) -> dict[str, Any]:
    assert piece.logprobs is not None
    top = [_named(tokenizer, token, value) for token, value in piece.logprobs.top]
    return _named(tokenizer, piece.token, piece.logprobs.chosen) | {"top_logprobs": top}


def _named(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = decode(tokenizer, [token], special=True)
    return {"token": text, "logprob": value, "bytes": list(_bytes_of(tokenizer, token, text))}


def _bytes_of(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token whose text is `text`. A part of a character has bytes, but no text."""
    if UNFINISHED not in text:
        return text.encode()
    name = tokenizer.convert_ids_to_tokens(token)
    if code := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return bytes([int(code[1], 16)])
    table = _byte_symbols()
    return bytes(table[symbol] for symbol in name) if all(symbol in table for symbol in name) else text.encode()


@functools.cache
def _byte_symbols() -> dict[str, int]:
    """Return the byte that each symbol of a byte-level vocabulary stands for."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenTexts:
    """The texts of the tokens of one answer, in order. Joined, they are the text of the answer.

    A part of a character has no text. The last part has that of the whole character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stream = TextStream(tokenizer)  # its text has no special tokens, as that of the answer

    def push(self, token: int) -> tuple[str, int]:
        """Return the text of the next token, and where it begins in the text of the answer. A special one is named."""
        offset = len(self.stream.text)
        text = self.stream.push(token)
        if not text and not decode(self.tokenizer, [token]):
            text = decode(self.tokenizer, [token], special=True)
        return text, offset


def completion_logprobs(pieces: list[Piece], texts: TokenTexts) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a completion.

    Args:
        pieces: the next tokens of the answer.
        texts: the texts of the answer's tokens. Those of the pieces are taken from it.
    """
    tokens, offsets, tops = [], [], []
    for piece in pieces:
        text, offset = texts.push(piece.token)
        tokens.append(text)
        offsets.append(offset)
    held = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    for one in held:
        top: dict[str, float] = {}
        for token, value in one.top:  # of tokens with one text, the likeliest stays
            top.setdefault(decode(texts.tokenizer, [token], special=True), value)
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [one.chosen for one in held],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _splitter_of(service: Service, body: ChatRequest, calls: Format | None, thoughts: Thoughts) -> Splitter:
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
        splitter = _splitter_of(service, body, calls, thoughts)
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
        self.splitters = [_splitter_of(service, body, calls, thoughts) for _ in answers]
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the response."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for index, item in _followed(self.answers):
            if isinstance(item, Piece):
                pieces[index].append(item)
        choices = [await self.service.slowly(self._choice, index, held) for index, held in enumerate(pieces)]
        usage = _usage_of(_reports_of(self.answers))
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
        async for index, item in _followed(self.answers):
            if index not in begun:  # not before the first token, whose time clients measure
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""}, usage=with_usage)
            splitter = self.splitters[index]
            if isinstance(item, _Ended):
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
            usage = _usage_of(_reports_of(self.answers))
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
        reports, count = _reports_of(self.answers), self.body.n or 1
        groups = [reports[first : first + count] for first in range(0, len(reports), count)]
        return _usage_of(*groups)

    def _choice(self, index: int, text: str, pieces: list[Piece], finish: str | None) -> dict[str, Any]:
        asked = self.body.logprobs is not None and pieces
        logprobs = completion_logprobs(pieces, self.texts[index]) if asked else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the response."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for index, item in _followed(self.answers):
            if isinstance(item, Piece):
                pieces[index].append(item)
        ends = zip(pieces, _reports_of(self.answers), strict=True)
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
        async for index, item in _followed(self.answers):
            if isinstance(item, _Ended):
                choice = self._choice(index, "", [], item.report.finish)
            elif item.text or self.body.logprobs is not None:
                choice = self._choice(index, item.text, [item], None)
            else:
                continue
            yield self.head | {"choices": [choice]} | more
        if with_usage:
            yield self.head | {"choices": [], "usage": self._usage()}


_LOG = logging.getLogger(__name__)
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


DONE = "[DONE]"  # ends the streams of chats and completions


def _event(value: dict[str, Any]) -> str:
    """Return one event. It is named if the object has a type."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def stream_response(
    events: AsyncIterator[dict[str, Any]],
    seconds: float,
    ended: Callable[[], None],
    failed: Callable[[int], None],
    name: str,
    last: str | None,
) -> StreamingResponse:
    """Return a response that streams events.

    Args:
        events: the objects. An error becomes the last event.
        seconds: maximum time of the stream. After it, an error is the last event.
        ended: called at the end, also when the client has left.
        failed: called with the status that the error would have, had the stream not begun with 200.
        name: the id of the request, for the log.
        last: what follows the objects of a stream that has not failed.
    """

    async def body() -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(seconds):
                async with contextlib.aclosing(events):  # type: ignore[type-var]
                    async for value in events:
                        yield _event(value)
            if last is not None:
                yield f"data: {last}\n\n"
        except Exception as error:
            told = too_late(seconds) if isinstance(error, TimeoutError) else api_error(error)
            if told.status == 500:
                _LOG.exception("a stream has failed, that of the request %r", name)
            failed(told.status)
            yield _event(body_of(told))
        finally:
            ended()

    return StreamingResponse(body(), media_type="text/event-stream", headers=_HEADERS)
