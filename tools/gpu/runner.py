"""Runs sections of tasks within a time limit. Skipped tasks are reported, and a failure stops no other."""

import contextlib
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MEASURED, FAILED, RAISED, LATE = "measured", "failed", "error", "not measured: out of time"
CUT, NOT_HERE = "cut off: out of time", "not available"
PARTLY, DIED = "measured in part: error", "error: the process died"
BAD = (FAILED, RAISED, CUT, PARTLY, DIED)
SHOWN = (MEASURED, FAILED, PARTLY)  # statuses of rows with measurements
GRACE = 8.0  # a task that has not returned this many seconds after the deadline is abandoned
STOPPED = 75  # exit status of a process whose device is unusable
# Texts of CUDA errors after which every further call of the process fails.
POISON = re.compile(r"CUDA_ERROR_(?!OUT_OF_MEMORY)|illegal|unspecified launch")


class NotHere(Exception):
    """The error that this machine cannot run a task. It is not counted as a failure."""


class Late(Exception):
    """The error that a task has too little time left."""


class Task(NamedTuple):
    """A check or a measurement.

    Attributes:
        name: name in the tables, unique in its section.
        needs: seconds that must be left when it starts.
        run: function that returns a row of plain values. {"ok": False} means a failed check. {"error": ...} at any
            depth means a missing measurement.
    """

    name: str
    needs: float
    run: Callable[[], dict[str, Any]]


Sections = dict[str, Callable[[], Iterator[Task]]]


class Runner:
    """Runs the sections of one part of a run, and writes the results after each task.

    Args:
        path: the JSON file of the results.
        about: further entries of the results. Its "sections" are the rows of an earlier process.
        seconds: time until the deadline.
        say: called with each line of progress.
        finish: called with the results after each section, and when the time runs out during a task.
    """

    def __init__(
        self,
        path: Path,
        about: dict[str, Any],
        seconds: float,
        *,
        say: Callable[[str], None] = print,
        finish: Callable[[dict[str, Any]], None] = lambda results: None,
    ) -> None:
        self.path, self.say, self.finish = path, say, finish
        self.end = time.monotonic() + seconds
        self.results: dict[str, Any] = {"sections": {}} | about
        self.running = {"section": "none", "name": "start"}
        self.poisoned = False
        self.lock = threading.RLock()

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()

    def run(self, sections: Sections) -> int:
        """Run the sections in order. Returns the exit status (see `exit_status`), or STOPPED."""
        for name in sections:
            self.results["sections"].setdefault(name, [])
        for name, tasks in sections.items():
            rows = self.results["sections"][name]
            if all(row["name"] != name for row in rows):  # otherwise an earlier process died at its start
                self.section(name, rows, tasks)
                with contextlib.suppress(Exception):  # the page is written again at the end
                    self.finish(self.results)
            if self.poisoned:
                return STOPPED
        self.results["finished"] = True
        self.write()
        return exit_status(self.results)

    def section(self, name: str, rows: list[dict[str, Any]], tasks: Callable[[], Iterator[Task]]) -> None:
        """Run all tasks of a section that have no row."""
        self.now(name, name)
        made: Iterator[Task] = iter(())
        try:
            made = tasks()
            for task in made:
                if all(row["name"] != task.name for row in rows):
                    self.one(name, rows, task)
                if self.poisoned:
                    break
                self.now(name, name)
            with contextlib.suppress(Exception) if self.poisoned else contextlib.nullcontext():
                getattr(made, "close", lambda: None)()
        except Exception as error:  # the other sections still run
            self.note(name, rows, {"name": name} | told(error))

    def now(self, section: str, name: str) -> None:
        """Write the name of the running task to the file, so that it is known if the process dies."""
        self.running = self.results["running"] = {"section": section, "name": name}
        self.write()

    def one(self, section: str, rows: list[dict[str, Any]], task: Task) -> None:
        """Run one task if there is enough time left."""
        if self.left < task.needs:
            self.note(section, rows, {"name": task.name, "status": LATE, "left": self.left, "needs": task.needs})
            return
        start = time.monotonic()
        self.now(section, task.name)
        try:
            row = task.run()
            status = FAILED if row.get("ok") is False else PARTLY if errors(row) else MEASURED
            row = {"status": status} | row
        except NotHere as error:
            row = {"status": NOT_HERE, "why": str(error)}
        except Late as error:
            row = {"status": LATE, "why": str(error)}
        except Exception as error:
            row = told(error)
        self.note(section, rows, {"name": task.name} | row | {"seconds": time.monotonic() - start})

    def note(self, section: str, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        """Add a row, print it, and write the file."""
        with self.lock:
            rows.append(row)
            self.write()
        self.poisoned = self.poisoned or bool(POISON.search(json.dumps(row | {"trace": ""}, default=str)))
        brief = {key: value for key, value in row.items() if isinstance(value, (str, bool, int, float))}
        brief = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in brief.items()}
        text = ", ".join(f"{key} {value}" for key, value in brief.items() if key not in ("name", "trace"))
        self.say(f"[{self.left:5.0f} s left] {section}: {row['name']}: {text}")

    def write(self) -> None:
        """Write the file."""
        with self.lock:
            save(self.path, self.results)

    def cut(self) -> None:
        """List the running task as cut off, and end the process."""
        try:
            self.lock.acquire(timeout=3)  # the timeout makes sure that the process ends
            rows = self.results["sections"].setdefault(self.running["section"], [])
            why = "the rest of this section was not measured"
            rows.append({"name": self.running["name"], "status": CUT, "why": why})
            close_off(self.results)
            save(self.path, self.results)
            self.finish(self.results)
        finally:
            os._exit(1)  # the main thread may be in code that an exception does not stop

    def watch(self, grace: float) -> threading.Timer:
        """Start a timer that ends the process `grace` seconds after the deadline, if a task is still running."""
        timer = threading.Timer(self.left + grace, self.cut)
        timer.daemon = True
        timer.start()
        return timer


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results to a JSON file. The file is complete at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(results, indent=1, default=str))
    new.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Return the results in a JSON file, or none if the file does not exist."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


def close_off(results: dict[str, Any]) -> None:
    """Mark the results as finished, and add a row to each section that never began."""
    for rows in results["sections"].values():
        if not rows:
            rows.append({"name": "all", "status": LATE})
    results["finished"] = True


def exit_status(results: dict[str, Any]) -> int:
    """Return 1 if a check failed or a task raised, 3 if there was no time for a whole section, else 0."""
    sections = results["sections"].values()
    if any(row["status"] in BAD for rows in sections for row in rows):
        return 1
    return 3 if any(rows and all(row["status"] == LATE for row in rows) for rows in sections) else 0


def told(error: Exception) -> dict[str, Any]:
    """Return the row of an exception."""
    trace = traceback.format_exception(error)
    return {"status": RAISED, "error": brief(error), "trace": "".join(trace)[-3000:]}


def brief(error: Exception) -> str:
    """Describe an exception in at most 600 characters."""
    return f"{type(error).__name__}: {error}"[:600]


def attempt(function: Callable[[], Any]) -> Any:
    """Call a function and return its result, or {"error": ...}. So other measurements of the row are kept."""
    try:
        return function()
    except Exception as error:
        return {"error": brief(error)}


def errors(value: Any) -> list[str]:
    """Return all errors in nested values."""
    if isinstance(value, dict):
        own = [str(value["error"])] if isinstance(value.get("error"), str) else []
        return own + [text for one in value.values() for text in errors(one)]
    return [text for one in value for text in errors(one)] if isinstance(value, list) else []
