"""Calls of the operating system for the files of a folder, which a test can note or delay."""

import contextlib
import io
import os
from unittest import mock

CALLS = [(os, name) for name in ("stat", "scandir", "unlink", "open", "mkdir", "rename", "replace")] + [(io, "open")]


@contextlib.contextmanager
def before_disk_calls(folder, act):
    """Until the end of the block, `act(name)` is called before each call for a path in a folder, in its thread."""
    start = os.fspath(folder)

    def watched(real, name):
        def call(path, *args, **options):
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(start):
                act(name)
            return real(path, *args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in CALLS:
            stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), name)))
        yield
