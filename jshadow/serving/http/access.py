"""Who may ask, how much and how long: connections, bodies, keys and hosts."""

import asyncio
import datetime
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import h11
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from jshadow.serving.http.errors import CALLER, ApiError, client_left, response_of
from jshadow.serving.http.keys import digest_of
from jshadow.serving.http.options import ANY_HOST, is_loopback
from jshadow.serving.http.service import Caller, Service

READ_BYTES = 2**13  # of asyncio's 256 KiB, small parts would block the event loop for most of a second
MOST_CHUNKS, CHUNK_BYTES = 10_000, 16  # with more chunks of a body, so many bytes a chunk must come on average
HEAD_SECONDS = 30.0  # within which the head of the next request must be complete


class Connection(H11Protocol):
    """The connection of a client."""

    _head: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: h11.Connection = _Parser(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        # Without it a token waits until the client has acknowledged the one before, which can take 40 ms.
        if transport.get_extra_info("socket").family != socket.AF_UNIX:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


class _Parser(h11.Connection):
    """A parser that refuses a body in many tiny chunks, each of which takes as long as a large one."""

    _chunks = _size = 0

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._size = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._size += len(event.data)
            if self._chunks > MOST_CHUNKS and self._size < CHUNK_BYTES * self._chunks:
                raise h11.RemoteProtocolError("chunks must not be tiny")
        return event


# One call parses a whole text, and no other thread runs meanwhile. It takes less than a tenth of a second for so many.
MOST_VALUES = 2**20  # commas, strings, lists and objects of a body
MOST_NESTED = 2**16  # lists and objects of a body
_PARSED_HERE = 2**16  # bytes of a body that is parsed in a millisecond


class JsonRoute(APIRoute):
    """A route whose JSON body has few enough values. A large one is parsed in another thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request. It raises ApiError if the body has too many values."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            request = _JsonRequest(request.scope, request.receive)
            try:
                data = await request.body()
            except ClientDisconnect as error:
                raise client_left() from error
            await _apart(request, check_values, data)
            return await answer(request)

        return handler


class _JsonRequest(Request):
    """A request whose large body another thread parses."""

    async def json(self) -> Any:
        """Return the parsed body. Raises ValueError."""
        data = await self.body()
        return await _apart(self, json.loads, data)


async def _apart[Result](request: Request, function: Callable[[bytes], Result], data: bytes) -> Result:
    """Return the result of a function of a body. A large body is for another thread, one at a time."""
    if len(data) <= _PARSED_HERE:
        return function(data)
    return await anyio.to_thread.run_sync(function, data, limiter=request.app.state.service.parsing)


def check_values(data: bytes) -> None:
    """Raise ApiError if a JSON text has more values, or more lists and objects, than a body may have.

    What is in a string does not count, so a long text with many commas is one value. The JSON need not be valid, but in
    UTF-8 (RFC 8259, section 8.1). The parser also reads UTF-16 and UTF-32, whose values are not counted here.
    """
    if not json.detect_encoding(data).startswith("utf-8"):
        raise ApiError(400, "the body must be JSON in UTF-8, got another encoding")
    place = values = nested = 0
    while place < len(data):
        quote = data.find(b'"', place)
        end = len(data) if quote < 0 else quote
        nested += data.count(b"[", place, end) + data.count(b"{", place, end)
        values += data.count(b",", place, end) + (quote >= 0)
        if values + nested > MOST_VALUES or nested > MOST_NESTED:
            message = f"the body must have at most {MOST_VALUES} values and {MOST_NESTED} lists and objects, got more"
            raise ApiError(400, message, code="body_too_large")
        place = end if quote < 0 else _end_of_string(data, quote + 1)


def _end_of_string(data: bytes, place: int) -> int:
    """Return the place after the string whose first character is at `place`."""
    while (end := data.find(b'"', place)) >= 0:
        before = data[place:end]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return end + 1
        place = end + 1
    return len(data)


_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
Send = Callable[[_Message], Awaitable[None]]
ACCESS_LOG = "jshadow.access"  # the logger of the access log. Its level INFO switches it on.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")  # of a header X-Request-Id that is taken over
_KEY_DIGITS = 12  # hexadecimal digits of a key's digest in the access log
_LOG = logging.getLogger(ACCESS_LOG)
OPEN = ("/", "/health", "/ready", "/metrics")  # routes that need no key
_PROBES = ("/health", "/ready")  # an orchestrator asks these with any Host
_PAGE = "/page/"  # the parts of the page, which need no key either
_UPLOADS = "/v1/files"
_SPARE = 2**16  # bytes of an upload's body beside the file
SMALL = 2**16  # bytes of a body that is never refused because of other bodies
_CLIENT_SHARE = 0.5  # of the bytes of all bodies, for one client
STILL_SECONDS, MOVED = 30.0, 2**16  # within this time a body must have so many bytes more, or be complete


class Access:
    """Refuses requests without a key, requests while the server ends, and bodies above the limits.

    Without keys, any web page in a browser on this machine could ask the server. So a request must name the server by a
    known Host, which a page cannot do by DNS rebinding, and a browser must send it from a page of this server.
    A body is refused as soon as a limit is exceeded, and is not read whole.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], service: Service) -> None:
        self.app, self.service, self.options = app, service, service.options
        self.keys, self.held = service.keys, service.held

    async def __call__(self, scope: _Message, receive: _Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self.keys.look()
        caller, begun = self._caller(scope), time.monotonic()
        scope[CALLER] = caller
        body, status = _Body(self, scope, receive), 0

        async def noted(message: _Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-content-type-options", b"nosniff"), (b"x-request-id", caller.request.encode())
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        problem = self._problem(scope)
        counts = problem is None and not _is_open(scope)
        self.service.open += counts
        with self.options.traces.request(scope, caller.request) as traced:
            try:
                if problem is None:
                    body.check_length()
                    await self.app(scope, body.receive, noted)
                else:
                    await response_of(problem)(scope, receive, noted)
            except _Refused as refused:
                if not status:
                    await response_of(refused.error)(scope, receive, noted)
            except Exception:
                status = status or 500  # the response is made outside
                raise
            finally:
                self.service.open -= counts
                if counts:
                    self.keys.end(caller.client)
                body.release()
                if status >= 400:
                    self.service.metrics.count_error(status)
                traced(status)
                self._note(scope, status, time.monotonic() - begun, body.size)

    def _caller(self, scope: _Message) -> Caller:
        """Return who asks: the digest of the key if keys are asked for, else the address."""
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        if self.keys:
            return Caller(given_key(scope)[1], name)
        return Caller(str((scope.get("client") or ("",))[0]), name)

    def _note(self, scope: _Message, status: int, seconds: float, size: int) -> None:
        """Write a JSON object to the access log. In place of a key, it has the first digits of its digest."""
        if not _LOG.isEnabledFor(logging.INFO):
            return
        caller: Caller = scope[CALLER]
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "id": caller.request,
            "client": caller.client[:_KEY_DIGITS] if self.keys else caller.client,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            "body_bytes": size,
        }
        _LOG.info(json.dumps(line))

    def _problem(self, scope: _Message) -> ApiError | None:
        """Begin a request for the limits of its key. Return why it is refused before its body is read, or None."""
        if not self.keys and (foreign := self._foreign(scope)) is not None:
            return foreign
        if _is_open(scope):
            return None
        if self.keys and not self.keys.knows(*given_key(scope)):
            message = "the header Authorization must be 'Bearer KEY' with a valid key"
            return ApiError(401, message, code="invalid_api_key")
        if self.service.draining:
            return ApiError(503, "the server is about to end, and takes no new requests", code="unavailable")
        return self.keys.begin(scope[CALLER].client)

    def _foreign(self, scope: _Message) -> ApiError | None:
        """Return why a request is not from this machine's programs nor from the page of this server, or None."""
        if scope["path"] in _PROBES:
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, allowed = headers.get(b"host", ""), map(_host_name, self.options.allowed_hosts)
        name = _host_name(host)
        if not is_loopback(name) and not {name, ANY_HOST} & set(allowed):
            message = f"the header Host must name this machine or an --allowed-host, got {host!r:.80}"
            return ApiError(403, message, code="host_not_allowed")
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "none")
        opened = scope["path"] == "/" and headers.get(b"sec-fetch-mode") == "navigate"  # a link to the page
        if (site not in ("same-origin", "none") and not opened) or (origin and _place_of(origin) != host.lower()):
            sent = origin or f"a page of another site ({site})"
            return ApiError(
                403, f"a browser must ask from the page of this server, got {sent!r:.80}", code="cross_site"
            )
        return None


