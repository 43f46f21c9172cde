"""The number of new tokens of a request."""

from collections.abc import Sequence

from jshadow.library import Library
from jshadow.serving import Engine
from jshadow.serving.http.errors import ApiError


def most_new(
    engine: Engine, library: Library | None, ids: Sequence[int], asked: int | None, field: str = "max_tokens"
) -> int:
    """Return the maximum number of new tokens of a request.

    Without a wish, it is what a row has room for. The rest of the prompt after a stored document takes some of this
    room. If it takes more than half, the document is not used, and the answer has the whole room.

    Args:
        engine: the engine that is to answer.
        library: the library of the engine, or None.
        ids: token ids of the prompt.
        asked: the number that the request asks for, or None.
        field: the name of its field.

    Raises:
        ApiError: the prompt is too long for all classes of rows, or `asked` exceeds the room.
    """
    classes = [plan.row_class for plan in engine.plans]
    longest = max(one.prompt for one in classes)
    if len(ids) > longest:
        raise ApiError(
            400, f"the prompt must have at most {longest} tokens, got {len(ids)}", code="context_length_exceeded"
        )
    room = max(one.room for one in classes if one.prompt >= len(ids))
    if asked is not None:
        if asked > room:
            message = f"{field} must be at most {room} after a prompt of {len(ids)} tokens, got {asked}"
            raise ApiError(400, message, code="context_length_exceeded", param=field)
        return asked
    stored = None if library is None else library.longest(ids[:-1])
    if library is None or stored is None:
        return room
    left = min(max(one.room for one in classes) - (len(ids) - stored.tokens), library.capacity - len(ids))
    return left if 2 * left >= room else room
