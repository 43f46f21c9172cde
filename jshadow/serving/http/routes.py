"""The routes of the server."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, UploadFile
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from jshadow.engine.text import encode
from jshadow.errors import CapacityError, CheckpointError, DocumentError
from jshadow.library import Stored
from jshadow.serving import Answer
from jshadow.serving import Request as Generation
from jshadow.serving.http.access import JsonRoute, caller_of
from jshadow.serving.http.answers import DONE, Chat, Completion, stream_response, with_stops
from jshadow.serving.http.errors import ApiError, ErrorBody, client_left, too_late
from jshadow.serving.http.marks import format_of, thoughts_of
from jshadow.serving.http.prompts import chat_ids, prompts_of
from jshadow.serving.http.responses import ResponseAnswer, ResponsesRequest, chat_request, own_fields
from jshadow.serving.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FileContent,
    FileDeleted,
    FileList,
    FileObject,
    FilePart,
    Gauge,
    ModelList,
    ModelObject,
    Status,
    TokenizeRequest,
)
from jshadow.serving.http.service import Service, end_of, file_id_of, most_new
from jshadow.serving.http.uploads import Upload, decoded, not_kept, plain_name
from jshadow.weights.templates import template_of

_TEXTS = {
    400: "A field is wrong",
    401: "The key is missing or wrong",
    404: "There is no such model or file",
    405: "The path has no such method",
    408: "The body did not arrive in time",
    409: "A stored file cannot be used",
    413: "The body is too large",
    429: "Too many requests wait",
    500: "The server failed",
    503: "The server starts, ends, or lacks memory or disk",
    504: "The time is over",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _TEXTS.items()
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events", "content": {"application/json": {}, "text/event-stream": {}}}
}
_PLAIN: dict[int | str, dict[str, Any]] = {200: {"description": "A text", "content": {"text/plain": {}}}}


answers_router = APIRouter(route_class=JsonRoute)
_MOST_ANSWERS = 128  # of one request
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions. A chat goes on until its end.


@answers_router.post("/v1/chat/completions", responses=_ERRORS | _STREAM)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a chat. A content part of type `file` puts a document into a message."""
    chat = await _asked(request, body)
    return await _respond(request, body.stream, chat.answers, chat)


@answers_router.post("/v1/responses", responses=_ERRORS | _STREAM)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation in OpenAI's newer form. Responses are not kept, so `input` has the whole conversation."""
    service: Service = request.app.state.service
    try:
        chat = await _asked(request, chat_request(body))
    except ApiError as error:
        raise own_fields(error) from error
    answer = ResponseAnswer(body, chat, lambda text: len(service.encode(text, special=False)))
    return await _respond(request, body.stream, chat.answers, answer)


