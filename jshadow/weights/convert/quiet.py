"""Importing transformers without its warning that torch is missing."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_transformers() -> Iterator[Any]:
    """A context manager that imports and yields transformers, without its warning that torch is missing.

    Inside the block, transformers logs only errors.
    """
    name, logger = "TRANSFORMERS_NO_ADVISORY_WARNINGS", logging.getLogger("transformers")
    before = os.environ.get(name)
    os.environ[name] = "1"  # the import sets the level of the logger, so a level set before it would be lost
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
