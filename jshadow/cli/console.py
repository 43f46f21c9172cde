"""What a command reads and prints: texts, tables that never cut a number, and progress on stderr."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jshadow.errors import CheckpointError, PromptError
from jshadow.weights import tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from jshadow.engine.types import PrefillProgress

_PADDING = 3  # columns that a border and two blanks take, for each column of a table
SLOW_SECONDS = 2.0  # work longer than this shows a bar on a terminal
LINE_SECONDS = 10.0  # between two lines in a file or a pipe
REFRESH_SECONDS = 0.2


def read_text(path: str, option: str) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with its mark of byte order.

    Raises PromptError, which names the option, if the file cannot be read, is not such text, or has no text in it.
    """
    try:
        text = tokenizer.read_text(Path(path).expanduser())
    except (OSError, UnicodeError) as error:
        raise PromptError(f"{option} must be readable UTF-8 text: {error}") from error
    if "\0" in text:
        raise PromptError(f"{option} must be readable UTF-8 text, got a binary file: {path}")
    if not text.strip():
        raise PromptError(f"{option} must have text in it, got {text!r:.20}")
    return text


def check_writable(path: str | os.PathLike[str], option: str) -> None:
    """Raise CheckpointError, which names the option, if a file cannot be written. Its folder may be missing."""
    target = Path(path).expanduser()
    try:
        existing = next(folder for folder in target.absolute().parents if folder.exists())
        usable = not target.is_dir() and existing.is_dir() and os.access(existing, os.W_OK)
    except OSError:  # a name that is too long, or a folder that may not be read
        usable = False
    if not usable:
        raise CheckpointError(
            f"file {target} cannot be written: {option} must be a file in a directory that can be written to"
        )


def console(width: int = 120) -> "Console":
    """Return standard output as a console: as wide as the terminal, or `width` columns in a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def show_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    width: int = 120,
    title: str | None = None,
    right: bool = False,
    wrap: bool = False,
) -> None:
    """Print a table whose first column has labels.

    Args:
        head: the titles of the columns.
        rows: the cells of each row. Cells that are missing at the end are empty.
        width: number of characters of a line in a file or a pipe. A terminal has its own.
        title: the line above the table.
        right: whether the columns after the first one are aligned to the right.
        wrap: whether long cells are broken into lines. If not, columns that do not fit go into further tables.
    """
    from rich.table import Table

    out, table = console(width), Table(title=title)
    for place, name in enumerate(head):
        table.add_column(
            name, justify="right" if right and place else "left", overflow="fold", no_wrap=wrap and not place
        )
    for row in rows:
        table.add_row(*row)
    if wrap:
        out.print(table)
    else:
        print_table(table, out)


def print_table(table: "Table", out: "Console") -> None:
    """Print a table whose first column has labels. Columns that do not fit the width go into further tables.

    The cells of the table are strings. The lines of each column after the first are not broken.
    """
    from rich.cells import cell_len
    from rich.table import Table

    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(cell_len(line) for text in cells for line in text.split("\n")) + _PADDING for cells in texts]
    # A long label may wrap, down to a third of the width.
    room = out.width - 1 - min(widths[0], out.width // 3)
    groups: list[list[int]] = [[]]
    for index in range(1, len(widths)):
        if groups[-1] and sum(widths[one] for one in groups[-1]) + widths[index] > room:
            groups.append([])
        groups[-1].append(index)
    for group in groups:
        part = Table(title=table.title)
        part.add_column(texts[0][0], overflow="fold")
        for index in group:
            part.add_column(texts[index][0], justify=table.columns[index].justify, no_wrap=True, overflow="fold")
        for row in zip(*(texts[index][1:] for index in (0, *group)), strict=True):
            part.add_row(*row)
        out.print(part)


def show_sentences(sentences: Iterable[str], width: int = 120) -> None:
    """Print sentences, each of which begins a line."""
    for sentence in sentences:
        console(width).print(sentence, highlight=False)


class SlowProgress:
    """A progress callback that shows how far the work is, once the work has taken a while.

    Until the first call, the display also shows `first`, because JAX is then compiling. It is "" if nothing but the
    work itself is done. Close the display when the work has ended.
    """

    def __init__(self, title: str, *, first: str = "compiling") -> None:
        self.title, self.first = title, first
        self.place: tuple[int, int] | None = None
        self.detail = ""
        self.begin = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def __call__(self, done: int, total: int) -> None:
        """Note that `done` of `total` parts are finished."""
        self.place = done, total

    def prefill(self, progress: "PrefillProgress") -> None:
        """Note how far a prefill is, in thousandths of its operations."""
        rate, left = progress.tokens_per_second, progress.seconds_left
        parts = []
        if progress.num_layers:
            parts.append(f"layer {min(progress.layers + 1, progress.num_layers)} of {progress.num_layers}")
        if progress.num_units:
            parts.append(f"unit {progress.units} of {progress.num_units}")
        if rate is not None and left is not None:
            parts += [f"{rate:,.0f} tokens/s", f"{left:,.0f} s left"]
        self.place, self.detail = (round(1000 * progress.share), 1000), ", ".join(parts)

    def __enter__(self) -> "SlowProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar, and print no more lines. A second call does nothing."""
        self.ended.set()
        self.thread.join()

    @property
    def name(self) -> str:
        """The title, with what is done before the first call, or the place in a prefill."""
        what = self.first if self.place is None else self.detail
        return f"{self.title}: {what}" if what else self.title

    def _watch(self) -> None:
        if sys.stderr.isatty():
            if not self.ended.wait(SLOW_SECONDS):
                self._bar()
            return
        while not self.ended.wait(LINE_SECONDS):
            where = "" if self.place is None or self.detail else ", {} of {}".format(*self.place)
            seconds = time.monotonic() - self.begin
            print(f"jshadow: {self.name}{where} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self.name, total=None)
            while not self.ended.wait(REFRESH_SECONDS):
                done, total = self.place or (0, None)
                bar.update(task, description=self.name, completed=done, total=total)


@contextlib.contextmanager
def waiting(title: str) -> Iterator[None]:
    """Show that work is in progress that cannot report how far it is, such as a compilation."""
    with SlowProgress(title, first=""):
        yield
