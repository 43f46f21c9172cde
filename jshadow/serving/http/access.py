"""ASGI middleware: API keys, the sites that may ask, limits of bodies, the end of a server, the count of errors."""

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from jshadow.serving.http.errors import ApiError, response_of
from jshadow.serving.http.options import ANY_HOST, is_loopback
from jshadow.serving.http.service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
CLIENT = "jshadow.client"  # who asks, in the scope of a request
OPEN = ("/", "/health", "/ready", "/metrics")  # routes that need no key
PROBES = ("/health", "/ready")  # an orchestrator asks these with any Host
PAGE = "/page/"  # the parts of the page, which need no key either
UPLOADS = "/v1/files"
SPARE = 2**16  # bytes of an upload's body beside the file
SMALL = 2**16  # bytes of a body that is never refused because of other bodies
CLIENT_SHARE = 0.5  # of the bytes of all bodies, for one client
STILL_SECONDS, MOVED = 30.0, 2**16  # within this time a body must have so many bytes more, or be complete


class Access:
    """Refuses requests without a key, requests while the server ends, and bodies above the limits.

    Without keys, any web page in a browser on this machine could ask the server. So a request must name the server by a
    known Host, which a page cannot do by DNS rebinding, and a browser must send it from a page of this server.
    A body is refused as soon as a limit is exceeded, and is not read whole.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], service: Service) -> None:
        self.app, self.service, self.options = app, service, service.options
        self.keys = [digest(key.encode()) for key in self.options.api_keys]
        self.held: Counter[str] = Counter()  # bytes of the bodies of all open requests, by client

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        scope[CLIENT] = self._client(scope)
        body, status = Body(self, scope, receive), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
            await send(message)

        problem = self._problem(scope)
        counts = problem is None and not is_open(scope)
        self.service.open += counts
        try:
            if problem is None:
                body.check_length()
                await self.app(scope, body.receive, noted)
            else:
                await response_of(problem)(scope, receive, noted)
        except Refused as refused:
            if not status:
                await response_of(refused.error)(scope, receive, noted)
        except Exception:
            status = status or 500  # the response is made outside
            raise
        finally:
            self.service.open -= counts
            body.release()
            if status >= 400:
                self.service.metrics.count_error(status)

    def _client(self, scope: Message) -> str:
        """Return who asks: the digest of the key if keys are asked for, else the address."""
        if self.keys:
            return given_key(scope)[1].hex()
        return str((scope.get("client") or ("",))[0])

    def _problem(self, scope: Message) -> ApiError | None:
        """Return why a request is refused before its body is read, or None."""
        if not self.keys and (foreign := self._foreign(scope)) is not None:
            return foreign
        if is_open(scope):
            return None
        if self.keys and not self._knows(*given_key(scope)):
            message = "the header Authorization must be 'Bearer KEY' with a valid key"
            return ApiError(401, message, code="invalid_api_key")
        if self.service.draining:
            return ApiError(503, "the server is about to end, and takes no new requests", code="unavailable")
        return None

    def _foreign(self, scope: Message) -> ApiError | None:
        """Return why a request is not from this machine's programs nor from the page of this server, or None."""
        if scope["path"] in PROBES:
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, allowed = headers.get(b"host", ""), map(host_name, self.options.allowed_hosts)
        name = host_name(host)
        if not is_loopback(name) and not {name, ANY_HOST} & set(allowed):
            message = f"the header Host must name this machine or an --allowed-host, got {host!r:.80}"
            return ApiError(403, message, code="host_not_allowed")
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "none")
        opened = scope["path"] == "/" and headers.get(b"sec-fetch-mode") == "navigate"  # a link to the page
        if (site not in ("same-origin", "none") and not opened) or (origin and place_of(origin) != host.lower()):
            sent = origin or f"a page of another site ({site})"
            return ApiError(
                403, f"a browser must ask from the page of this server, got {sent!r:.80}", code="cross_site"
            )
        return None

    def _knows(self, kind: bytes, given: bytes) -> bool:
        """Compare the digest of a key with those of all keys in a time that depends on neither."""
        found = [hmac.compare_digest(given, key) for key in self.keys]
        return kind == b"bearer" and any(found)


class Body:
    """The body of a request while it arrives.

    Attributes:
        size: its bytes so far.
    """

    def __init__(self, access: Access, scope: Message, receive: Receive) -> None:
        self.access, self.size, self._receive, self._more = access, 0, receive, True
        self._client, options = scope[CLIENT], access.options
        upload = scope["path"] == UPLOADS and scope["method"] == "POST"
        self._limit = options.upload_bytes + SPARE if upload else options.body_bytes
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

    async def receive(self) -> Message:
        """Return the next message of the request. Raises Refused if a limit is exceeded."""
        if not self._more:
            return await self._receive()  # only the end of the connection follows
        try:
            async with asyncio.timeout_at(min(self._end, self._still)):
                message = await self._receive()
        except TimeoutError:
            raise Refused(ApiError(408, self._late(), code="timeout")) from None
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
            raise Refused(ApiError(413, text, code="body_too_large"))

    def _check_held(self) -> None:
        """Raise Refused if this body, which is not alone and not small, makes the open bodies too large."""
        most, own, held = self.access.options.held_bytes, self.access.held[self._client], self.access.held.total()
        for name, size, limit in (("one client", own, int(most * CLIENT_SHARE)), ("all clients", held, most)):
            if size > limit and size > self.size > SMALL:
                text = f"the bodies of all open requests of {name} must have at most {limit} bytes, got {size}"
                raise Refused(ApiError(429, text, code="bodies_full"))


class Refused(BaseException):
    """A body exceeds a limit. It is no Exception, so that no handler of the app takes it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


def client_of(request: Request) -> str:
    """Return who asks, for fair turns: the digest of the key if keys are asked for, else the address."""
    return str(request.scope[CLIENT])


def place_of(origin: str) -> str:
    """Return the host and the port of an Origin in small letters, or "" if it is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def host_name(host: str) -> str:
    """Return the name or address in a header Host, in lower case and without the port and brackets."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").lower()


def is_open(scope: Message) -> bool:
    """Return whether a request needs no key, and is answered while the server ends."""
    return scope["path"] in OPEN or scope["path"].startswith(PAGE)


def given_key(scope: Message) -> tuple[bytes, bytes]:
    """Return the kind in the header Authorization, in lower case, and the digest of the key in it."""
    kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return kind.lower(), digest(key.strip())


def digest(key: bytes) -> bytes:
    """Return the SHA-256 of a key, so that all compared values have one length."""
    return hashlib.sha256(key).digest()
