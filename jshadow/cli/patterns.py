"""`jshadow prefill-patterns`: search the best pattern of a sparse prefill for each head."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.console import console
from jshadow.cli.files import check_writable, read_text
from jshadow.cli.options import JSON_HELP
from jshadow.cli.progress import SlowProgress
from jshadow.errors import PromptError

if TYPE_CHECKING:
    from rich.table import Table

ABOUT = """Find the columns, diagonals or blocks of the attention matrix that suit each query head best at equal cost,
on a text like the later prompts. Writes a pattern for `--prefill vertical_slash:pattern=FILE`."""


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=run_patterns)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("--text", required=True, metavar="FILE", help="a UTF-8 file with the text")
    add.add_argument("--tokens", type=int, default=4096, help="first tokens of the text to use (default: %(default)s)")
    add.add_argument(
        "--share", type=float, default=0.3, help="cost of a head as a share of exact attention's (default: %(default)s)"
    )
    add.add_argument("--out", required=True, metavar="FILE", help="the pattern's file (JSON)")
    add.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    add_cache_option(add)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def run_patterns(args: argparse.Namespace) -> int:
    """Run `jshadow prefill-patterns`, and return 0 when the pattern is written."""
    from jshadow.engine.sparse_prefill.search import save_pattern, search_pattern
    from jshadow.engine.text import encode
    from jshadow.weights.params import load

    text = read_text(args.text, "text")
    check_writable(args.out, "--out")
    params = load(args.model, dtype=args.dtype)
    if params.tokenizer is None:
        raise PromptError(f"text cannot be encoded because {args.model} has no tokenizer")
    tokens = encode(params.tokenizer, text, params.config.vocab_size)
    if not 1 <= args.tokens <= len(tokens):
        raise PromptError(f"tokens must lie in [1, {len(tokens)}], the tokens of the text, got {args.tokens}")
    with SlowProgress("searching") as progress:
        found = search_pattern(params, tokens[: args.tokens], share=args.share, progress=progress)
    about = {"model": str(args.model), "tokens": args.tokens, "share": args.share, "digest": found.pattern.digest()}
    save_pattern(args.out, found, about)
    rows = found.summary()
    if args.json:
        print(json.dumps({"out": str(args.out), **about, "candidates": rows}))
    else:
        console(100).print(table(rows))
        print(f"{args.out}: written")
    return 0


def table(rows: list[dict[str, Any]]) -> "Table":
    """Return the table of the candidates of `search_pattern`, one row for each."""
    from rich.table import Table

    candidates = Table("candidate", "heads", "attention mass %", "of exact attention's tiles %")
    for row in rows:
        shares = ("-" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("recovered", "tiles"))
        candidates.add_row(row["candidate"], f"{row['heads']:,}", *shares)
    return candidates