class _Body:
    """The body of a request while it arrives.

    Attributes:
        size: its bytes so far.
    """

    def __init__(self, access: Access, scope: _Message, receive: _Receive) -> None:
        self.access, self.size, self._receive, self._more = access, 0, receive, True
        self._client, options = scope[CALLER].client, access.options
        upload = scope["path"] == _UPLOADS and scope["method"] == "POST"
        self._limit = options.upload_bytes + _SPARE if upload else options.body_bytes
        self._length = dict(scope["headers"]).get(b"content-length", b"0")
        now = asyncio.get_running_loop().time()
        self._end, self._still, self._moved = now + options.seconds, now + STILL_SECONDS, 0

    def check_length(self) -> None:
        """Raise Refused if the header says that the body is above the limit."""
        if self._length.isdigit():
            self._check(int(self._length[:20]))

    def release(self) -> None:
        """Count the bytes no longer, because the request has ended."""
        held = self.access.held
        held[self._client] -= self.size
        if not held[self._client]:
            del held[self._client]

    async def receive(self) -> _Message:
        """Return the next message of the request. Raises Refused if a limit is exceeded."""
        if not self._more:
            return await self._receive()  # only the end of the connection follows
        try:
            async with asyncio.timeout_at(min(self._end, self._still)):
                message = await self._receive()
        except TimeoutError:
            raise _Refused(ApiError(408, self._late(), code="timeout")) from None
        new = len(message.get("body", b""))
        self._more = message.get("more_body", False)
        self.size += new
        self.access.held[self._client] += new
        if self.size - self._moved >= MOVED:
            self._still, self._moved = asyncio.get_running_loop().time() + STILL_SECONDS, self.size
        self._check(self.size)
        self._check_held()
        return message

    def _late(self) -> str:
        """Return why a body is refused that did not arrive in time."""
        seconds = self.access.options.seconds
        if self._end <= self._still:
            return f"the body must arrive within {seconds:g} seconds, got {self.size} bytes of it"
        return f"{MOVED} bytes of the body must arrive every {STILL_SECONDS:g} seconds, got {self.size - self._moved}"

    def _check(self, size: int) -> None:
        if size > self._limit:
            text = f"the body must have at most {self._limit} bytes, got {size}"
            raise _Refused(ApiError(413, text, code="body_too_large"))

    def _check_held(self) -> None:
        """Raise Refused if this body, which is not alone and not small, makes the open bodies too large."""
        most, own, held = self.access.options.held_bytes, self.access.held[self._client], self.access.held.total()
        for name, size, limit in (("one client", own, int(most * _CLIENT_SHARE)), ("all clients", held, most)):
            if size > limit and size > self.size > SMALL:
                text = f"the bodies of all open requests of {name} must have at most {limit} bytes, got {size}"
                raise _Refused(ApiError(429, text, code="bodies_full"))


class _Refused(BaseException):
    """A body exceeds a limit. It is no Exception, so that no handler of the app takes it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


def caller_of(request: Request) -> Caller:
    """Return who asks: the digest of the key if keys are asked for, else the address. And the id of the request."""
    caller: Caller = request.scope[CALLER]
    return caller


def _place_of(origin: str) -> str:
    """Return the host and the port of an Origin in small letters, or "" if it is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """Return the name or address in a header Host, in lower case and without the port and brackets."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").lower()


def _is_open(scope: _Message) -> bool:
    """Return whether a request needs no key, and is answered while the server ends."""
    return scope["path"] in OPEN or scope["path"].startswith(_PAGE)


def given_key(scope: _Message) -> tuple[bytes, str]:
    """Return the kind in the header Authorization, in lower case, and the digest of the key in it."""
    kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return kind.lower(), digest_of(key.strip())
