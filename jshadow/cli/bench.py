"""`jshadow bench layer | decode | prefill | ceilings`: measured times, and the peak rates of the machine."""

import argparse
import json
import sys
from typing import Any

from jshadow.cli.bench_options import add_count, check_repeats, machine
from jshadow.cli.bench_speculation import add_cycle_options, add_speculation_options, run_cycles
from jshadow.cli.bench_tables import (
    print_ceilings,
    print_growth,
    print_model,
    print_rows,
    print_stages,
)
from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.console import console, print_table
from jshadow.cli.options import FETCH_HELP, JSON_HELP
from jshadow.errors import ConfigError

ABOUT = """Measure on this machine. Absolute times drift where cores are shared: compare within one run."""


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command and of its four parts."""
    parts = add.add_subparsers(dest="part", required=True, metavar="PART")
    layer = parts.add_parser(
        "layer",
        help="one decode step of one layer's attention",
        description="One decode step of one layer's attention on random keys and values, beside dense baselines on "
        "the same shapes. bound: bytes moved at the measured read rate, and operations at the measured product rate.",
    )
    layer.set_defaults(run=run_layer)
    layer.add_argument("--context", default="131072", help="prompt tokens, comma list (default: %(default)s)")
    add_count(layer, "batch", 1, "rows")
    add_count(layer, "heads", 32, "query heads")
    add_count(layer, "kv-heads", 8, "key and value heads")
    add_count(layer, "head-dim", 128, "width of a head")
    add_count(layer, "repeats", 10, "timed calls; their median is printed")
    layer.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16 (default: %(default)s)")
    layer.add_argument("--policies", default="full,shadowkv", help="NAME or NAME:key=value:..., comma list")
    layer.add_argument("--fetch", default="auto", help=FETCH_HELP)
    layer.add_argument("--stages", action="store_true", help="also each stage of the step, as a program of its own")
    add_cycle_options(layer)
    add_cache_option(layer)
    layer.add_argument("--json", action="store_true", help=JSON_HELP)
    for part, text in (("decode", "decode steps of a checkpoint"), ("prefill", "the prefill of a checkpoint")):
        model = parts.add_parser(
            part,
            help=f"{text}, beside transformers",
            description=f"Measure {text} on random tokens, beside transformers where torch is installed. Each system "
            "runs in processes of its own, in turn; its first answer compiles and warms up, its second counts.",
        )
        add_model_options(model)
    guess = parts.add_parser(
        "speculate",
        help="decoding with and without speculation",
        description="Continue texts of four tasks without and with drafters, and with transformers, prompt lookup too, "
        "where torch is installed. The runs alternate. The first run of each system compiles and does not count.",
    )
    add_speculation_options(guess)
    most = parts.add_parser(
        "ceilings",
        help="what the machine can do at best",
        description="Bytes a second read and copied, operations a second in products; with a GPU, the bus too.",
    )
    most.set_defaults(run=run_ceilings)
    add_count(most, "repeats", 10, "timed calls; the best one counts")
    add_cache_option(most)
    most.add_argument("--json", action="store_true", help=JSON_HELP)


def add_model_options(add: argparse.ArgumentParser) -> None:
    """Add the options of `decode` and `prefill`.

    Both commands run the same measurement. Each prints one half of the results.
    """
    add.set_defaults(run=run_model)
    add.add_argument("model", help="HF directory or hub id")
    add_count(add, "tokens", 4096, "tokens of each prompt")
    add_count(add, "batch", 1, "prompts")
    add_count(add, "steps", 24, "tokens fed after the prompt")
    add_count(add, "runs", 3, "processes of each system")
    add.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: %(default)s)")
    add.add_argument("--policies", default="full,shadowkv", help="NAME or NAME:key=value:..., comma list")
    add.add_argument("--fetch", default="auto", help="auto, resident, device_put, zero_copy, comma list")
    add.add_argument("--no-peers", action="store_true", help="leave transformers out")
    add_cache_option(add)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for a dtype whose products are not measured."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, got {dtype!r}")


def policies_of(text: str) -> list[tuple[str, Any]]:
    """Return the policies of a comma list, each with its text.

    Raises:
        ConfigError: a policy or a setting is unknown.
    """
    from jshadow.policies import parse_policy, split_policy

    return [(part, parse_policy(*split_policy(part))) for part in text.split(",")]


def run_layer(args: argparse.Namespace) -> int:
    """Run `jshadow bench layer`, and return 0 when all settings are measured."""
    from jshadow.evaluation.speed import Shape, bench_baselines, bench_layer, bench_stages, ceilings

    check_repeats(args.repeats)
    check_dtype(args.dtype)
    contexts = list(dict.fromkeys(part.strip() for part in args.context.split(",")))
    if not all(part.isdecimal() for part in contexts):
        raise ConfigError(f"--context must be a comma list of token counts, got {args.context!r}")
    shapes = [
        Shape(int(context), args.batch, args.heads, args.kv_heads, args.head_dim, args.dtype) for context in contexts
    ]
    if args.speculate is not None:
        return run_cycles(args, shapes)
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
    """Return the seconds that a row's bytes and operations take at the measured rates of this machine.

    It adds the time of the reads from device memory, the time of the transfers from the host and the time of the
    operations, as if they did not overlap.

    Args:
        row: a row of `bench_layer` or `bench_model`.
        best: the measured rates, from `ceilings`.
        dtype: "float32" or "bfloat16", the dtype of the operations.
    """
    bus = row["bytes_fetched"] / best.get("host_to_device", best["read"])
    return float(row["bytes_read"] / best["read"] + bus + row["flops"] / best[f"matmul_{dtype}"])


def run_model(args: argparse.Namespace) -> int:
    """Run `jshadow bench decode` or `prefill`, and return 1 if a setting of jshadow could not be measured, else 0."""
    from jshadow.evaluation.speed import Request, bench_model, ceilings

    check_dtype(args.dtype)
    request = Request(args.model, args.tokens, args.batch, args.steps, args.dtype)

    def progress(system: str) -> None:
        print(f"running {system} ...", file=sys.stderr, flush=True)

    fetches = [part.strip() for part in args.fetch.split(",")]
    rows = bench_model(
        request, policies_of(args.policies), fetches, runs=args.runs, peers=not args.no_peers, progress=progress
    )
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


def run_ceilings(args: argparse.Namespace) -> int:
    """Run `jshadow bench ceilings`, and return 0 when all rates are measured."""
    from rich.table import Table

    from jshadow.evaluation.speed import ceilings

    check_repeats(args.repeats)
    rates = ceilings(args.repeats)
    if args.json:
        print(json.dumps({"machine": machine(), "ceilings": rates}))
        return 0
    table = Table("ceiling", "a second")
    for name, value in rates.items():
        table.add_row(name, f"{value / 1e9:,.1f} {'GFLOP' if name.startswith('matmul') else 'GB'}")
    print_table(table, console(140))
    return 0
