"""`jshadow bench layer | decode | prefill | ceilings`: measured times, and the peak rates of the machine."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.console import console, print_table
from jshadow.cli.options import FETCH_HELP, JSON_HELP
from jshadow.errors import ConfigError

if TYPE_CHECKING:
    from jshadow.evaluation.speed import Shape, System

ABOUT = """Measure on this machine. Absolute times drift where cores are shared: compare within one run."""
POLICIES_HELP = "NAME or NAME:key=value:..., comma list (default: %(default)s)"
DTYPE_HELP = "float32 or bfloat16 (default: %(default)s)"


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command and of its four parts."""
    parts = add.add_subparsers(dest="part", required=True, metavar="PART")
    layer = parts.add_parser(
        "layer",
        help="one decode step of one layer's attention",
        description="One decode step of one layer's attention on random keys and values. bound: bytes moved at the "
        "measured read rate, and operations at the measured product rate.",
    )
    layer.set_defaults(run=_run_layer)
    add_layer_options(layer)
    for part, text in (("decode", "decode steps of a checkpoint"), ("prefill", "the prefill of a checkpoint")):
        model = parts.add_parser(
            part,
            help=text,
            description=f"Measure {text} on random tokens. Each policy runs in processes of its own, in turn; its "
            "first answer compiles and warms up, its second counts.",
        )
        model.set_defaults(run=run_model)
        add_model_options(model)
    most = parts.add_parser(
        "ceilings",
        help="what the machine can do at best",
        description="Bytes a second read and copied, operations a second in products; with a GPU, the bus too.",
    )
    most.set_defaults(run=_run_ceilings)
    add_count(most, "repeats", 10, "timed calls; the best one counts")
    add_output_options(most)


def add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    """Add an option --`name` that takes an integer. `text` is its help, without the default."""
    parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all parts share."""
    add_cache_option(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def add_layer_options(layer: argparse.ArgumentParser) -> None:
    """Add the options of `layer`."""
    layer.add_argument("--context", default="131072", help="prompt tokens, comma list (default: %(default)s)")
    add_count(layer, "batch", 1, "rows")
    add_count(layer, "heads", 32, "query heads")
    add_count(layer, "kv-heads", 8, "key and value heads")
    add_count(layer, "head-dim", 128, "width of a head")
    add_count(layer, "repeats", 10, "timed calls; their median is printed")
    layer.add_argument("--dtype", default="bfloat16", help=DTYPE_HELP)
    layer.add_argument("--policies", default="full,shadowkv", help=POLICIES_HELP)
    layer.add_argument("--fetch", default="auto", help=FETCH_HELP)
    add_output_options(layer)


def add_model_options(add: argparse.ArgumentParser) -> None:
    """Add the options of `decode` and `prefill`, which run the same measurement and print one half of the results."""
    add.add_argument("model", help="HF directory or hub id")
    add_count(add, "tokens", 4096, "tokens of each prompt")
    add_count(add, "batch", 1, "prompts")
    add_count(add, "steps", 24, "tokens fed after the prompt")
    add_count(add, "runs", 3, "processes of each system")
    add.add_argument("--dtype", default="float32", help=DTYPE_HELP)
    add.add_argument("--policies", default="full,shadowkv", help=POLICIES_HELP)
    add.add_argument("--fetch", default="auto", help="auto, resident, device_put, zero_copy, comma list")
    add_output_options(add)


def check_repeats(repeats: int) -> None:
    """Raise ConfigError for less than one repeat."""
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")


def _check_dtype(dtype: str) -> None:
    """Raise ConfigError for a dtype whose products are not measured."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, got {dtype!r}")


def policies_of(text: str) -> list[tuple[str, Any]]:
    """Return the policies of a comma list, each with its text. Raises ConfigError for an unknown policy or setting."""
    from jshadow.policies import parse_policy, split_policy

    return [(part, parse_policy(*split_policy(part))) for part in text.split(",")]


