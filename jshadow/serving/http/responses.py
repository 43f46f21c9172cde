"""The statuses of the routes, for the OpenAPI schema."""

from typing import Any

from jshadow.serving.http.errors import ErrorBody

TEXTS = {
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
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in TEXTS.items()
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events", "content": {"application/json": {}, "text/event-stream": {}}}
}
PLAIN: dict[int | str, dict[str, Any]] = {200: {"description": "A text", "content": {"text/plain": {}}}}
