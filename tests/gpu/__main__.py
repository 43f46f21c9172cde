"""`make gpu`: the checks and measurements that need an NVIDIA GPU, in one unattended run, the most important first."""

import argparse
import sys
from pathlib import Path

PARTS = ("ceilings", "correctness", "fetch", "decode", "layer", "decode-more", "decode-packed", "compress")


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on any backend; its figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print gpu.json at the end instead of gpu.md")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    parser.add_argument("--seconds", type=float, default=520, help="from the start to the end (default: %(default)s)")
    parser.add_argument(
        "--host-gib", type=float, help="pinned memory that may be taken (default: what is available less 20 GiB)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # for child processes
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run the parts.

    Returns:
        The exit status: 1 if a check failed or a task raised, 2 without a GPU, 3 if there was no time for a part.
    """
    args = arguments(given)
    # The imports are local, because the parent must not import JAX. So it survives any failure of a kernel.
    if args.worker:
        from gpu import worker

        return worker.main(args)
    from gpu import parent

    return parent.main(args)


if __name__ == "__main__":
    sys.exit(main())