def shapes_of(args: argparse.Namespace) -> list["Shape"]:
    """Return the shape of each context of `layer`. Raises ConfigError for an option that is out of range."""
    from jshadow.evaluation.speed import Shape

    check_repeats(args.repeats)
    _check_dtype(args.dtype)
    contexts = list(dict.fromkeys(part.strip() for part in args.context.split(",")))
    if not all(part.isdecimal() for part in contexts):
        raise ConfigError(f"--context must be a comma list of token counts, got {args.context!r}")
    return [
        Shape(int(context), args.batch, args.heads, args.kv_heads, args.head_dim, args.dtype) for context in contexts
    ]


def _run_layer(args: argparse.Namespace) -> int:
    """Run `jshadow bench layer`, and return 0 when all settings are measured."""
    from jshadow.evaluation.speed import bench_layer, ceilings

    shapes, policies = shapes_of(args), policies_of(args.policies)
    best = ceilings(3)
    rows = [
        {"setting": text} | bench_layer(shape, policy, args.fetch, args.repeats)
        for shape in shapes
        for text, policy in policies
    ]
    for row in rows:
        row["bound_seconds"] = bound(row, best, args.dtype)
    if args.json:
        return tell_json(ceilings=best, results=rows)
    for shape in shapes:
        print_rows([row for row in rows if row["context"] == shape.context], shape.context)
    print_growth(rows)
    print_ceilings(best)
    return 0


def bound(row: dict[str, Any], best: dict[str, float], dtype: str) -> float:
    """Return the seconds that a row's bytes and operations take at the measured rates of this machine.

    It adds the time of the reads from device memory, the time of the transfers from the host and the time of the
    operations, as if they did not overlap. The rates `best` come from `ceilings`.
    """
    bus = row["bytes_fetched"] / best.get("host_to_device", best["read"])
    return float(row["bytes_read"] / best["read"] + bus + row["flops"] / best[f"matmul_{dtype}"])


def run_model(args: argparse.Namespace, others: Sequence["System"] = ()) -> int:
    """Run `jshadow bench decode` or `prefill`, and return 1 if a setting of jshadow could not be measured, else 0.

    `others` are systems that are timed beside jshadow.
    """
    from jshadow.evaluation.speed import Request, bench_model, ceilings

    _check_dtype(args.dtype)
    request = Request(args.model, args.tokens, args.batch, args.steps, args.dtype)

    def progress(system: str) -> None:
        print(f"running {system} ...", file=sys.stderr, flush=True)

    fetches = [part.strip() for part in args.fetch.split(",")]
    rows = bench_model(request, policies_of(args.policies), fetches, runs=args.runs, others=others, progress=progress)
    best = ceilings(3)
    for row in rows:
        known = row["flops"] is not None
        row["bound_seconds"] = bound(row, best, args.dtype) if known else None
        row["prefill_bound_seconds"] = row["prefill_flops"] / best[f"matmul_{args.dtype}"] if known else None
    if args.json:
        tell_json(ceilings=best, results=rows)
    else:
        _print_model(rows, args.part, args.tokens * args.batch)
        print_ceilings(best)
    return int(any(row["error"] is not None and row["fetch"] is not None for row in rows))


def _run_ceilings(args: argparse.Namespace) -> int:
    """Run `jshadow bench ceilings`, and return 0 when all rates are measured."""
    from rich.table import Table

    from jshadow.evaluation.speed import ceilings

    check_repeats(args.repeats)
    rates = ceilings(args.repeats)
    if args.json:
        return tell_json(ceilings=rates)
    table = Table("ceiling", "a second")
    for name, value in rates.items():
        table.add_row(name, f"{value / 1e9:,.1f} {'GFLOP' if name.startswith('matmul') else 'GB'}")
    print_table(table, console(140))
    return 0


