"""Measure as `jshadow bench` does, beside other systems, and also the stages of a step and speculation.

    python benchmarks/bench.py layer --context 32768,131072 --stages
    python benchmarks/bench.py decode MODEL --tokens 4096
    python benchmarks/bench.py prefill MODEL --tokens 4096
    python benchmarks/bench.py speculate MODEL --tokens 4096 --drafters prompt_lookup

The options are those of `jshadow bench`, and more. transformers and torch are timed if torch is installed (extra
`torch`). The functions import JAX, so that `main` can set the folder of compiled programs before.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from jshadow.cli import bench
from jshadow.cli.compile_cache import CacheOptions, compile_cache
from jshadow.cli.console import show_table
from jshadow.cli.fields import Command, add_command, command_of, option
from jshadow.cli.options import MODEL_HELP, check_least
from jshadow.errors import ConfigError, JshadowError

NO_PEERS = "leave transformers out"


@dataclasses.dataclass(kw_only=True)
class Layer(bench.Layer):
    """One decode step of one layer's attention, beside dense baselines."""

    stages: bool = option("also each stage of the step, as a program of its own", False)
    speculate: str | None = option("instead, a cycle of self:POLICY:key=value:... and a step", metavar="NAME")
    acceptance: float | None = option("share of its drafts that are accepted", metavar="SHARE")

    def run(self) -> int:
        return run_layer(self)


class _WithPeers:
    def others(self) -> Sequence[Any]:
        from speed.peers import transformers_systems

        from jshadow.evaluation.speed import Request

        request = Request(self.model, self.tokens, self.batch, self.steps, self.dtype)
        return () if self.no_peers else transformers_systems(request)


@dataclasses.dataclass(kw_only=True)
class Decode(_WithPeers, bench.Decode):
    """Decode steps of a checkpoint, beside transformers."""

    no_peers: bool = option(NO_PEERS, False)


@dataclasses.dataclass(kw_only=True)
class Prefill(_WithPeers, bench.Prefill):
    """The prefill of a checkpoint, beside transformers."""

    no_peers: bool = option(NO_PEERS, False)


@dataclasses.dataclass(kw_only=True)
class Speculate(CacheOptions, Command):
    """Continue texts of four tasks without and with drafters, and with transformers, prompt lookup too.

    The runs alternate. The first run of each system compiles and does not count.
    """

    model: str = option(MODEL_HELP, positional=True, required=True)
    tokens: int = option("tokens of each text", 4096)
    new: int = option("new tokens", 128)
    repeats: int = option("measured runs of each system", 3)
    drafters: str = option(bench.POLICIES_HELP, "prompt_lookup")
    policy: str = option("NAME or NAME:key=value:...", "full")
    dtype: str = option(bench.DTYPE_HELP, "float32")
    no_peers: bool = option(NO_PEERS, False)

    def run(self) -> int:
        return run_speculation(self)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all parts."""
    top = argparse.ArgumentParser(description="Measure as `jshadow bench` does, beside other systems.")
    parts = top.add_subparsers(required=True, metavar="PART")
    for name, kind in (("layer", Layer), ("decode", Decode), ("prefill", Prefill), ("speculate", Speculate)):
        add_command(parts, name, kind, str(kind.__doc__).partition(".")[0].lower())
    return top


def run_layer(args: Layer) -> int:
    """Time one layer's step with each policy and with each dense baseline, and the stages if they are asked for."""
    from speed.peers import bench_baselines
    from speed.stages import bench_stages

    from jshadow.evaluation.speed import bench_layer, ceilings

    shapes = args.shapes()
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


def run_cycles(args: Layer, shapes: Sequence[Any]) -> int:
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
    titles = ("tokens", "full step, ms", "drafts, ms", "check, ms", "tokens a cycle", "this / full", "least to most")
    table = []
    for row in rows:
        cells = (
            f"{row['context']:,}",
            *(f"{row[f'{name}_seconds'] * 1e3:.2f}" for name in ("step", "draft", "check")),
            f"{row['tokens_a_cycle']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
        )
        table.append(cells)
    show_table(titles, table, width=bench.WIDTH)
    return 0


def run_speculation(args: Speculate) -> int:
    """Continue texts with and without drafters, beside transformers."""
    from speed.speculation import bench_speculation, bench_transformers, texts_of

    from jshadow.engine.speculation import parse_drafter
    from jshadow.policies import parse_policy, split_policy
    from jshadow.weights.params import load

    check_least(args, 1, "repeats")
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
    table: list[Sequence[str]] = []
    for row in rows:
        cells = (
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
        table.append(cells)
    show_table([*titles, "same tokens"], table, width=bench.WIDTH)
    return 0


def print_stages(rows: list[dict[str, Any]]) -> None:
    """Print the stages of each policy. For a stage that is part of another stage, the line names that stage."""
    titles = ("stage", "ms", "least to most", "to its bound", "read MB", "from the host MB", "million operations")
    table: list[Sequence[str]] = []
    for row in rows:
        inner = f" (of {row['part_of']})" if row["part_of"] else ""
        cells = (
            f"{row['setting']}: {row['stage']}{inner}",
            *bench.milliseconds(row),
            bench.times_bound(row),
            f"{row['bytes_read'] / 1e6:,.1f}",
            f"{row['bytes_fetched'] / 1e6:,.1f}",
            f"{row['flops'] / 1e6:,.1f}",
        )
        table.append(cells)
    show_table(titles, table, width=bench.WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part. Returns 0, 1 if a setting could not be measured, or 2 for an error of jshadow's."""
    try:
        command = command_of(parser().parse_args(argv))
        with compile_cache(command):
            return command.run()
    except JshadowError as error:
        print(f"bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
