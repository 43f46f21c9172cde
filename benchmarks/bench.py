"""Measure as `jshadow bench` does, beside other systems, and also the stages of a step and speculation.

    python benchmarks/bench.py layer --context 32768,131072 --stages
    python benchmarks/bench.py decode MODEL --tokens 4096
    python benchmarks/bench.py prefill MODEL --tokens 4096
    python benchmarks/bench.py speculate MODEL --tokens 4096 --drafters prompt_lookup

The options are those of `jshadow bench`, and more. transformers and torch are timed if torch is installed (extra
`torch`). The functions import JAX, so that `main` can set the folder of compiled programs before.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from jshadow.cli import bench
from jshadow.cli.compile_cache import compile_cache
from jshadow.cli.console import console, print_table
from jshadow.errors import ConfigError, JshadowError

NO_PEERS = "leave transformers out"


def parser() -> argparse.ArgumentParser:
    """Return the parser of all parts."""
    top = argparse.ArgumentParser(description="Measure as `jshadow bench` does, beside other systems.")
    parts = top.add_subparsers(dest="part", required=True, metavar="PART")
    layer = parts.add_parser("layer", help="one decode step of one layer's attention, beside dense baselines")
    layer.set_defaults(run=run_layer)
    bench.add_layer_options(layer)
    layer.add_argument("--stages", action="store_true", help="also each stage of the step, as a program of its own")
    layer.add_argument("--speculate", metavar="NAME", help="instead, a cycle of self:POLICY:key=value:... and a step")
    layer.add_argument("--acceptance", type=float, metavar="SHARE", help="share of its drafts that are accepted")
    for part, text in (("decode", "decode steps of a checkpoint"), ("prefill", "the prefill of a checkpoint")):
        model = parts.add_parser(part, help=f"{text}, beside transformers")
        model.set_defaults(run=run_model)
        bench.add_model_options(model)
        model.add_argument("--no-peers", action="store_true", help=NO_PEERS)
    guess = parts.add_parser(
        "speculate",
        help="decoding with and without speculation",
        description="Continue texts of four tasks without and with drafters, and with transformers, prompt lookup too. "
        "The runs alternate. The first run of each system compiles and does not count.",
    )
    guess.set_defaults(run=run_speculation)
    guess.add_argument("model", help="HF directory or hub id")
    bench.add_count(guess, "tokens", 4096, "tokens of each text")
    bench.add_count(guess, "new", 128, "new tokens")
    bench.add_count(guess, "repeats", 3, "measured runs of each system")
    guess.add_argument("--drafters", default="prompt_lookup", help=bench.POLICIES_HELP)
    guess.add_argument("--policy", default="full", help="NAME or NAME:key=value:... (default: %(default)s)")
    guess.add_argument("--dtype", default="float32", help=bench.DTYPE_HELP)
    guess.add_argument("--no-peers", action="store_true", help=NO_PEERS)
    bench.add_output_options(guess)
    return top


def run_layer(args: argparse.Namespace) -> int:
    """Time one layer's step with each policy and with each dense baseline, and the stages if they are asked for."""
    from speed.peers import bench_baselines
    from speed.stages import bench_stages

    from jshadow.evaluation.speed import bench_layer, ceilings

    shapes = bench.shapes_of(args)
    if args.speculate is not None:
        return run_cycles(args, shapes)
    policies = bench.policies_of(args.policies)
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
        row["bound_seconds"] = bench.bound(row, best, args.dtype)
    if args.json:
        return bench.tell_json(ceilings=best, results=rows, stages=stages)
    for shape in shapes:
        bench.print_rows([row for row in rows if row["context"] == shape.context], shape.context)
        if args.stages:
            print_stages([row for row in stages if row["context"] == shape.context])
    bench.print_growth(rows)
    bench.print_ceilings(best)
    return 0


