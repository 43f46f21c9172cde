"""`make gpu`: what only a machine with an NVIDIA GPU can show, in one unattended run, the most important first."""

import argparse
import json
import sys
import time
from pathlib import Path

from gpu import environment

PARTS = ("correctness", "ceilings", "fetch", "decode", "layer", "compress")
GRACE = 8.0  # seconds past the deadline after which a task that does not return is left behind


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on any backend; its figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print gpu.json at the end instead of gpu.md")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    parser.add_argument("--seconds", type=float, default=520, help="from the start to the end (default: %(default)s)")
    parser.add_argument(
        "--host-gib", type=float, help="pinned memory that may be taken (default: what is available less 12 GiB)"
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run the parts. Returns 1 if a check failed or something raised, 2 if there is no GPU."""
    begin, args = time.monotonic(), arguments(given)
    pool = environment.prepare(args.out, args.host_gib)
    # Only now: JAX reads the environment when it is imported.
    import jax

    from gpu import parts, report
    from gpu.runner import Runner
    from gpu.sizes import DRY, REAL

    if not args.dry_run and jax.default_backend() != "gpu":
        print("no GPU here; --dry-run runs tiny sizes on any backend", file=sys.stderr)
        return 2
    about = {"dry_run": args.dry_run, "machine": environment.machine(pool)}
    for key, value in about["machine"].items():
        print(f"{key}: {value}", file=sys.stderr, flush=True)

    def finish(results: dict) -> None:
        text = report.markdown(results)
        (args.out / "gpu.md").write_text(text)
        print(json.dumps(results, default=str) if args.json else text, flush=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    left = args.seconds - (time.monotonic() - begin)  # starting JAX on a GPU takes its time
    runner = Runner(args.out, about, left, say=say, finish=finish)
    timer = runner.watch(GRACE)
    status = runner.run(parts.all_parts(DRY if args.dry_run else REAL, runner, pool), args.only)
    timer.cancel()
    return status


if __name__ == "__main__":
    sys.exit(main())
