"""Progress on stderr, shown only when work takes a while: a bar on a terminal, else a line every few seconds."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jshadow.engine.types import PrefillProgress

SLOW_SECONDS = 2.0  # work longer than this shows a bar on a terminal
LINE_SECONDS = 10.0  # between two lines in a file or a pipe
REFRESH_SECONDS = 0.2


class SlowProgress:
    """A progress callback that shows how far the work is, once the work has taken a while.

    Until the first call, the display also shows `first`, because JAX is then compiling. Close it when the work has
    ended.
    """

    def __init__(self, title: str, *, first: str = "compiling") -> None:
        """Start to watch the time.

        Args:
            title: the name of the work.
            first: what is done before the first call. It is "" if nothing but the work itself is done.
        """
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
