"""A child process of a run. It runs the sections of one part, or those that an earlier child left."""

import argparse
import faulthandler
import os
import sys

from gpu import environment, report
from gpu.baseline import Baseline
from gpu.runner import GRACE, Runner, load


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def other_machine(earlier: dict, now: dict) -> str | None:
    """Return why results cannot be added to earlier ones, or None. Both are descriptions of a machine."""
    if all(earlier.get(key) in (None, now[key]) for key in ("device", "jax")):
        return None
    told = " and ".join(f"{one['device']} with jax {one['jax']}" for one in (earlier, now))
    return f"results of {told} cannot be in one file: run without --resume"


def main(args: argparse.Namespace) -> int:
    """Run the remaining sections, and end the process with the runner's status.

    Returns 2 if nothing can run: there is no GPU, or the file has results of another device or version of JAX.
    """
    # The last resort against a hang. It needs neither Python's lock nor a Python thread.
    faulthandler.dump_traceback_later(args.seconds + GRACE + 10, exit=True)
    path = args.out / f"{args.part}.json"
    earlier = load(path)
    about = {"dry_run": args.dry_run, "machine": {}} | earlier
    runner = Runner(path, about, args.seconds, say=say, finish=lambda results: report.write_page(args.out))
    timer = runner.watch(GRACE)  # before JAX is imported, because its start on a GPU may hang too
    import jax

    from gpu import parts
    from gpu.sizes import DRY, REAL

    if not args.dry_run and jax.default_backend() != "gpu":
        say(f"no GPU here: JAX finds only {jax.devices()[0].device_kind}. --dry-run runs tiny sizes on any backend.")
        return 2
    sizes, pool = DRY if args.dry_run else REAL, environment.pool()
    runner.results |= {"machine": environment.machine(pool), "longest": sizes.capacities[0]}
    if reason := other_machine(earlier.get("machine", {}), runner.results["machine"]):
        say(f"{path}: {reason}")
        return 2
    for key, value in runner.results["machine"].items():
        say(f"{key}: {value}")
    baseline = Baseline(args.out / "baseline.json", runner.results["machine"] | {"dry_run": args.dry_run})
    for line in baseline.told():
        say(line)
    runner.results["notes"] = baseline.told()
    sections = parts.sections(args.part, sizes, runner, baseline)
    chosen = args.sections.split(",") if args.sections else list(sections)
    if unknown := set(chosen) - set(sections):
        say(f"--sections must be some of {', '.join(sections)}, got {', '.join(sorted(unknown))}")
        return 2
    status = runner.run({name: sections[name] for name in chosen})
    timer.cancel()
    sys.stderr.flush()
    os._exit(status)  # a normal exit of JAX could hang or abort on a broken device