def run_cycles(args: argparse.Namespace, shapes: Sequence[Any]) -> int:
    """Time a cycle of self-drafting in one layer beside a step of full attention."""
    from speed.speculation import bench_cycle

    from jshadow.engine.speculation import SelfDraft, parse_drafter

    drafter = parse_drafter(args.speculate)
    if not isinstance(drafter, SelfDraft) or args.acceptance is None:
        raise ConfigError(
            f"--speculate must be self or self:POLICY, with --acceptance, got {args.speculate!r} and {args.acceptance}"
        )
    rows = [bench_cycle(shape, drafter, args.acceptance, args.repeats) for shape in shapes]
    if args.json:
        return bench.tell_json(results=rows)
    table = Table(
        "tokens", "full step, ms", "drafts, ms", "check, ms", "tokens a cycle", "this / full", "least to most"
    )
    for row in rows:
        table.add_row(
            f"{row['context']:,}",
            *(f"{row[f'{name}_seconds'] * 1e3:.2f}" for name in ("step", "draft", "check")),
            f"{row['tokens_a_cycle']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
        )
    print_table(table, console(140))
    return 0


def run_model(args: argparse.Namespace) -> int:
    """Time whole requests, beside those of transformers."""
    from speed.peers import transformers_systems

    from jshadow.evaluation.speed import Request

    request = Request(args.model, args.tokens, args.batch, args.steps, args.dtype)
    return bench.run_model(args, () if args.no_peers else transformers_systems(request))


def run_speculation(args: argparse.Namespace) -> int:
    """Continue texts with and without drafters, beside transformers."""
    from speed.speculation import bench_speculation, bench_transformers, texts_of

    from jshadow.engine.speculation import parse_drafter
    from jshadow.policies import parse_policy, split_policy
    from jshadow.weights.params import load

    bench.check_repeats(args.repeats)
    drafters = [parse_drafter(text, args.dtype) for text in args.drafters.split(",")]
    policy = parse_policy(*split_policy(args.policy))
    params = load(args.model, dtype=args.dtype)
    if params.tokenizer is None:
        raise ConfigError(f"model must have a tokenizer to be measured on texts, got {args.model!r} without one")

    def progress(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    texts = texts_of(params.tokenizer, args.tokens)
    rows = bench_speculation(params, policy, drafters, texts, args.new, args.repeats, progress)
    if not args.no_peers:
        progress("transformers")
        rows += bench_transformers(args.model, texts, args.new, args.repeats)
    if args.json:
        return bench.tell_json(rows=rows)
    titles = ("task", "system", "tokens/s", "this / plain", "least to most", "tokens a cycle", "kept", "acceptance")
    table = Table(*titles, "same tokens")
    for row in rows:
        table.add_row(
            row["task"],
            row["system"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
            "-" if row["tokens_a_cycle"] is None else f"{row['tokens_a_cycle']:.2f}",
            "-" if row["accepted"] is None else f"{row['accepted']:.0%}",
            "-" if row["acceptance"] is None else f"{row['acceptance']:.3f}",
            f"{'yes' if row['same'] else 'NO'}, {row['new_tokens']}",
        )
    print_table(table, console(140))
    return 0


def print_stages(rows: list[dict[str, Any]]) -> None:
    """Print the stages of each policy. For a stage that is part of another stage, the line names that stage."""
    table = Table("stage", "ms", "least to most", "to its bound", "read MB", "from the host MB", "million operations")
    for row in rows:
        inner = f" (of {row['part_of']})" if row["part_of"] else ""
        table.add_row(
            f"{row['setting']}: {row['stage']}{inner}",
            *bench.milliseconds(row),
            bench.times_bound(row),
            f"{row['bytes_read'] / 1e6:,.1f}",
            f"{row['bytes_fetched'] / 1e6:,.1f}",
            f"{row['flops'] / 1e6:,.1f}",
        )
    print_table(table, console(140))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part. Returns 0, 1 if a setting could not be measured, or 2 for an error of jshadow's."""
    args = parser().parse_args(argv)
    try:
        with compile_cache(args):
            return int(args.run(args))
    except JshadowError as error:
        print(f"bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
