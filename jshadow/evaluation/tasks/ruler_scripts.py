"""A program that runs the scripts of RULER with their options. The module `ruler` starts it as a child process.

It imports nothing from jshadow. The scripts read `sys.argv` and seed the global generators when they are loaded. Some
of them try forever to make a sample that cannot be made, and they catch every exception. So the program counts the
attempts, and it ends with the status STUCK after too many.

It reads one JSON object from stdin:

- jobs: a list of objects with `task`, `script` (a path) and `options` (the words of the script's command line).
- attempts: number of calls in a row with the same arguments after which a script counts as stuck.

If a job fails, the last line of stderr is the name of its task and the reason.
"""

import contextlib
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

STUCK = 3  # the exit status if a script cannot make a sample


class _Counted:
    """A function that calls `give_up` after more than `most` calls in a row with the same arguments."""

    def __init__(self, function: Callable[..., Any], most: int, give_up: Callable[[], None]) -> None:
        self.function, self.most, self.give_up = function, most, give_up
        self.last: Any = None
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        same = self.last == (args, options)
        self.last, self.calls = (args, options), self.calls + 1 if same else 1
        if self.calls > self.most:
            self.give_up()
        return self.function(*args, **options)


def _run_job(job: dict[str, Any], attempts: int, give_up: Callable[[], None]) -> None:
    """Load a script of RULER and call its main function. The script writes a JSONL file."""
    sys.argv = [job["script"], *job["options"]]
    spec = importlib.util.spec_from_file_location("ruler_script", job["script"])
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.generate_input_output = _Counted(script.generate_input_output, attempts, give_up)
    script.main()


def _main() -> int:
    """Run all jobs. Returns the exit status: 0, or 1 if a script failed."""
    asked, told = json.load(sys.stdin), sys.stderr
    for job in asked["jobs"]:
        folder = os.path.dirname(job["script"])
        if folder not in sys.path:
            sys.path[:0] = [folder, os.path.dirname(folder)]  # the scripts import modules by their bare names

        def give_up(task: str = job["task"]) -> None:
            print(f"{task}: no sample fits", file=told, flush=True)
            os._exit(STUCK)  # the script would catch an exception

        try:
            with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
                _run_job(job, asked["attempts"], give_up)
                gc.collect()  # a script's list of words takes about 1 GiB
        except (Exception, SystemExit) as error:
            print(f"{job['task']}: {type(error).__name__}: {error}", file=told, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