async def _asked(request: Request, body: ChatRequest) -> Chat:
    """Submit a chat, and return its answers. Raises ApiError and JshadowError."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "logprobs must be true with top_logprobs, got false", param="logprobs")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] if body.tool_choice != "none" else []
    ids = await _unless_gone(request, _chat_tokens(service, body, tools), service.options.seconds)
    top = (body.top_logprobs or 0) if body.logprobs else None
    template = template_of(service.params.tokenizer, tools=bool(tools))
    calls = format_of(template)
    grammar = await _unless_gone(request, service.form(body, template), service.options.seconds)
    asked, field = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, field = body.max_tokens, "max_tokens"
    most = await service.slowly(most_new, service.engine, service.library, ids, asked, field)
    requests = await service.slowly(service.requests, caller_of(request), body, ids, most, top, grammar)
    prompt_end = service.params.tokenizer.decode(ids[-16:])
    thoughts = thoughts_of(template, prompt_end) if grammar is None else "none"
    answers = await service.submit(*with_stops(service, body, requests, calls, thoughts))
    return Chat(service, body, answers, calls, thoughts)


@answers_router.post("/v1/completions", responses=_ERRORS | _STREAM)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue a text, or each of several texts."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    grammar = await _unless_gone(request, service.form(body), service.options.seconds)
    requests, prompts = [], prompts_of(body.prompt)
    encode = functools.partial(service.encode, special=body.add_special_tokens, plain=body.split_special_tokens)
    if len(prompts) * (body.n or 1) > _MOST_ANSWERS:
        message = f"the prompts must have at most {_MOST_ANSWERS} answers, got {len(prompts)} prompts with n={body.n}"
        raise ApiError(400, message, param="n")
    for prompt in prompts:
        ids = await service.slowly(encode, prompt)
        most = await service.slowly(most_new, service.engine, service.library, ids, body.max_tokens)
        if body.max_tokens is None:
            most = min(most, _COMPLETION_TOKENS)
        requests += await service.slowly(service.requests, caller_of(request), body, ids, most, body.logprobs, grammar)
    answers = await service.submit(*requests)
    return await _respond(request, body.stream, answers, Completion(service, body, answers))


async def _chat_tokens(service: Service, body: ChatRequest, tools: list[dict]) -> list[int]:
    """Return the token ids of a chat, and of the files in it. Raises ApiError or CheckpointError."""
    return await service.slowly(_prompt_of, service, body, tools, await _sent_files(service, body))


async def _sent_files(service: Service, body: ChatRequest) -> list[list[int]]:
    """Return the token ids of the files that are in a chat itself, in their order. Raises as `Service.text_tokens`."""
    contents = [message.content for message in body.messages if isinstance(message.content, list)]
    files = [part.file for content in contents for part in content if isinstance(part, FileContent)]
    found: list[list[int]] = []
    for file in files:
        if file.file_id is None and file.file_data is not None:
            upload = Upload(plain_name(file.filename or "file.txt"), decoded(file.file_data))
            found.append(await service.text_tokens(upload))
            _check_files(service, sum(map(len, found)))
    return found


def _check_files(service: Service, tokens: int) -> None:
    """Raise CapacityError if the files of a chat cannot fit. Each also has the tokens that begin a chat."""
    if tokens > 2 * service.most_tokens:
        raise CapacityError(f"the files must have at most {service.most_tokens} tokens together, got more")


def _prompt_of(service: Service, body: ChatRequest, tools: list[dict], sent: list[list[int]]) -> list[int]:
    """Return the token ids of a chat. `sent` is what `_sent_files` returned. Raises ApiError or CheckpointError."""
    left_files, stored = iter(sent), functools.cache(service.file_tokens)
    tokens = 0

    def file_ids(part: FilePart) -> list[int]:
        nonlocal tokens
        if part.file_id is None and part.file_data is None:
            raise ApiError(400, "file must have file_id or file_data, got neither", param="messages")
        ids = next(left_files) if part.file_id is None else stored(part.file_id)
        tokens += len(ids)
        _check_files(service, tokens)
        return ids

    args = body.messages, file_ids, tools or None, service.check_length, body.chat_template_kwargs
    return chat_ids(service.params.tokenizer, *args)


async def _respond(
    request: Request, streams: bool, answers: Sequence[Answer], form: Chat | Completion | ResponseAnswer
) -> Response:
    """Return the whole response, or a stream. A client that leaves, or time that runs out, cancels the answers."""
    service: Service = request.app.state.service

    def ended() -> None:
        service.cancel(answers)
        for answer in answers:
            if answer.complete:
                report = answer.result(0).report
                service.metrics.count(report)
                service.options.traces.answer(report)
                service.keys.spend(caller_of(request).client, report.prompt_tokens + report.generated_tokens)

    if streams:
        counted, name = service.metrics.count_error, caller_of(request).request
        last = None if isinstance(form, ResponseAnswer) else DONE
        return stream_response(form.events(), service.options.seconds, ended, counted, name, last)
    try:
        whole = await _unless_gone(request, form.whole(), service.options.seconds)
        return Response(await service.slowly(to_json, whole), media_type="application/json")
    finally:
        ended()


async def _unless_gone[Result](request: Request, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
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


class _FormRoute(APIRoute):
    """A route whose form lies in temporary files while it is read. Without room for them, it answers 503."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await answer(request)
            except HTTPException as error:
                if isinstance(error.__cause__, OSError):
                    raise not_kept("of the form", error.__cause__) from error
                raise

        return handler


