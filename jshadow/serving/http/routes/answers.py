"""The routes of answers: /v1/chat/completions and /v1/completions."""

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from jshadow.errors import CapacityError
from jshadow.serving import Answer
from jshadow.serving.http.access import client_of
from jshadow.serving.http.bodies import JsonRoute
from jshadow.serving.http.calls import format_of
from jshadow.serving.http.chat import Chat, with_stops
from jshadow.serving.http.completion import Completion
from jshadow.serving.http.errors import ApiError, client_left, too_late
from jshadow.serving.http.lengths import most_new
from jshadow.serving.http.marks import thoughts_of
from jshadow.serving.http.prompts import chat_ids, prompts_of
from jshadow.serving.http.responses import ERRORS, STREAM
from jshadow.serving.http.schemas import ChatRequest, CompletionRequest, Drawing, FileContent, FilePart
from jshadow.serving.http.service import Service
from jshadow.serving.http.sse import stream_response
from jshadow.serving.http.uploads import Upload, decoded, plain_name
from jshadow.weights.templates import template_of

router = APIRouter(route_class=JsonRoute)
MOST_ANSWERS = 128  # of one request
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions. A chat goes on until its end.


@router.post("/v1/chat/completions", responses=ERRORS | STREAM)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a chat. A content part of type `file` puts a document into a message."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "logprobs must be true with top_logprobs, got false", param="logprobs")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] if body.tool_choice != "none" else []
    ids = await unless_gone(request, chat_tokens(service, body, tools), service.options.seconds)
    top = (body.top_logprobs or 0) if body.logprobs else None
    template = template_of(service.params.tokenizer, tools=bool(tools))
    calls = format_of(template)
    grammar = await unless_gone(request, service.form(body, template), service.options.seconds)
    asked, field = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, field = body.max_tokens, "max_tokens"
    most = await service.slowly(most_new, service.engine, service.library, ids, asked, field)
    client = client_of(request)
    requests = await service.slowly(service.requests, client, body, ids, most, top, grammar)
    prompt_end = service.params.tokenizer.decode(ids[-16:])
    thoughts = thoughts_of(template, prompt_end) if grammar is None else "none"
    answers = await service.submit(*with_stops(service, body, requests, calls, thoughts))
    return await respond(request, body, answers, Chat(service, body, answers, calls, thoughts))


@router.post("/v1/completions", responses=ERRORS | STREAM)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue a text, or each of several texts."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    grammar = await unless_gone(request, service.form(body), service.options.seconds)
    requests, prompts = [], prompts_of(body.prompt)
    encode = functools.partial(service.encode, special=body.add_special_tokens, plain=body.split_special_tokens)
    if len(prompts) * (body.n or 1) > MOST_ANSWERS:
        message = f"the prompts must have at most {MOST_ANSWERS} answers, got {len(prompts)} prompts with n={body.n}"
        raise ApiError(400, message, param="n")
    for prompt in prompts:
        ids = await service.slowly(encode, prompt)
        most = await service.slowly(most_new, service.engine, service.library, ids, body.max_tokens)
        if body.max_tokens is None:
            most = min(most, COMPLETION_TOKENS)
        requests += await service.slowly(service.requests, client_of(request), body, ids, most, body.logprobs, grammar)
    answers = await service.submit(*requests)
    return await respond(request, body, answers, Completion(service, body, answers))


async def chat_tokens(service: Service, body: ChatRequest, tools: list[dict]) -> list[int]:
    """Return the token ids of a chat, and of the files in it. Raises ApiError or CheckpointError."""
    return await service.slowly(prompt_of, service, body, tools, await sent_files(service, body))


async def sent_files(service: Service, body: ChatRequest) -> list[list[int]]:
    """Return the token ids of the files that are in a chat itself, in their order. Raises as `Service.text_tokens`."""
    contents = [message.content for message in body.messages if isinstance(message.content, list)]
    files = [part.file for content in contents for part in content if isinstance(part, FileContent)]
    found: list[list[int]] = []
    for file in files:
        if file.file_id is None and file.file_data is not None:
            upload = Upload(plain_name(file.filename or "file.txt"), decoded(file.file_data))
            found.append(await service.text_tokens(upload))
            check_files(service, sum(map(len, found)))
    return found


def check_files(service: Service, tokens: int) -> None:
    """Raise CapacityError if the files of a chat cannot fit. Each also has the tokens that begin a chat."""
    if tokens > 2 * service.most_tokens:
        raise CapacityError(f"the files must have at most {service.most_tokens} tokens together, got more")


def prompt_of(service: Service, body: ChatRequest, tools: list[dict], sent: list[list[int]]) -> list[int]:
    """Return the token ids of a chat. `sent` is what `sent_files` returned. Raises ApiError or CheckpointError."""
    left_files, stored = iter(sent), functools.cache(service.file_tokens)
    tokens = 0

    def file_ids(part: FilePart) -> list[int]:
        nonlocal tokens
        if part.file_id is None and part.file_data is None:
            raise ApiError(400, "file must have file_id or file_data, got neither", param="messages")
        ids = next(left_files) if part.file_id is None else stored(part.file_id)
        tokens += len(ids)
        check_files(service, tokens)
        return ids

    args = body.messages, file_ids, tools or None, service.check_length, body.chat_template_kwargs
    return chat_ids(service.params.tokenizer, *args)


async def respond(request: Request, body: Drawing, answers: list[Answer], form: Chat | Completion) -> Response:
    """Return the whole response, or a stream. A client that leaves, or time that runs out, cancels the answers."""
    service: Service = request.app.state.service

    def ended() -> None:
        service.cancel(answers)
        for answer in answers:
            if answer.complete:
                service.metrics.count(answer.result(0).report)

    if body.stream:
        return stream_response(form.events(), service.options.seconds, ended, service.metrics.count_error)
    try:
        whole = await unless_gone(request, form.whole(), service.options.seconds)
        return Response(await service.slowly(to_json, whole), media_type="application/json")
    finally:
        ended()


async def unless_gone[Result](request: Request, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """Return what `work` returns. Raises ApiError if the time is over, or if the client has left."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(left(request))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise client_left()
        raise too_late(seconds)
    finally:
        task.cancel()
        gone.cancel()


async def left(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
