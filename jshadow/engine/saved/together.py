"""Work that several processes do together, and that fails in all of them if it fails in one."""

import json
from collections.abc import Callable
from typing import Any

from jshadow.engine.mesh.agree import exchange
from jshadow.errors import CheckpointError

SECONDS = 3600.0  # a process may write or read its part for so long


def together(name: str, work: Callable[[], Any]) -> list[Any]:
    """Do some work in every process, and wait for the others.

    Args:
        name: what is done, for error messages and for the exchange. All processes must give the same name.
        work: it returns a value that JSON can express, and runs no program on several devices.

    Returns:
        The value of each process.

    Raises:
        CheckpointError: the work of another process failed. The message has its error.
        DistributedError: another process did not come.
        Exception: the error of this process, after the others know it.
    """
    failure: Exception | None = None
    answer: dict[str, Any] = {}
    try:
        answer["value"] = work()
    except Exception as error:
        failure, answer["error"] = error, f"{type(error).__name__}: {error}"
    answers = [json.loads(text) for text in exchange(name, json.dumps(answer), SECONDS)]
    if failure is not None:
        raise failure
    for number, one in enumerate(answers):
        if "error" in one:
            raise CheckpointError(f"{name}: process {number} of {len(answers)} failed: {one['error']}")
    return [one["value"] for one in answers]
