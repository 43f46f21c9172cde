"""`make gpu`: what only a machine with an NVIDIA GPU can show, in one unattended run, the most important first."""

import argparse
import sys
from pathlib import Path

PARTS = ("ceilings", "correctness", "fetch", "decode", "layer", "decode-more", "decode-packed", "compress")


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on any backend; its figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print gpu.json at the end instead of gpu.md")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    parser.add_argument("--seconds", type=float, default=520, help="from the start to the end (default: %(default)s)")
    parser.add_argument(
        "--host-gib", type=float, help="pinned memory that may be taken (default: what is available less 20 GiB)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # how a run starts its own children
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run the parts. Returns 1 if a check failed or something raised, 2 without a GPU, 3 if a part came too late."""
    args = arguments(given)
    # Imported only where it runs: the parent must live on whatever a kernel does, and so has no JAX.
    if args.worker:
        from gpu import worker

        return worker.main(args)
    from gpu import parent

    return parent.main(args)


if __name__ == "__main__":
    sys.exit(main())
