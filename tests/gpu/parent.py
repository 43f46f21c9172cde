"""The parent of a run: no JAX, so that neither an abort nor a broken CUDA context ends what is left of the parts."""

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
LEAST = 15.0  # seconds in which a new child may still measure something


def main(args: argparse.Namespace) -> int:
    """Run the parts in children. Returns the exit status of the whole run."""
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
    """Children one after another until all parts are done or the time is over.

    Args:
        command: starts a child; the seconds that it has are added to it.
        out: folder of the results; a child goes on with the gpu.json that it finds there.
        end: of the run, by time.monotonic().

    Returns:
        All results; None: there is no GPU.
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
            if status != STOPPED:  # else the row that broke the device is there
                blame(results, status, end)
            save(out, results)
            if late or not results.get("machine"):  # JAX does not even start
                break
    rows = results["parts"].get((results.get("running") or {}).get("part"))
    if rows:
        rows.append({"name": "the rest of this part", "status": LATE})
    close_off(results)
    save(out, results)
    return results


def child(command: list[str], end: float, log: TextIO) -> int:
    """One child's exit status; what it prints goes to stderr and to the log."""
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
    """List the task during which a child died; the next child leaves it out."""
    running = results.get("running") or {"part": "none", "name": "start"}
    rows = results["parts"].setdefault(running["part"], [])
    over = time.monotonic() > end
    why = f"the process ended with exit status {status}"
    rows.append({"name": running["name"], "status": CUT if over else DIED, "error": why})
