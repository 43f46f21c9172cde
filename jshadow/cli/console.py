"""Where the commands print their tables."""

import sys

from rich.console import Console


def console(width: int = 120) -> Console:
    """Standard output: as wide as the terminal, or `width` columns in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else width)
