"""`jshadow bench layer | decode | prefill | ceilings`: how long it takes here, and what the machine can do at best."""

import argparse
import json
import platform
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from jshadow.errors import ConfigError
from jshadow.policies import parse_policy, split_policy

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
    layer.add_argument("--context", default="131072", help="prompt tokens, comma list (default: %(default)s)")
    for name, value, text in (
        ("batch", 1, "rows"), ("heads", 32, "query heads"), ("kv-heads", 8, "key and value heads"),
        ("head-dim", 128, "width of a head"), ("repeats", 10, "timed calls, of which the median is told"),
    ):  # fmt: skip
        layer.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: %(default)s)")
    layer.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16 (default: %(default)s)")
    layer.add_argument("--policies", default="full,shadowkv", help="NAME or NAME:key=value:..., comma list")
    layer.add_argument("--fetch", default="auto", help="auto, resident, device_put or zero_copy (default: %(default)s)")
    layer.add_argument("--stages", action="store_true", help="also each stage of the step, as a program of its own")
    layer.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    for part, text in (("decode", "decode steps of a checkpoint"), ("prefill", "the prefill of a checkpoint")):
        model = parts.add_parser(
            part, help=f"{text}, beside transformers",
            description=f"Measure {text} on random tokens, beside transformers where torch is installed. Each system "
            "runs in processes of its own, in turn; its first answer compiles and warms up, its second counts.",
        )  # fmt: skip
        add_model_options(model)
    most = parts.add_parser(
        "ceilings", help="what the machine can do at best",
        description="Bytes a second read and copied, operations a second in products; with a GPU, the bus too.",
    )  # fmt: skip
    most.set_defaults(run=run_ceilings)
    most.add_argument("--repeats", type=int, default=10, help="timed calls, the best counts (default: %(default)s)")
    most.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_model_options(add: argparse.ArgumentParser) -> None:
    """Of `decode` and `prefill`, which do the same work and tell two halves of it."""
    add.set_defaults(run=run_model)
    add.add_argument("model", help="HF directory or hub id")
    for name, value, text in (
        ("tokens", 4096, "of each prompt"), ("batch", 1, "prompts"), ("steps", 24, "tokens fed after the prompt"),
        ("runs", 3, "processes of each system"),
    ):  # fmt: skip
        add.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: %(default)s)")
    add.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: %(default)s)")
    add.add_argument("--policies", default="full,shadowkv", help="NAME or NAME:key=value:..., comma list")
    add.add_argument("--fetch", default="auto", help="auto, resident, device_put, zero_copy, comma list")
    add.add_argument("--no-peers", action="store_true", help="leave transformers out")
    add.add_argument("--json", action="store_true", help="print one JSON object instead of text")


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
    from jshadow.evaluation.speed import ceilings

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


