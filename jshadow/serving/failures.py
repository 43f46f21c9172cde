"""Errors of the work for one request: they become typed, and let go of the arrays that they hold."""

import logging
import traceback

from jshadow.errors import JshadowError, OutOfMemory, ServingError

LOG = logging.getLogger(__name__)


def typed(error: Exception) -> JshadowError:
    """Return an error as one for the caller. The log has the traceback of an error that jshadow does not know.

    Afterwards the error holds no arrays of the functions that it went through.
    """
    found: JshadowError
    if isinstance(error, JshadowError):
        found = error
    else:
        LOG.error("the work for a request has failed, and the engine goes on", exc_info=error)
        kind = type(error).__name__
        found = ServingError(f"the work for this request has failed ({kind}), and the log of the engine has the reason")
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            found = OutOfMemory("the device or the host lacks the memory for this request; a later try may succeed")
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return found