files_router = APIRouter(prefix="/v1/files", responses=_ERRORS, route_class=_FormRoute)


def _described(service: Service, stored: Stored) -> FileObject:
    """Return a file in OpenAI's form, with the tokens, the tier and the bytes of its state."""
    return FileObject(
        id=file_id_of(stored),
        bytes=stored.bytes,
        created_at=service.file_time(stored),
        filename=stored.title,
        status="processed" if stored.problem is None else "error",
        status_details=stored.problem,
        tokens=stored.tokens,
        tier=stored.tier,
    )


@files_router.get("", response_model_exclude_none=True)
async def list_files(request: Request) -> FileList:
    """List the stored documents."""
    service: Service = request.app.state.service
    await service.slowly(service.look)

    def listed() -> list[FileObject]:
        return [_described(service, one) for one in service.shelf().documents() if one.ends != "answer"]

    return FileList(data=await service.slowly(listed))


@files_router.post("", response_model=FileObject, response_model_exclude_none=True)
async def add_file(
    request: Request, file: Annotated[UploadFile, File()], purpose: Annotated[str, Form()] = "user_data"
) -> Any:
    """Read a document, and store its state. The response comes when it is stored.

    The reading ends if the client leaves.
    """
    service: Service = request.app.state.service
    options = service.options
    if purpose not in ("user_data", "assistants"):
        raise ApiError(400, f"purpose must be user_data or assistants, got {purpose!r:.80}", param="purpose")
    name = plain_name(file.filename)
    data = await file.read(options.upload_bytes + 1)
    if len(data) > options.upload_bytes:
        raise ApiError(413, f"file must have at most {options.upload_bytes} bytes, got more", param="file")

    async def added() -> dict[str, Any]:
        stored = await service.add(Upload(name, data), caller_of(request))
        service.keys.spend(caller_of(request).client, stored.tokens)
        return _described(service, stored).model_dump()

    return await _unless_gone(request, added(), options.seconds)


@files_router.get("/{file_id}", response_model_exclude_none=True)
async def get_file(request: Request, file_id: str) -> FileObject:
    """Return one stored document."""
    service: Service = request.app.state.service
    return _described(service, await service.slowly(service.file, file_id))


@files_router.get("/{file_id}/content", response_class=Response, responses=_PLAIN)
async def file_content(request: Request, file_id: str) -> PlainTextResponse:
    """Return the text of a stored document, decoded from its tokens."""
    service: Service = request.app.state.service
    return PlainTextResponse(await service.slowly(service.file_text, file_id))


@files_router.delete("/{file_id}")
async def delete_file(request: Request, file_id: str) -> FileDeleted:
    """Remove a stored document. Answers that use it go on."""
    service: Service = request.app.state.service
    stored = await service.slowly(service.file, file_id)
    try:
        await service.slowly(service.shelf().remove, stored.key)
    except DocumentError as error:  # somebody else has removed it meanwhile
        message = f"file_id must be that of a stored file, got {file_id!r:.80}"
        raise ApiError(404, message, code="file_not_found") from error
    except CheckpointError as error:
        raise ApiError(503, f"file {file_id} cannot be removed: {error}", code="store_unavailable") from error
    return FileDeleted(id=file_id)


tokens_router = APIRouter(route_class=JsonRoute, responses=_ERRORS)


@tokens_router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Return the token ids of a text or a chat."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "the body must have either prompt or messages", param="prompt")
    if body.messages is not None:
        switches = body.chat_template_kwargs
        chat = ChatRequest(model=service.options.name, messages=body.messages, chat_template_kwargs=switches)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        ids = await _unless_gone(request, _chat_tokens(service, chat, tools), service.options.seconds)
    elif not body.prompt:
        ids = []
    else:
        service.check_length(body.prompt)
        args = service.params.tokenizer, body.prompt, service.params.config.vocab_size
        ids = await service.slowly(lambda: encode(*args, special=body.add_special_tokens))
    told = {"tokens": ids, "count": len(ids), "max_model_len": service.most_tokens}
    if body.return_token_strs:
        told["token_strs"] = service.params.tokenizer.convert_ids_to_tokens(ids)
    return told


