"""The parent process of a run. It has no JAX, so that an abort or a broken CUDA context does not end the run."""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from gpu import environment, report
from gpu.runner import CUT, DIED, GRACE, LATE, STOPPED, close_off, exit_status, save

CHILDREN = 8
NO_GPU = 2
LEAST = 15.0  # no new child is started with fewer seconds left


def main(args: argparse.Namespace) -> int:
    """Run the parts in child processes. Returns the exit status of the whole run."""
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.json", "gpu.md"):
        (args.out / name).unlink(missing_ok=True)
    environment.prepare(args.host_gib, probe=not args.dry_run)
    command = [sys.executable, "-u", "-m", "gpu", "--worker", "--out", str(args.out)]
    command += ["--dry-run"] if args.dry_run else []
    command += ["--only", args.only] if args.only else []
    results = supervise(command, args.out, begin + args.seconds)
    if results is None:
        return NO_GPU
    text = report.markdown({"dry_run": args.dry_run, "machine": {}} | results)
    (args.out / "gpu.md").write_text(text)
    print(json.dumps(results) if args.json else text, flush=True)
    return exit_status(results)


def supervise(command: list[str], out: Path, end: float) -> dict[str, Any] | None:
    """Start one child after another until all parts are done or the time is over.

    Args:
        command: command that starts a child. `--seconds` is added to it.
        out: folder of the results. A child continues the gpu.json that it finds there.
        end: end of the run, in time.monotonic().

    Returns:
        All results, or None if there is no GPU.
    """
    results: dict[str, Any] = {"parts": {}}
    with (out / "gpu.log").open("w", encoding="utf-8") as log:
        for _ in range(CHILDREN):
            status = child([*command, "--seconds", f"{end - time.monotonic():.1f}"], end, log)
            if status == NO_GPU:
                return None
            if (out / "gpu.json").exists():
                results = json.loads((out / "gpu.json").read_text())
            if results.get("finished"):
                return results
            late = end - time.monotonic() < LEAST
            if status != STOPPED:  # otherwise the task that broke the device already has a row
                blame(results, status, end)
            save(out, results)
            if late or not results.get("machine"):  # no machine means that JAX did not start
                break
    rows = results["parts"].get((results.get("running") or {}).get("part"))
    if rows:
        rows.append({"name": "the rest of this part", "status": LATE})
    close_off(results)
    save(out, results)
    return results


def child(command: list[str], end: float, log: TextIO) -> int:
    """Run one child and return its exit status. Its output goes to stderr and to the log."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        timer = threading.Timer(max(0.0, end - time.monotonic()) + GRACE + 12, process.kill)
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            for stream in (sys.stderr, log):
                stream.write(line)
                stream.flush()
        status = process.wait()
        timer.cancel()
    return status


def blame(results: dict[str, Any], status: int, end: float) -> None:
    """Add a row for the task during which a child died, so that the next child skips it."""
    running = results.get("running") or {"part": "none", "name": "start"}
    rows = results["parts"].setdefault(running["part"], [])
    over = time.monotonic() > end
    why = f"the process ended with exit status {status}"
    rows.append({"name": running["name"], "status": CUT if over else DIED, "error": why})