def tell_json(**results: Any) -> int:
    """Print the machine and some results as one JSON object, and return 0."""
    from jshadow.evaluation.speed import machine

    print(json.dumps({"machine": machine(), **results}))
    return 0


def _print_model(rows: list[dict[str, Any]], part: str, tokens: int) -> None:
    """Print the table of `decode` or `prefill`, with a line for each setting that was not measured."""
    from rich.table import Table

    from jshadow.evaluation.speed import label_of

    decode = part == "decode"
    name, least, most, limit = (
        ("step_seconds", "least", "most", "bound_seconds")
        if decode
        else ("prefill_seconds", "prefill_least", "prefill_most", "prefill_bound_seconds")
    )
    there = [row for row in rows if row["error"] is None]
    first = min(there, key=lambda row: (row["fetch"] is not None, row["policy"] != "full"), default={"setting": "-"})
    unit, scale = ("step, ms", 1e3) if decode else ("prefill, s", 1.0)
    titles = ("", unit, "least to most", "tokens/s", f"{first['setting']} / this", "to its bound")
    table = Table(*titles, "device MB", "host MB", "moved MB a step")
    for row in rows:
        if row["error"] is not None:
            table.add_row(label_of(row), "not measured")
            continue
        rate = row["tokens_per_second"] if decode else tokens / row[name]
        table.add_row(
            label_of(row),
            f"{row[name] * scale:.2f}",
            f"{row[least] * scale:.2f} to {row[most] * scale:.2f}",
            f"{rate:,.1f}",
            f"{first[name] / row[name]:.2f}",
            f"{row[name] / row[limit]:.2f}" if row[limit] else "",
            *(
                "" if row[size] is None else f"{row[size] / 1e6:,.1f}"
                for size in ("bytes_device", "bytes_host", "bytes_moved")
            ),
        )
    print_table(table, console(140))
    for row in rows:
        if row["fallback"]:
            print(f"{row['setting']}: {row['fallback']}")
        if row["error"]:
            print(f"{label_of(row)}: not measured: {row['error']}")


def print_rows(rows: list[dict[str, Any]], context: int) -> None:
    """Print the table of `layer` for one context length. Ratios are to the fastest dense row, else to the first row."""
    from rich.table import Table

    from jshadow.evaluation.speed import label_of

    dense = [row for row in rows if row["policy"] == "full" or row["fetch"] is None]
    first = min(dense, key=lambda row: row["step_seconds"]) if dense else rows[0]
    compared = f"{'dense' if dense else first['setting']} / this"
    titles = (f"{context:,} tokens", "step, ms", "least to most", compared, "to its bound")
    table = Table(*titles, "device MB", "host MB", "moved MB")
    for row in rows:
        table.add_row(
            label_of(row),
            *milliseconds(row),
            f"{first['step_seconds'] / row['step_seconds']:.2f}",
            times_bound(row),
            *(f"{row[name] / 1e6:,.1f}" for name in ("bytes_device", "bytes_host", "bytes_moved")),
        )
    print_table(table, console(140))


def milliseconds(row: dict[str, Any]) -> tuple[str, str]:
    """Return the median of a row's times, and their range, in milliseconds."""
    return f"{row['step_seconds'] * 1e3:.1f}", f"{row['least'] * 1e3:.1f} to {row['most'] * 1e3:.1f}"


def times_bound(row: dict[str, Any]) -> str:
    """Return the ratio of a row's time to its bound, or "" if the bound is zero."""
    return f"{row['step_seconds'] / row['bound_seconds']:.2f}" if row["bound_seconds"] else ""


def print_growth(rows: list[dict[str, Any]]) -> None:
    """Print the ratio of the step times at the longest and the shortest context, for each setting."""
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
    """Print the measured rates that the bounds are computed from."""
    rates = ", ".join(f"{name} {value / 1e9:,.1f} G/s" for name, value in best.items())
    print(f"bounds from the rates measured on this machine: {rates}")
