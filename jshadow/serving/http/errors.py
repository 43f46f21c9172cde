"""Errors in the shape of OpenAI's API, with a status for each kind of error."""

import re
import reprlib
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from jshadow.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DocumentError,
    HostMemoryError,
    JshadowError,
    NumericalError,
    PromptError,
    QueueFull,
    ServingError,
    StateMismatch,
)

# The first entry that an error is an instance of gives the status and the code.
_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (QueueFull, 429, "queue_full"),
    (CapacityError, 400, "context_length_exceeded"),
    (PromptError, 400, "invalid_prompt"),
    (ConfigError, 400, "invalid_value"),
    (HostMemoryError, 503, "host_memory_full"),
    (ServingError, 503, "unavailable"),
    (DocumentError, 409, "damaged_file"),
    (CheckpointError, 400, "invalid_file"),
    (StateMismatch, 409, "state_mismatch"),
    (NumericalError, 500, "not_a_number"),
)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# The place of a problem names the types of a field too: "str", "list[int]", "TextContent".
_FIELD = re.compile(r"(?!(str|int|float|bool)$)[a-z0-9_]+")
_SHORT = reprlib.Repr()  # a whole list of a million numbers would be written before it is cut
_SHORT.maxstring = _SHORT.maxother = 80
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
CALLER = "jshadow.caller"  # who asks, in the scope of a request
_RETRY_SECONDS = {429: 1, 503: 5}


class _ErrorDetail(BaseModel):
    """An error. `param` names the field of the request that is wrong, if one is."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of a response that is an error."""

    error: _ErrorDetail


class ApiError(Exception):
    """An error with a status, a code, the field of the request that is wrong, and seconds to wait before the next."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry = _RETRY_SECONDS.get(status) if retry is None else retry


def too_late(seconds: float) -> ApiError:
    """Return the error of an answer that takes longer than `seconds`."""
    return ApiError(504, f"the answer must be complete within {seconds:g} seconds, it is not", code="timeout")


def client_left() -> ApiError:
    """Return the error of a request whose client has closed the connection. Nobody reads it, but it is counted."""
    return ApiError(499, "the client has left", code="client_left")


def api_error(error: Exception) -> ApiError:
    """Return an error as an ApiError."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _KINDS:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(500, str(error) if isinstance(error, JshadowError) else "the server failed", code="internal_error")


def body_of(error: ApiError) -> dict[str, Any]:
    """Return the body of an error's response."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message, param = plain(str(error)), None if error.param is None else plain(error.param)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


def plain(text: str) -> str:
    """Return a text that UTF-8 can hold. A half of a surrogate pair, which JSON may have, becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _allowed(request: Request) -> str:
    """Return the methods that the path of a request has, of all its routes."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    routes = request.app.routes
    full = (name for name, scope in scopes.items() if any(one.matches(scope)[0] is Match.FULL for one in routes))
    return ", ".join(full)


def response_of(error: ApiError, **headers: str) -> JSONResponse:
    """Return the response of an error, with further headers."""
    if error.retry is not None:
        headers["Retry-After"] = str(error.retry)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error), error.status, headers)


def validation_error(error: RequestValidationError) -> ApiError:
    """Return the first problem of a body or a parameter as an ApiError that names the field."""
    problems = error.errors()
    # A field of several types has an error for each. An error other than a wrong type tells the client more.
    first = next((one for one in problems if not one["type"].endswith(("_type", "_error"))), problems[0])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body must be JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="json")
    names = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    last = names[-1:] if first["type"] == "extra_forbidden" else []
    field = ".".join([name for name in names[: len(names) - len(last)] if _FIELD.fullmatch(name)] + last)
    return ApiError(
        400, f"{field or 'body'}: {first['msg']}, got {_SHORT.repr(first.get('input')):.80}", param=field or None
    )


def add_handlers(app: FastAPI) -> None:
    """Let an app answer all errors in this shape."""

    async def on_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return response_of(validation_error(error))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            methods = _allowed(request)
            message = f"{request.url.path:.80} has no method {request.method:.20}, but {methods}"
            return response_of(ApiError(405, message, code="method_not_allowed"), Allow=methods)
        return response_of(ApiError(error.status_code, str(error.detail)), **error.headers or {})

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return response_of(api_error(error))

    async def on_failure(request: Request, error: Exception) -> JSONResponse:
        return response_of(api_error(error), **{"X-Request-Id": request.scope[CALLER].request})

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, JshadowError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(Exception, on_failure)  # outside of the app, where no other header is added
