"""A child process of a run. It runs all parts, or those that an earlier child left."""

import argparse
import faulthandler
import json
import os
import sys

from gpu import environment, report
from gpu.runner import GRACE, Runner


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> int:
    """Run the remaining parts. Returns 2 if there is no GPU; otherwise ends the process with the runner's status."""
    # The last resort against a hang. It needs neither Python's lock nor a Python thread.
    faulthandler.dump_traceback_later(args.seconds + GRACE + 10, exit=True)
    path = args.out / "gpu.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}

    def page(results: dict) -> None:
        (args.out / "gpu.md").write_text(report.markdown(results))

    about = {"dry_run": args.dry_run, "machine": {}} | earlier
    runner = Runner(args.out, about, args.seconds, say=say, finish=page)
    timer = runner.watch(GRACE)  # before JAX is imported, because its start on a GPU may hang too
    import jax

    from gpu import parts
    from gpu.sizes import DRY, REAL

    if not args.dry_run and jax.default_backend() != "gpu":
        print("no GPU here; --dry-run runs tiny sizes on any backend", file=sys.stderr)
        return 2
    sizes, pool = DRY if args.dry_run else REAL, environment.pool()
    runner.results |= {"machine": environment.machine(pool), "longest": sizes.capacities[0]}
    for key, value in runner.results["machine"].items():
        say(f"{key}: {value}")
    status = runner.run(parts.all_parts(sizes, runner, pool), args.only)
    timer.cancel()
    sys.stderr.flush()
    os._exit(status)  # a normal exit of JAX could hang or abort on a broken device