def check_dtype(dtype: str) -> None:
    """Raise ConfigError unless products of it were measured."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, got {dtype!r}")


def policies_of(text: str) -> list[tuple[str, Any]]:
    """The policies of a comma list, each with what was written."""
    return [(part, parse_policy(*split_policy(part))) for part in text.split(",")]


def run_layer(args: argparse.Namespace) -> int:
    """`jshadow bench layer`."""
    from jshadow.evaluation.speed import Shape, bench_baselines, bench_layer, bench_stages, ceilings

    check_repeats(args.repeats)
    check_dtype(args.dtype)
    contexts = list(dict.fromkeys(part.strip() for part in args.context.split(",")))
    if not all(part.isdecimal() for part in contexts):
        raise ConfigError(f"--context must be a comma list of token counts, got {args.context!r}")
    shapes = [
        Shape(int(context), args.batch, args.heads, args.kv_heads, args.head_dim, args.dtype)
        for context in contexts
    ]  # fmt: skip
    policies = policies_of(args.policies)
    best = ceilings(3)
    rows, stages = [], []
    for shape in shapes:
        for text, policy in policies:
            rows.append({"setting": text} | bench_layer(shape, policy, args.fetch, args.repeats))
            if args.stages:
                about = {"setting": text, "policy": policy.name, "context": shape.context}
                stages += [about | row for row in bench_stages(shape, policy, args.fetch, args.repeats)]
        rows += [{"setting": row["policy"]} | row for row in bench_baselines(shape, args.repeats)]
    for row in [*rows, *stages]:
        row["bound_seconds"] = bound(row, best, args.dtype)
    if args.json:
        print(json.dumps({"machine": machine(), "ceilings": best, "results": rows, "stages": stages}))
        return 0
    for shape in shapes:
        print_rows([row for row in rows if row["context"] == shape.context], shape.context)
        if args.stages:
            print_stages([row for row in stages if row["context"] == shape.context])
    print_growth(rows)
    print_ceilings(best)
    return 0


def bound(row: dict[str, Any], best: dict[str, float], dtype: str) -> float:
    """Seconds that a row's bytes and operations take at the machine's own rates, one after the other."""
    bus = row["bytes_fetched"] / best.get("host_to_device", best["read"])
    return float(row["bytes_read"] / best["read"] + bus + row["flops"] / best[f"matmul_{dtype}"])


def run_model(args: argparse.Namespace) -> int:
    """`jshadow bench decode` and `jshadow bench prefill`."""
    from jshadow.evaluation.speed import Request, bench_model, ceilings

    check_dtype(args.dtype)
    request = Request(args.model, args.tokens, args.batch, args.steps, args.dtype)

    def progress(system: str) -> None:
        print(f"running {system} ...", file=sys.stderr, flush=True)

    fetches = [part.strip() for part in args.fetch.split(",")]
    rows = bench_model(
        request, policies_of(args.policies), fetches, runs=args.runs, peers=not args.no_peers, progress=progress
    )  # fmt: skip
    best = ceilings(3)
    for row in rows:
        known = row["flops"] is not None
        row["bound_seconds"] = bound(row, best, args.dtype) if known else None
        row["prefill_bound_seconds"] = row["prefill_flops"] / best[f"matmul_{args.dtype}"] if known else None
    if args.json:
        print(json.dumps({"machine": machine(), "ceilings": best, "results": rows}))
    else:
        print_model(rows, args.part, args.tokens * args.batch)
        print_ceilings(best)
    return int(any(row["error"] is not None and row["policy"] != "transformers" for row in rows))


def print_model(rows: list[dict[str, Any]], part: str, tokens: int) -> None:
    """One half of the rows of a request; ratios are to transformers, or to full attention where that did not run."""
    decode = part == "decode"
    name, least, most, limit = (
        ("step_seconds", "least", "most", "bound_seconds") if decode
        else ("prefill_seconds", "prefill_least", "prefill_most", "prefill_bound_seconds")
    )  # fmt: skip
    there = [row for row in rows if row["error"] is None]
    # transformers if it ran, else full attention, else whatever did
    first = min(there, key=lambda row: (row["fetch"] is not None, row["policy"] != "full"), default={"setting": "-"})
    unit, scale = ("step, ms", 1e3) if decode else ("prefill, s", 1.0)
    table = Table("", unit, "least to most", "tokens/s", f"{first['setting']} / this", "to its bound", "device MB",
                  "host MB", "moved MB a step")  # fmt: skip
    for row in rows:
        if row["error"] is not None:
            table.add_row(label_of(row), "not measured")
            continue
        rate = row["tokens_per_second"] if decode else tokens / row[name]
        table.add_row(
            label_of(row), f"{row[name] * scale:.2f}", f"{row[least] * scale:.2f} to {row[most] * scale:.2f}",
            f"{rate:,.1f}",
            f"{first[name] / row[name]:.2f}", f"{row[name] / row[limit]:.2f}" if row[limit] else "",
            *("" if row[size] is None else f"{row[size] / 1e6:,.1f}"
              for size in ("bytes_device", "bytes_host", "bytes_moved")),
        )  # fmt: skip
    console().print(table)
    for row in rows:
        if row["fallback"]:
            print(f"{row['setting']}: {row['fallback']}")
        if row["error"]:
            print(f"{label_of(row)}: not measured: {row['error']}")


def label_of(row: dict[str, Any]) -> str:
    """What was asked for, and where its rows lie."""
    return str(row["setting"]) + (f", {row['fetch']}" if row["fetch"] else "")


def print_rows(rows: list[dict[str, Any]], context: int) -> None:
    """The table of `bench layer` at one length; ratios are to the fastest dense row of the same run."""
    dense = min(row["step_seconds"] for row in rows if row["policy"] == "full" or row["fetch"] is None)
    table = Table(
        f"{context:,} tokens", "step, ms", "least to most", "dense / this", "to its bound", "device MB", "host MB",
        "moved MB",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            label_of(row), *milliseconds(row), f"{dense / row['step_seconds']:.2f}", times_bound(row),
            *(f"{row[name] / 1e6:,.1f}" for name in ("bytes_device", "bytes_host", "bytes_moved")),
        )  # fmt: skip
    console().print(table)


def print_stages(rows: list[dict[str, Any]]) -> None:
    """The stages of each policy, those that another contains marked so."""
    table = Table("stage", "ms", "least to most", "to its bound", "read MB", "from the host MB", "million operations")
    for row in rows:
        inner = f" (of {row['part_of']})" if row["part_of"] else ""
        table.add_row(
            f"{row['setting']}: {row['stage']}{inner}", *milliseconds(row), times_bound(row),
            f"{row['bytes_read'] / 1e6:,.1f}", f"{row['bytes_fetched'] / 1e6:,.1f}", f"{row['flops'] / 1e6:,.1f}",
        )  # fmt: skip
    console().print(table)


def milliseconds(row: dict[str, Any]) -> tuple[str, str]:
    """Median and range."""
    return f"{row['step_seconds'] * 1e3:.1f}", f"{row['least'] * 1e3:.1f} to {row['most'] * 1e3:.1f}"


def times_bound(row: dict[str, Any]) -> str:
    """How many times its bound a row took; nothing where nothing must be done."""
    return f"{row['step_seconds'] / row['bound_seconds']:.2f}" if row["bound_seconds"] else ""


def print_growth(rows: list[dict[str, Any]]) -> None:
    """How a step grows from the shortest context to the longest."""
    shortest, longest = (pick(row["context"] for row in rows) for pick in (min, max))
    if shortest == longest:
        return
    grown = []
    for row in rows:
        if row["context"] == longest:
            before = next(r for r in rows if r["context"] == shortest and r["setting"] == row["setting"])
            grown.append(f"{row['setting']} {row['step_seconds'] / before['step_seconds']:.2f}")
    print(f"times as long at {longest:,} as at {shortest:,} tokens: {', '.join(grown)}")


def print_ceilings(best: dict[str, float]) -> None:
    """What the bounds were made of."""
    rates = ", ".join(f"{name} {value / 1e9:,.1f} G/s" for name, value in best.items())
    print(f"bounds by this machine's own ceilings: {rates}")


def console() -> Console:
    """Wide enough for a table in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 140)