@tokens_router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """Return the text of token ids."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    size = service.params.config.vocab_size
    bad = [token for token in body.tokens if not 0 <= token < size]
    if bad:
        raise ApiError(400, f"tokens must lie in [0, vocab_size={size}), got {bad[0]}", param="tokens")
    return {"prompt": await service.slowly(service.params.tokenizer.decode, body.tokens)}


status_router = APIRouter()


@status_router.get("/v1/models", responses=_ERRORS)
async def models(request: Request) -> ModelList:
    """List the model."""
    return ModelList(data=[_model_of(request.app.state.service)])


@status_router.get("/v1/models/{name:path}", responses=_ERRORS)
async def model(request: Request, name: str) -> ModelObject:
    """Return the model."""
    service: Service = request.app.state.service
    service.check_model(name)
    return _model_of(service)


def _model_of(service: Service) -> ModelObject:
    """Return the model in OpenAI's form."""
    return ModelObject(id=service.options.name, created=service.created, max_model_len=service.most_tokens)


@status_router.head("/health", include_in_schema=False)
@status_router.get("/health", responses={500: _ERRORS[500], 503: _ERRORS[503]})
async def health(request: Request) -> Status:
    """Say that the process lives. 503: its engine has failed."""
    if request.app.state.service.engine.failure is not None:
        raise _engine_failed()
    return Status(status="ok")


@status_router.get("/health/deep", responses=_ERRORS)
async def deep_health(request: Request) -> Status:
    """Draw a token, and say that it came. The token takes a row, and its turn as those of other requests do."""
    service: Service = request.app.state.service
    await ready(request)
    [answer] = await service.submit(Generation([0], 1, client=caller_of(request).client, name="health"))
    try:
        await _unless_gone(request, end_of(answer), service.options.seconds)
    finally:
        service.cancel([answer])
    return Status(status="ok")


def _engine_failed() -> ApiError:
    """Return the error of a server that answers nothing more. Its reason is not for clients without a key."""
    return ApiError(503, "the engine has failed, and the log of the server has the reason", code="engine_failed")


@status_router.head("/ready", include_in_schema=False)
@status_router.get("/ready", responses={500: _ERRORS[500], 503: _ERRORS[503]})
async def ready(request: Request) -> Status:
    """Say whether requests are welcome: not before all programs are compiled, and not while the server ends."""
    service: Service = request.app.state.service
    if service.ready and not service.draining and service.engine.failure is None:
        return Status(status="ready")
    if service.engine.failure is not None:
        raise _engine_failed()
    raise ApiError(503, "the server ends" if service.draining else service.unready, code="not_ready")


@status_router.get("/metrics", response_class=Response, responses=_PLAIN | {500: _ERRORS[500]})
async def metrics(request: Request) -> Response:
    """The figures in Prometheus' text form."""
    service: Service = request.app.state.service
    return Response(await service.slowly(service.metrics.text), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@status_router.get("/v1/gauge", responses=_ERRORS)
async def gauge(request: Request) -> Gauge:
    """The figures of the page: bytes by tier, the share of hits, times, and what full attention would hold."""
    service: Service = request.app.state.service
    return Gauge(**await service.slowly(service.gauge))


page_router = APIRouter(include_in_schema=False)
_PAGE_FOLDER = Path(__file__).parent / "page"
_PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGE_FILES = {path.name: path for path in _PAGE_FOLDER.iterdir() if path.suffix in _PAGE_TYPES}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@page_router.get("/")
async def page() -> Response:
    """The page over the stored documents."""
    return await part("page.html")


@page_router.get("/page/{name}")
async def part(name: str) -> Response:
    """One file of the page. Raises ApiError if there is none of this name."""
    if name not in _PAGE_FILES:
        raise ApiError(404, f"the page has no file {name!r:.80}")
    path = _PAGE_FILES[name]
    return Response(path.read_bytes(), media_type=f"{_PAGE_TYPES[path.suffix]}; charset=utf-8", headers=_PAGE_HEADERS)
