"""`make gpu`: the checks and measurements that need an NVIDIA GPU, in three parts of less than nine minutes each.

"checks" measures the peak rates of the machine and of a fetch, and checks the results of every kernel and fetch mode.
"decode" measures tokens per second of full attention and of ShadowKV. "layers" measures the kernels and stages of a
step, dense attention of other libraries, and the compression of a prompt. Each part keeps its results in a JSON file of
its own. gpu.md has the tables of all parts. baseline.json has the best speed of full attention, to which all speeds are
compared, also those of later calls.
"""

import argparse
import sys
from pathlib import Path

PARTS = ("checks", "decode", "layers")


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="this part alone (default: all three in turn)")
    parser.add_argument("--sections", help="run only these sections of the part, as a comma list")
    parser.add_argument("--resume", action="store_true", help="run only tasks of earlier calls that had no time")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on any backend; its figures mean nothing")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: gpu-results, or gpu-results/dry-run with --dry-run)"
    )
    parser.add_argument("--json", action="store_true", help="print the results of all parts as JSON, not as tables")
    parser.add_argument("--seconds", type=float, default=520, help="time of each part (default: %(default)s)")
    parser.add_argument(
        "--host-gib", type=float, help="pinned memory that may be taken (default: what is available less 20 GiB)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # for child processes
    args = parser.parse_args(given)
    if args.sections and not args.part:
        parser.error("--sections needs --part")
    if args.out is None:
        args.out = Path("gpu-results/dry-run" if args.dry_run else "gpu-results")
    return args


def main(given: list[str] | None = None) -> int:
    """Run the parts.

    Returns:
        The exit status: 1 if a check failed or a task raised, 2 without a GPU, 3 if there was no time for a section.
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
