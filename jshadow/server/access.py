"""ASGI middleware: API keys, the size of bodies, and headers of safety."""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from jshadow.server.errors import ApiError, body_of
from jshadow.server.service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
OPEN = ("/", "/health", "/ready", "/metrics")  # routes that need no key
PAGE = "/page/"  # the parts of the page, which need no key either
UPLOADS = "/v1/files"
SPARE = 2**16  # bytes of an upload's body beside the file


class Access:
    """Refuses requests without a key, and bodies above the limit, before they are read whole."""

    def __init__(self, app: Callable[..., Awaitable[None]], service: Service) -> None:
        self.app, self.service, self.options = app, service, service.options
        self.keys = [key.encode() for key in self.options.api_keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        counts = scope["path"] not in OPEN and not scope["path"].startswith(PAGE)
        if self.keys and counts and not self._knows(headers.get(b"authorization", b"")):
            error = ApiError(
                401, "the header Authorization must be 'Bearer KEY' with a valid key", code="invalid_api_key"
            )
            return await refuse(send, error)
        upload = scope["path"] == UPLOADS and scope["method"] == "POST"
        limit = self.options.upload_bytes + SPARE if upload else self.options.body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            return await refuse(send, too_large(limit, int(length)))
        read, begun = 0, False

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise BodyTooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self.service.open += counts
        try:
            await self.app(scope, counted, noted)
        except BodyTooLarge:
            if not begun:
                await refuse(send, too_large(limit, read))
        finally:
            self.service.open -= counts

    def _knows(self, header: bytes) -> bool:
        """Compare the key of a header with all keys in a time that depends on neither."""
        kind, _, given = header.partition(b" ")
        found = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return kind.lower() == b"bearer" and any(found)


class BodyTooLarge(BaseException):
    """A body is above the limit. It is no Exception, so that no handler of the app takes it."""


def too_large(limit: int, got: int) -> ApiError:
    """Return the error of a body above the limit."""
    return ApiError(413, f"the body must have at most {limit} bytes, got {got}", code="body_too_large")


async def refuse(send: Send, error: ApiError) -> None:
    """Send an error."""
    body = json.dumps(body_of(error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
