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
from gpu.__main__ import PARTS
from gpu.runner import CUT, DIED, GRACE, LATE, STOPPED, close_off, exit_status, load, save

CHILDREN = 8
NO_GPU = 2
LEAST = 15.0  # no new child is started with fewer seconds left
TORCH_SECONDS = 60.0


def main(args: argparse.Namespace) -> int:
    """Run one part, or all parts in turn, in child processes. Returns the exit status of the whole run."""
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    environment.prepare(args.host_gib, probe=not args.dry_run)
    statuses = []
    for part in [args.part] if args.part else PARTS:
        results = run_part(args, part, begin + args.seconds)
        if results is None:
            return NO_GPU
        statuses.append(exit_status(results))
        begin = time.monotonic()
    every = {part: load(args.out / f"{part}.json") for part in PARTS}
    text = report.write_page(args.out)
    print(json.dumps({part: found for part, found in every.items() if found}) if args.json else text, flush=True)
    return next((status for status in (1, 3) if status in statuses), 0)


def run_part(args: argparse.Namespace, part: str, end: float) -> dict[str, Any] | None:
    """Run one part until `end`, in time.monotonic(). Returns its results, or None if there is no GPU."""
    path = args.out / f"{part}.json"
    moved = prepare_file(path, args.resume)
    dry = ["--dry-run"] if args.dry_run else []
    chosen = args.sections.split(",") if args.sections else ["dense"]
    if part == "layers" and "dense" in chosen and "torch" not in (found := load(path)):
        # Before JAX takes the memory of the device.
        save(path, found | {"torch": torch_rows([sys.executable, "-m", "gpu.torch_attention", *dry])})
    command = [sys.executable, "-u", "-m", "gpu", "--worker", "--part", part, "--out", str(args.out), *dry]
    command += ["--sections", args.sections] if args.sections else []
    results = supervise(command, path, end)
    if results is None and moved:
        moved.replace(path)
    elif results is None and not load(path).get("machine"):
        path.unlink(missing_ok=True)  # it has nothing but what was prepared for this call
    return results


def prepare_file(path: Path, resume: bool) -> Path | None:
    """Make room for new results. Earlier results are not deleted: their file gets another name, which is returned.

    With `resume` they stay, except rows that had no time, and None is returned.
    """
    if not path.exists():
        return None
    earlier = load(path)
    if not resume:
        date = str(earlier.get("machine", {}).get("date", "unknown")).replace(":", "")
        return path.replace(path.with_name(f"{path.stem}-{date}.json"))
    for name, rows in earlier.get("sections", {}).items():
        late = {row["name"] for row in rows if row["status"] in (LATE, CUT)}
        earlier["sections"][name] = [row for row in rows if row["name"] not in late]
    save(path, {key: value for key, value in earlier.items() if key not in ("finished", "running")})
    return None


def torch_rows(command: list[str]) -> dict[str, Any]:
    """Return what `gpu.torch_attention` prints, or {"not_available": reason}."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"not_available": f"the process with torch: {error}"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        told = f"the process with torch ended with exit status {done.returncode}"
        return {"not_available": f"{told}: {done.stderr[-300:]}"}
    return found


def supervise(command: list[str], path: Path, end: float) -> dict[str, Any] | None:
    """Start one child after another until all sections are done or the time is over.

    Args:
        command: command that starts a child. `--seconds` is added to it.
        path: file of the results. A child continues the results that it finds there.
        end: end of the part, in time.monotonic().

    Returns:
        All results, or None if there is no GPU.
    """
    results: dict[str, Any] = {"sections": {}}
    with path.with_suffix(".log").open("a", encoding="utf-8") as log:
        for _ in range(CHILDREN):
            status = child([*command, "--seconds", f"{end - time.monotonic():.1f}"], end, log)
            if status == NO_GPU:
                return None
            results = {"sections": {}} | load(path)
            if results.get("finished"):
                return results
            late = end - time.monotonic() < LEAST
            if status != STOPPED:  # otherwise the task that broke the device already has a row
                blame(results, status, end)
            save(path, results)
            if late or not results.get("machine"):  # no machine means that JAX did not start
                break
    rows = results["sections"].get((results.get("running") or {}).get("section"))
    if rows:
        rows.append({"name": "the rest of this section", "status": LATE})
    close_off(results)
    save(path, results)
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
    running = results.get("running") or {"section": "none", "name": "start"}
    rows = results["sections"].setdefault(running["section"], [])
    over = time.monotonic() > end
    why = f"the process ended with exit status {status}"
    rows.append({"name": running["name"], "status": CUT if over else DIED, "error": why})
