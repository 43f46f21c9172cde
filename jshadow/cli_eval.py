"""`jshadow eval`: from its arguments to what it prints."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from jshadow import offload
from jshadow.errors import ConfigError
from jshadow.evaluation import metrics
from jshadow.evaluation.plots import check_plot, plot_turns
from jshadow.evaluation.runner import evaluate
from jshadow.evaluation.tasks import TASK_TURNS, TASKS
from jshadow.fitted import load_fitted, read_fitted_info
from jshadow.params import load
from jshadow.policies import Policy, parse_policy
from jshadow.policies.wrappers import innermost
from jshadow.progress import SlowProgress
from jshadow.sparse_prefill import parse_prefill


def split_list(text: str, name: str) -> list[str]:
    """The parts of a comma list. Raises ConfigError where there is none or one is empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{name} must be a comma list without empty parts, got {text!r}")
    return parts


def parse_lengths(text: str) -> list[int]:
    """Prompt lengths from a comma list. Raises ConfigError."""
    parts = split_list(text, "lengths")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"lengths must be a comma list of integers, got {text!r}")
    return [int(part) for part in parts]


def parse_shares(text: str | None) -> list[float]:
    """Shares of full attention's bytes from a comma list; none where there is no text. Raises ConfigError."""
    if text is None:
        return []
    try:
        return [float(part) for part in split_list(text, "shares")]
    except ValueError as error:
        raise ConfigError(f"shares must be a comma list of numbers, got {text!r}") from error


def read_fitted(paths: Sequence[str], policies: Sequence[Policy], params: Any) -> dict[str, Any]:
    """Learned arrays by their policy's name. Raises ConfigError where a policy has two files, or a file none."""
    arrays: dict[str, Any] = {}
    for path in paths:
        name = read_fitted_info(path)["policy"]["name"]
        readers = [policy for policy in policies if innermost(policy).name == name]
        if not readers or name in arrays:
            raise ConfigError(f"fitted must be one file for a policy of --policies, got {path} of {name}")
        arrays[name] = load_fitted(path, params, readers[0].with_fitted())
    return arrays


def run_eval(args: argparse.Namespace) -> int:
    """`jshadow eval`: parse, load, evaluate, print."""
    tasks, lengths = split_list(args.tasks, "tasks"), parse_lengths(args.lengths)
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ConfigError(f"tasks must be among {sorted(TASKS)}, got {unknown[0]!r}")
    parts = [part.split(":") for part in split_list(args.policies, "policies")]
    policies = [parse_policy(name, settings) for name, *settings in parts]
    prefill = parse_prefill(args.prefill or "exact")
    offload.resolve_fetch(args.fetch)
    shares = parse_shares(args.shares)
    files = split_list(args.fitted, "fitted") if args.fitted is not None else []
    if args.plot is not None:
        check_plot(args.plot, tasks, TASK_TURNS)
    params = load(args.model, dtype=args.dtype, quantize=args.quantize)
    fitted = read_fitted(files, policies, params)
    progress = SlowProgress("evaluating")
    try:
        rows = evaluate(
            params, tasks, lengths, policies, samples=args.samples, seed=args.seed, fetch=args.fetch, out=args.out,
            progress=progress, shares=shares, prefill=prefill, fitted=fitted,
        )  # fmt: skip
    finally:
        progress.close()
    if args.plot is not None:
        plot_turns(rows, args.plot)
    if args.json:
        print(json.dumps({"results": rows, "pooled": metrics.pooled(rows)}))
    else:
        shown = metrics.show_shares if shares else metrics.show
        shown(rows, Console(width=None if sys.stdout.isatty() else 160))
    return 0
