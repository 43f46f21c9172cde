"""`jshadow bench speculate` and `jshadow bench layer --speculate`: decoding with speculation beside plain decoding."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jshadow.cli.bench_options import add_count, check_repeats, machine
from jshadow.cli.bench_tables import print_cycles, print_speculation
from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.options import JSON_HELP
from jshadow.errors import ConfigError

if TYPE_CHECKING:
    from jshadow.evaluation.speed import Shape


def add_speculation_options(add: argparse.ArgumentParser) -> None:
    """Add the options of `speculate`."""
    add.set_defaults(run=run_speculation)
    add.add_argument("model", help="HF directory or hub id")
    add_count(add, "tokens", 4096, "tokens of each text")
    add_count(add, "new", 128, "new tokens")
    add_count(add, "repeats", 3, "measured runs of each system")
    add.add_argument("--drafters", default="prompt_lookup", help="NAME or NAME:key=value:..., comma list")
    add.add_argument("--policy", default="full", help="NAME or NAME:key=value:... (default: %(default)s)")
    add.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: %(default)s)")
    add.add_argument("--no-peers", action="store_true", help="leave transformers out")
    add_cache_option(add)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def run_speculation(args: argparse.Namespace) -> int:
    """Run `jshadow bench speculate`, and return 0 when all texts are continued."""
    from jshadow.engine.speculation import parse_drafter
    from jshadow.evaluation.speed.speculation import bench_speculation, bench_transformers, texts_of
    from jshadow.policies import parse_policy
    from jshadow.weights.params import load

    check_repeats(args.repeats)
    drafters = [parse_drafter(text, args.dtype) for text in args.drafters.split(",")]
    name, *settings = args.policy.split(":")
    policy = parse_policy(name, settings)
    params = load(args.model, dtype=args.dtype)
    if params.tokenizer is None:
        raise ConfigError(f"model must have a tokenizer to be measured on texts, got {args.model!r} without one")

    def progress(text: str) -> None:
        print(f"jshadow: {text}", file=sys.stderr, flush=True)

    texts = texts_of(params.tokenizer, args.tokens)
    rows = bench_speculation(params, policy, drafters, texts, args.new, args.repeats, progress)
    if not args.no_peers:
        progress("transformers")
        rows += bench_transformers(args.model, texts, args.new, args.repeats)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return 0
    print_speculation(rows)
    return 0


def add_cycle_options(add: argparse.ArgumentParser) -> None:
    """Add the options of `bench layer` for a cycle of speculation."""
    add.add_argument("--speculate", metavar="NAME", help="instead, a cycle of self:POLICY:key=value:... beside a step")
    add.add_argument("--acceptance", type=float, metavar="SHARE", help="share of its drafts that are accepted")


def run_cycles(args: argparse.Namespace, shapes: Sequence["Shape"]) -> int:
    """Run `jshadow bench layer --speculate`, and return 0 when all shapes are measured."""
    from jshadow.engine.speculation import SelfDraft, parse_drafter
    from jshadow.evaluation.speed.cycle import bench_cycle

    drafter = parse_drafter(args.speculate)
    if not isinstance(drafter, SelfDraft) or args.acceptance is None:
        raise ConfigError(
            f"--speculate must be self or self:POLICY, with --acceptance, got {args.speculate!r} and {args.acceptance}"
        )
    rows = [bench_cycle(shape, drafter, args.acceptance, args.repeats) for shape in shapes]
    if args.json:
        print(json.dumps({"machine": machine(), "results": rows}))
        return 0
    print_cycles(rows)
    return 0
