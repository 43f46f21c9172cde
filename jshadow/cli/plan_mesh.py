"""The options of `jshadow plan` for several GPUs that share one model."""

import argparse
from typing import TYPE_CHECKING, Any

from jshadow.errors import ConfigError

if TYPE_CHECKING:
    from jshadow.cache.shards import Shards


def add_mesh_options(add: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.add_argument("--tp", type=int, metavar="N", help="split heads, MLP and vocabulary over N GPUs (default: 1)")
    add.add_argument(
        "--left",
        help="split: the left rows of ShadowKV's keys are split over the GPUs of --tp; everywhere: each of them has "
        "all (default: split)",
    )
    add.add_argument("--count", type=int, metavar="N", help="the same as --tp N --left everywhere")
    add.add_argument("--nvlink", type=float, metavar="GB/S", help="bandwidth between GPUs of a host, one way")


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options, None for those that were left out."""
    names = ("tp", "left", "count", "nvlink")
    return {f"--{name}": getattr(args, name) for name in names}


def mesh_of(args: argparse.Namespace) -> "Shards | None":
    """Return the mesh of the options, or None for one GPU. Raises ConfigError if --count comes with --tp or --left."""
    from jshadow.planner.mesh import mesh_shards

    sizes: dict[str, Any] = {"tp": args.tp, "left": args.left}
    if args.count is not None:
        for name, value in sizes.items():
            if value is not None:
                raise ConfigError(f"--count must be left out with --{name}, got {args.count}")
        if args.count < 1:
            raise ConfigError(f"--count must be at least 1, got {args.count}")
        sizes |= {"tp": args.count, "left": "everywhere"}
    return mesh_shards(**{name: value for name, value in sizes.items() if value is not None})
