"""Server-sent events (WHATWG HTML, section 9.2): a JSON object an event, and "[DONE]" at the end."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse

from jshadow.serving.http.errors import api_error, body_of, too_late

LOG = logging.getLogger(__name__)
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: dict[str, Any]) -> str:
    """Return one event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def stream_response(
    events: AsyncIterator[dict[str, Any]],
    seconds: float,
    ended: Callable[[], None],
    failed: Callable[[int], None],
) -> StreamingResponse:
    """Return a response that streams events.

    Args:
        events: the objects. An error becomes the last event.
        seconds: maximum time of the stream. After it, an error is the last event.
        ended: called at the end, also when the client has left.
        failed: called with the status that the error would have, had the stream not begun with 200.
    """

    async def body() -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(seconds):
                async with contextlib.aclosing(events):  # type: ignore[type-var]
                    async for value in events:
                        yield event(value)
            yield "data: [DONE]\n\n"
        except Exception as error:
            told = too_late(seconds) if isinstance(error, TimeoutError) else api_error(error)
            if told.status == 500:
                LOG.exception("a stream has failed")
            failed(told.status)
            yield event(body_of(told))
        finally:
            ended()

    return StreamingResponse(body(), media_type="text/event-stream", headers=HEADERS)
