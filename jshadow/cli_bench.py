"""`jshadow bench layer | ceilings`: how long a decode step takes here, and what the machine can do at best."""

import argparse
import json
import platform
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from jshadow.errors import ConfigError
from jshadow.policies import parse_policy

ABOUT = """Measure on this machine. Absolute times drift where cores are shared: compare within one run."""


def add_options(add: argparse.ArgumentParser) -> None:
    """The options of the command and of its parts."""
    parts = add.add_subparsers(dest="part", required=True, metavar="PART")
    layer = parts.add_parser(
        "layer", help="one decode step of one layer's attention",
        description="One decode step of one layer's attention on random keys and values, beside dense baselines on "
        "the same shapes. bound: bytes moved at the measured read rate, and operations at the measured product rate.",
    )  # fmt: skip
    layer.set_defaults(run=run_layer)
    for name, value, text in (
        ("context", 131072, "prompt tokens"), ("batch", 1, "rows"), ("heads", 32, "query heads"),
        ("kv-heads", 8, "key and value heads"), ("head-dim", 128, "width of a head"),
        ("repeats", 10, "timed calls, of which the median is told"),
    ):  # fmt: skip
        layer.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: %(default)s)")
    layer.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16 (default: %(default)s)")
    layer.add_argument("--policies", default="full,shadowkv", help="NAME or NAME:key=value:..., comma list")
    layer.add_argument("--fetch", default="auto", help="auto, resident, device_put or zero_copy (default: %(default)s)")
    layer.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    most = parts.add_parser(
        "ceilings", help="what the machine can do at best",
        description="Bytes a second read and copied, operations a second in products; with a GPU, the bus too.",
    )  # fmt: skip
    most.set_defaults(run=run_ceilings)
    most.add_argument("--repeats", type=int, default=10, help="timed calls, the best counts (default: %(default)s)")
    most.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def check_repeats(repeats: int) -> None:
    """Raise ConfigError unless something is measured."""
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")


def machine() -> dict[str, str]:
    """What ran it."""
    import jax

    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "machine": platform.machine(),
            "python": platform.python_version(), "jax": jax.__version__}  # fmt: skip


def run_ceilings(args: argparse.Namespace) -> int:
    """`jshadow bench ceilings`."""
    from jshadow.bench import ceilings

    check_repeats(args.repeats)
    found = ceilings(args.repeats)
    if args.json:
        print(json.dumps({"machine": machine(), "ceilings": found}))
        return 0
    table = Table("ceiling", "a second")
    for name, value in found.items():
        table.add_row(name, f"{value / 1e9:,.1f} {'GFLOP' if name.startswith('matmul') else 'GB'}")
    console().print(table)
    return 0


def run_layer(args: argparse.Namespace) -> int:
    """`jshadow bench layer`."""
    from jshadow.bench import Shape, bench_baselines, bench_layer, ceilings

    check_repeats(args.repeats)
    if args.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, got {args.dtype!r}")
    shape = Shape(args.context, args.batch, args.heads, args.kv_heads, args.head_dim, args.dtype)
    parts = [part.split(":") for part in args.policies.split(",")]
    policies = [parse_policy(name, settings) for name, *settings in parts]
    best = ceilings(3)
    rows = [bench_layer(shape, policy, args.fetch, args.repeats) for policy in policies]
    rows += bench_baselines(shape, args.repeats)
    for row in rows:
        bus = row["bytes_fetched"] / best.get("host_to_device", best["read"])
        row["bound_seconds"] = row["bytes_read"] / best["read"] + bus + row["flops"] / best[f"matmul_{args.dtype}"]
    if args.json:
        print(json.dumps({"machine": machine(), "ceilings": best, "results": rows}))
        return 0
    print_rows(rows, best)
    return 0


def print_rows(rows: list[dict[str, Any]], best: dict[str, float]) -> None:
    """The table of `bench layer`; ratios are to the fastest dense row of the same run."""
    dense = min(row["step_seconds"] for row in rows if row["policy"] == "full" or row["fetch"] is None)
    table = Table("", "step, ms", "least to most", "dense / this", "to its bound", "device MB", "host MB", "moved MB")
    for row in rows:
        label = row["policy"] + (f", {row['fetch']}" if row["fetch"] else "")
        table.add_row(
            label, f"{row['step_seconds'] * 1e3:.1f}", f"{row['least'] * 1e3:.1f} to {row['most'] * 1e3:.1f}",
            f"{dense / row['step_seconds']:.2f}", f"{row['step_seconds'] / row['bound_seconds']:.2f}",
            *(f"{row[name] / 1e6:,.1f}" for name in ("bytes_device", "bytes_host", "bytes_moved")),
        )  # fmt: skip
    console().print(table)
    rates = ", ".join(f"{name} {value / 1e9:,.1f} G/s" for name, value in best.items())
    print(f"bounds by this machine's own ceilings: {rates}")


def console() -> Console:
    """Wide enough for a table in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 140)
