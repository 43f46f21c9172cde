"""Parts of tasks, one after another, against a clock: nothing is dropped silently, and one failure stops no other."""

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
CUT, NOT_HERE, NOT_ASKED = "cut off: out of time", "not measured: not on this machine", "not asked"
PARTLY, DIED = "measured in part: error", "error: the process died"
BAD = (FAILED, RAISED, CUT, PARTLY, DIED)
SHOWN = (MEASURED, FAILED, PARTLY)  # rows with figures
GRACE = 8.0  # seconds past the deadline after which a task that does not return is left behind
STOPPED = 75  # exit status of a process whose device can do nothing more
# What CUDA says from the first bad kernel on, of every call of this process.
POISON = re.compile(r"CUDA_ERROR_(?!OUT_OF_MEMORY)|illegal|unspecified launch")


class NotHere(Exception):
    """A task that this machine cannot do, and why: no failure."""


class Late(Exception):
    """A task for which too little time is left after all."""


class Task(NamedTuple):
    """Something to check or to measure.

    Attributes:
        name: for the tables, unique in its part.
        needs: seconds that must be left when it starts.
        run: returns a row of plain values; {"ok": False} in it is a failed check, {"error": ...} anywhere in it a
            figure that is missing.
    """

    name: str
    needs: float
    run: Callable[[], dict[str, Any]]


Parts = dict[str, Callable[[], Iterator[Task]]]


class Runner:
    """Runs parts and keeps `gpu.json` up to date.

    Args:
        out: folder of the results.
        about: what is told beside them, plain values; "parts" in it: what an earlier process has done already.
        seconds: from now to the deadline.
        say: told each line of progress.
        finish: called with the results after each part, or when the time is over in the middle of a task.
    """

    def __init__(
        self,
        out: Path,
        about: dict[str, Any],
        seconds: float,
        *,
        say: Callable[[str], None] = print,
        finish: Callable[[dict[str, Any]], None] = lambda results: None,
    ) -> None:
        self.out, self.say, self.finish = out, say, finish
        self.end = time.monotonic() + seconds
        self.results: dict[str, Any] = {"parts": {}} | about
        self.running = {"part": "none", "name": "start"}
        self.poisoned = False
        self.lock = threading.RLock()

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.end - time.monotonic()

    def run(self, parts: Parts, only: str | None = None) -> int:
        """Run them in order. Returns the exit status, see `exit_status`, or STOPPED."""
        for name in parts:
            self.results["parts"].setdefault(name, [])
        for name, tasks in parts.items():
            rows = self.results["parts"][name]
            if only not in (None, name):
                rows[:] = [{"name": name, "status": NOT_ASKED}]
            elif all(row["name"] != name for row in rows):  # else an earlier process died of its preparation
                self.part(name, rows, tasks)
                with contextlib.suppress(Exception):  # the page is made again at the end
                    self.finish(self.results)
            if self.poisoned:
                return STOPPED
        self.results["finished"] = True
        self.write()
        return exit_status(self.results)

    def part(self, name: str, rows: list[dict[str, Any]], tasks: Callable[[], Iterator[Task]]) -> None:
        """All tasks of a part that are not done."""
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
        except Exception as error:  # whatever one part does, the others go on
            self.note(name, rows, {"name": name} | told(error))

    def now(self, part: str, name: str) -> None:
        """Write down what runs: of a process that dies, nobody else could tell."""
        self.running = self.results["running"] = {"part": part, "name": name}
        self.write()

    def one(self, part: str, rows: list[dict[str, Any]], task: Task) -> None:
        """Run a task, if there is time for it."""
        if self.left < task.needs:
            self.note(part, rows, {"name": task.name, "status": LATE, "left": self.left, "needs": task.needs})
            return
        start = time.monotonic()
        self.now(part, task.name)
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
        self.note(part, rows, {"name": task.name} | row | {"seconds": time.monotonic() - start})

    def note(self, part: str, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        """Keep a row, say it and write everything."""
        with self.lock:
            rows.append(row)
            self.write()
        self.poisoned = self.poisoned or bool(POISON.search(json.dumps(row | {"trace": ""}, default=str)))
        brief = {key: value for key, value in row.items() if isinstance(value, (str, bool, int, float))}
        brief = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in brief.items()}
        text = ", ".join(f"{key} {value}" for key, value in brief.items() if key not in ("name", "trace"))
        self.say(f"[{self.left:5.0f} s left] {part}: {row['name']}: {text}")

    def write(self) -> None:
        """gpu.json, whole at every moment."""
        with self.lock:
            save(self.out, self.results)

    def cut(self) -> None:
        """End the process; what runs is listed as cut off."""
        try:
            self.lock.acquire(timeout=3)  # better a file that lacks a row than a process that does not end
            rows = self.results["parts"].setdefault(self.running["part"], [])
            why = "the rest of this part was not measured"
            rows.append({"name": self.running["name"], "status": CUT, "why": why})
            close_off(self.results)
            save(self.out, self.results)
            self.finish(self.results)
        finally:
            os._exit(1)  # the main thread sits in code that no exception reaches

    def watch(self, grace: float) -> threading.Timer:
        """End the process `grace` seconds after the deadline, should a task (a compilation, say) not return by then."""
        timer = threading.Timer(self.left + grace, self.cut)
        timer.daemon = True
        timer.start()
        return timer


def save(out: Path, results: dict[str, Any]) -> None:
    """Write gpu.json, whole at every moment."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu.json.new"
    path.write_text(json.dumps(results, indent=1, default=str))
    path.replace(out / "gpu.json")


def close_off(results: dict[str, Any]) -> None:
    """Nothing more will be measured: parts that never began say so."""
    for rows in results["parts"].values():
        if not rows:
            rows.append({"name": "all", "status": LATE})
    results["finished"] = True


def exit_status(results: dict[str, Any]) -> int:
    """1 if a check failed or something raised, 3 if else a whole part was out of time, 0."""
    parts = results["parts"].values()
    if any(row["status"] in BAD for rows in parts for row in rows):
        return 1
    return 3 if any(rows and all(row["status"] == LATE for row in rows) for rows in parts) else 0


def told(error: Exception) -> dict[str, Any]:
    """An exception as a row."""
    trace = traceback.format_exception(error)
    return {"status": RAISED, "error": brief(error), "trace": "".join(trace)[-3000:]}


def brief(error: Exception) -> str:
    """An exception in a line or a few."""
    return f"{type(error).__name__}: {error}"[:600]


def attempt(function: Callable[[], Any]) -> Any:
    """What it returns, or {"error": ...}: one figure that fails must not take finished ones with it."""
    try:
        return function()
    except Exception as error:
        return {"error": brief(error)}


def errors(value: Any) -> list[str]:
    """All errors in nested values."""
    if isinstance(value, dict):
        own = [str(value["error"])] if isinstance(value.get("error"), str) else []
        return own + [text for one in value.values() for text in errors(one)]
    return [text for one in value for text in errors(one)] if isinstance(value, list) else []
