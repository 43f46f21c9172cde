"""JSON bodies: their size is bounded before they are parsed, and they are parsed beside the event loop."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from jshadow.serving.http.errors import ApiError, client_left

# One call parses a whole text, and no other thread runs meanwhile. It takes less than a tenth of a second for so many.
MOST_VALUES = 2**20  # commas, strings, lists and objects of a body
MOST_NESTED = 2**16  # lists and objects of a body
SMALL = 2**16  # bytes of a body that is parsed in a millisecond


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
    if len(data) <= SMALL:
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
