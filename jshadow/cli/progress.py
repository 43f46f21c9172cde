"""Progress bars that appear only when work takes a while."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, TaskID

SLOW_SECONDS = 2.0  # work longer than this shows a progress bar


def bar() -> Progress:
    """A bar on stderr that leaves nothing behind; silent where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def waiting(title: str) -> Iterator[None]:
    """A bar without an end, for work that cannot tell how far it is (compilation), once it takes a while."""
    progress = bar()
    progress.add_task(title, total=None)
    timer = threading.Timer(SLOW_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


class SlowProgress:
    """A progress callback whose bar appears on stderr only once the work has taken a while."""

    def __init__(self, title: str) -> None:
        self.title, self.start = title, time.perf_counter()
        self.bar: Progress | None = None
        self.task = TaskID(0)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` parts are finished."""
        if self.bar is None and time.perf_counter() - self.start > SLOW_SECONDS and done < total:
            self.bar = bar()
            self.task = self.bar.add_task(self.title, total=total)
            self.bar.start()
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
            if done >= total:
                self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
