"""Import transformers without its message about torch."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Import transformers without its message about torch, which is not needed here, and keep its loader silent."""
    name, logger = "TRANSFORMERS_NO_ADVISORY_WARNINGS", logging.getLogger("transformers")
    before = os.environ.get(name)
    os.environ[name] = "1"  # the import itself sets the level of the logger, so that a level set now would be lost
    try:
        import transformers
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield transformers
    finally:
        logger.setLevel(level)
