"""Parts of tasks, one after another, against a clock: nothing is dropped silently, and one failure stops no other."""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MEASURED, FAILED, RAISED, LATE = "measured", "failed", "error", "not measured: out of time"
CUT, NOT_HERE, NOT_ASKED = "cut off: out of time", "not measured: not on this machine", "not asked"
BAD = (FAILED, RAISED, CUT)


class NotHere(Exception):
    """A task that this machine cannot do, and why: no failure."""


class Task(NamedTuple):
    """Something to check or to measure.

    Attributes:
        name: for the tables.
        needs: seconds that must be left when it starts.
        run: returns a row of plain values; {"ok": False} in it is a failed check.
    """

    name: str
    needs: float
    run: Callable[[], dict[str, Any]]


Parts = dict[str, Callable[[], Iterator[Task]]]


class Runner:
    """Runs parts and keeps `gpu.json` up to date.

    Args:
        out: folder of the results.
        about: what is told beside them, plain values.
        seconds: from now to the deadline.
        say: told each line of progress.
        finish: called with the results when all is done, or when the time is over in the middle of a task.
    """

    def __init__(
        self, out: Path, about: dict[str, Any], seconds: float, *, say: Callable[[str], None] = print,
        finish: Callable[[dict[str, Any]], None] = lambda results: None,
    ) -> None:  # fmt: skip
        self.out, self.say, self.finish = out, say, finish
        self.end = time.monotonic() + seconds
        self.results: dict[str, Any] = about | {"parts": {}}
        self.running = {"part": "none", "name": "start"}
        self.lock = threading.RLock()

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.end - time.monotonic()

    def run(self, parts: Parts, only: str | None = None) -> int:
        """Run them in order. Returns the exit status: 1 if a check failed or something raised."""
        for name in parts:
            self.results["parts"][name] = []
        for name, tasks in parts.items():
            rows = self.results["parts"][name]
            if only not in (None, name):
                rows.append({"name": name, "status": NOT_ASKED})
                continue
            self.running = {"part": name, "name": "preparation"}
            made: Iterator[Task] = iter(())
            try:
                made = tasks()
                for task in made:
                    self.one(name, rows, task)
            except Exception as error:  # whatever one part does, the others go on
                self.note(name, rows, {"name": name} | told(error))
            finally:
                getattr(made, "close", lambda: None)()
        self.finish(self.results)
        return int(self.bad())

    def one(self, part: str, rows: list[dict[str, Any]], task: Task) -> None:
        """Run a task, if there is time for it."""
        if self.left < task.needs:
            self.note(part, rows, {"name": task.name, "status": LATE, "left": self.left, "needs": task.needs})
            return
        before, start = self.running, time.monotonic()
        self.running = {"part": part, "name": task.name}
        try:
            row = task.run()
            row = {"status": FAILED if row.get("ok") is False else MEASURED} | row
        except NotHere as error:
            row = {"status": NOT_HERE, "why": str(error)}
        except Exception as error:
            row = told(error)
        self.running = before
        self.note(part, rows, {"name": task.name} | row | {"seconds": time.monotonic() - start})

    def note(self, part: str, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        """Keep a row, say it and write everything."""
        with self.lock:
            rows.append(row)
            self.write()
        brief = {key: value for key, value in row.items() if isinstance(value, (str, bool, int, float))}
        brief = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in brief.items()}
        text = ", ".join(f"{key} {value}" for key, value in brief.items() if key not in ("name", "trace"))
        self.say(f"[{self.left:5.0f} s left] {part}: {row['name']}: {text}")

    def bad(self) -> bool:
        """Whether a check failed or something raised."""
        return any(row["status"] in BAD for rows in self.results["parts"].values() for row in rows)

    def write(self) -> None:
        """gpu.json, whole at every moment."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "gpu.json.new"
        path.write_text(json.dumps(self.results, indent=1, default=str))
        path.replace(self.out / "gpu.json")

    def watch(self, grace: float) -> threading.Timer:
        """End the process `grace` seconds after the deadline, should a task (a compilation, say) not return by then."""

        def cut() -> None:
            with self.lock:
                rows = self.results["parts"].setdefault(self.running["part"], [])
                why = "the rest of this part was not measured"
                rows.append({"name": self.running["name"], "status": CUT, "why": why})
                for rows in self.results["parts"].values():
                    if not rows:
                        rows.append({"name": "all", "status": LATE})
                self.write()
                self.finish(self.results)
            os._exit(1)  # the main thread sits in code that no exception reaches

        timer = threading.Timer(self.left + grace, cut)
        timer.daemon = True
        timer.start()
        return timer


def told(error: Exception) -> dict[str, Any]:
    """An exception as a row."""
    trace = traceback.format_exception(error)
    return {"status": RAISED, "error": f"{type(error).__name__}: {error}"[:600], "trace": "".join(trace)[-3000:]}
