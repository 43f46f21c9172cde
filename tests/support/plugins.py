"""A folder with policies of a stranger, from which commands run; afterwards nothing of them is left."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from jshadow.policies import POLICIES
from jshadow.policies.registry import LAW_SETTINGS


@contextlib.contextmanager
def strangers(folder: Path) -> Iterator[Path]:
    """Registered policies, sys.path and imported modules are as before when the block ends."""
    tables, modules, path = (POLICIES, LAW_SETTINGS), set(sys.modules), list(sys.path)
    before = [dict(table) for table in tables]
    with contextlib.chdir(folder):
        try:
            yield folder
        finally:
            for table, entries in zip(tables, before, strict=True):
                table.clear()
                table.update(entries)
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]
            sys.path[:] = path
