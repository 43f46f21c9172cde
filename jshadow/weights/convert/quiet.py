"""transformers without its advice about torch: its import alone would print it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Import transformers without its advice about torch, which nothing here needs, and keep its loader silent."""
    name, logger = "TRANSFORMERS_NO_ADVISORY_WARNINGS", logging.getLogger("transformers")
    before = os.environ.get(name)
    os.environ[name] = "1"  # the import sets the logger's level itself, so a level set now would not hold
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
