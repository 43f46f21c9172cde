"""The command `python -m jshadow.evaluation.tasks`: prints the prompt of one case, or writes the rows of several."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jshadow.errors import ConfigError, JshadowError
from jshadow.evaluation.data import rows_of, write_rows
from jshadow.evaluation.tasks import TASKS, make, sample_of


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(
        prog="python -m jshadow.evaluation.tasks", description="Print one prompt, or write rows that kvpress reads."
    )
    options.add_argument("task", help=", ".join(TASKS))
    options.add_argument("--model", required=True, metavar="DIR", help="model directory with a tokenizer")
    options.add_argument("--tokens", type=int, default=2000, help="tokens in the model's format (default: %(default)s)")
    options.add_argument(
        "--depth", type=float, help="place of the fact, 0 to 1 (default: 0.5); with --out spread evenly"
    )
    options.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options.add_argument(
        "--out", metavar="FILE", help="write a JSONL file of --samples cases, as `jshadow eval` has them"
    )
    options.add_argument("--samples", type=int, default=10, help="cases that --out gets (default: %(default)s)")
    return options


def _write(args: argparse.Namespace) -> None:
    """Write the rows of several cases to a file. Raises ConfigError for bad options, or if it cannot be written."""
    from jshadow.weights.params import load_tokenizer

    if args.samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {args.samples}")
    if args.depth is not None or args.json:
        raise ConfigError("--out must be given without --depth and --json, because depths are spread evenly")
    tokenizer = load_tokenizer(Path(args.model))
    rows = []
    for index in range(args.samples):
        case, depth = sample_of(args.task, tokenizer, args.tokens, index, args.samples, args.seed)
        rows += rows_of(args.task, tokenizer, args.tokens, case, depth)
    write_rows(args.out, rows)
    print(f"{args.out}: {len(rows)} rows")


def _show(args: argparse.Namespace) -> None:
    """Print one prompt. Raises ConfigError as `make` does."""
    from jshadow.weights.params import load_tokenizer

    depth = 0.5 if args.depth is None else args.depth
    case = make(args.task, load_tokenizer(Path(args.model)), args.tokens, depth, args.seed)
    if not args.json:
        print(case.text)
        return
    settings = {"task": args.task, "tokens": args.tokens, "depth": depth, "seed": args.seed}
    rows = [dataclasses.asdict(sample) for sample in case.samples]
    print(json.dumps(settings | {"prompt": case.text, "samples": rows}))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 after an error of jshadow."""
    args = _parser().parse_args(argv)
    try:
        _show(args) if args.out is None else _write(args)
    except JshadowError as error:
        print(f"jshadow: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
