"""`jshadow prefill-patterns`: search the best pattern of a sparse prefill for each head."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from jshadow.cli.console import console
from jshadow.cli.progress import SlowProgress
from jshadow.errors import PromptError

ABOUT = """Search, on a text like those to come, which columns, diagonals or blocks suit each query head best at equal
cost, and write a pattern for `--prefill vertical_slash:pattern=FILE`."""


def add_options(add: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add.set_defaults(run=run_patterns)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("--text", required=True, metavar="FILE", help="a UTF-8 file with the text")
    add.add_argument("--tokens", type=int, default=4096, help="of its tokens, the first (default: %(default)s)")
    add.add_argument(
        "--share", type=float, default=0.3, help="cost of a head, to that of exact attention (default: %(default)s)"
    )
    add.add_argument("--out", required=True, metavar="FILE", help="the pattern's file (JSON)")
    add.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    add.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_patterns(args: argparse.Namespace) -> int:
    """`jshadow prefill-patterns`."""
    from jshadow.engine.sparse_prefill.search import save_pattern, search_pattern
    from jshadow.weights.params import load

    try:
        text = Path(args.text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"text must be readable UTF-8: {error}") from error
    params = load(args.model, dtype=args.dtype)
    if params.tokenizer is None:
        raise PromptError(f"text cannot be encoded, for {args.model} has no tokenizer")
    tokens = params.tokenizer.encode(text)
    if not 1 <= args.tokens <= len(tokens):
        raise PromptError(f"tokens must lie in [1, {len(tokens)}], the text's own, got {args.tokens}")
    progress = SlowProgress("searching")
    try:
        found = search_pattern(params, tokens[: args.tokens], share=args.share, progress=progress)
    finally:
        progress.close()
    about = {"model": str(args.model), "tokens": args.tokens, "share": args.share, "digest": found.pattern.digest()}
    save_pattern(args.out, found, about)
    rows = found.summary()
    if args.json:
        print(json.dumps({"out": str(args.out), **about, "candidates": rows}))
    else:
        console(100).print(table(rows))
        print(f"{args.out}: written")
    return 0


def table(rows: list[dict[str, Any]]) -> Table:
    """One row a candidate."""
    candidates = Table("candidate", "heads", "attention mass %", "of exact attention's tiles %")
    for row in rows:
        shares = ("-" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("recovered", "tiles"))
        candidates.add_row(row["candidate"], f"{row['heads']:,}", *shares)
    return candidates
