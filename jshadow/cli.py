"""The command line: `jshadow generate | eval | plan | convert | policies`. Parses, calls the library, prints."""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jshadow.errors import ConfigError, JshadowError, PromptError
from jshadow.policies import POLICIES, parse_policy
from jshadow.progress import SlowProgress, waiting


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from --prompt, --prompt-file or standard input. Raises PromptError where it cannot be read."""
    given = [args.prompt is not None, args.prompt_file is not None, args.source is not None]
    if sum(given) != 1:
        raise PromptError("prompt must come from exactly one of --prompt, --prompt-file and '-' (standard input)")
    try:
        text = args.prompt if args.prompt is not None else ""
        text = sys.stdin.read() if args.source else text
        text = Path(args.prompt_file).read_text(encoding="utf-8") if args.prompt_file is not None else text
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt must be readable UTF-8 text: {error}") from error
    if not text.strip():
        raise PromptError(f"prompt must have text in it, got {text!r:.20}")
    return text


def run_generate(args: argparse.Namespace) -> int:
    """`jshadow generate`."""
    from jshadow.generate import Run  # JAX is imported by the commands that need it, not by --help
    from jshadow.params import load
    from jshadow.sampling import Sampler

    text = read_prompt(args)
    policies = [parse_policy(args.policy, args.set)]
    if args.baseline:
        policies.insert(0, parse_policy(args.baseline, []))
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.min_p)
    params = load(args.model, dtype=args.dtype)
    prompt: Any = [{"role": "user", "content": text}] if args.chat else text
    results = []
    for policy in policies:
        progress = SlowProgress(f"prefill, {policy.name}")
        run = Run(
            params, prompt, policy, max_new_tokens=args.max_new_tokens, sampler=sampler, seed=args.seed,
            fetch=args.fetch, capacity=args.capacity, stop=args.stop or None, progress=progress,
        )  # fmt: skip
        label = f"[{policy.name}] " if len(policies) > 1 else ""
        write_answer(run, progress, label, silent=args.json)
        results.append(run.results()[0])
    if args.json:
        print(json.dumps({"results": [made_json(made) for made in results]}))
    else:
        Console(width=None if sys.stdout.isatty() else 100).print(figures(results))
    return 0


def write_answer(run: Any, progress: SlowProgress, label: str, *, silent: bool) -> None:
    """Run a generation and stream its text, with a bar while the prompt is read and while the step is compiled."""
    pieces = iter(run)
    try:
        first = next(pieces, None)
    finally:
        progress.close()
    with waiting("compiling the decode step"):
        second = next(pieces, None)
    begun = [item for item in (first, second) if item is not None]
    for _, piece, _ in itertools.chain([(0, label, 0)], begun, pieces):
        if not silent:
            print(piece, end="", flush=True)
    if not silent:
        print(flush=True)


def made_json(made: Any) -> dict[str, Any]:
    """A Generation as plain values."""
    return {"text": made.text, "tokens": made.tokens, "report": made.report.to_json()}


def figures(results: Sequence[Any]) -> Table:
    """The table below an answer: one column a policy."""
    table = Table(title=None)
    table.add_column("")
    for made in results:
        table.add_column(made.report.policy.name, overflow="fold")

    def row(label: str, value: Callable[[Any], str]) -> None:
        table.add_row(label, *(value(made) for made in results))

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    row("answer", lambda m: (m.text or "").strip())
    row("prompt tokens", lambda m: f"{m.report.prompt_tokens:,}")
    row("tokens attended a step", lambda m: optional(m.report.attended_tokens, "{:,.1f}"))
    row("KV bytes on the device", lambda m: f"{m.report.device_bytes:,}")
    row("KV bytes on the host", lambda m: f"{m.report.host_bytes:,}")
    row("device bytes, full / this", lambda m: f"{m.report.full_bytes / m.report.device_bytes:.2f}")
    row("repeat share", lambda m: optional(m.report.hit_rate, "{:.1%}"))
    row("prefill seconds", lambda m: f"{m.report.prefill_seconds:.2f}")
    row("decode tokens/s", lambda m: optional(m.report.decode_tokens_per_second, "{:.1f}"))
    row("compile seconds", lambda m: f"{m.report.compile_seconds:.2f}")
    row("fetch", lambda m: m.report.fetch if m.report.host_bytes or m.report.fetch == "resident" else "-")
    row("fallback", lambda m: str(m.report.fallback))
    return table


def run_convert(args: argparse.Namespace) -> int:
    """`jshadow convert`."""
    from jshadow.convert import convert

    progress = SlowProgress("converting")
    try:
        convert(args.source, args.target, dtype=args.dtype, progress=progress)
    finally:
        progress.close()
    if args.json:
        print(json.dumps({"source": str(args.source), "target": str(args.target), "dtype": args.dtype}))
    else:
        print(f"{args.target}: written")
    return 0


def run_policies(args: argparse.Namespace) -> int:
    """`jshadow policies`."""
    rows = [
        {"name": name, "paper": policy.paper, "settings": dataclasses.asdict(policy())}  # type: ignore[call-overload]
        for name, policy in POLICIES.items()
    ]
    if args.json:
        print(json.dumps({"policies": rows}))
        return 0
    table = Table("policy", "settings", "source")
    for row in rows:
        settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
        table.add_row(str(row["name"]), settings or "-", str(row["paper"]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """`jshadow plan`."""
    from jshadow.convert.huggingface import locate, read_config
    from jshadow.planning import footprint

    _, _, config = read_config(locate(args.model))
    policy = parse_policy(args.policy, args.set)
    rows = []
    for text in args.lengths.split(","):
        if not text.strip().isdigit():
            raise ConfigError(f"--lengths must be a comma list of token counts, got {args.lengths!r}")
        length = int(text)
        capacity = length + args.max_new_tokens
        row = footprint(config, policy, capacity=capacity, prompt=length, dtype=args.dtype, fetch=args.fetch)
        rows.append({"length": length, "capacity": capacity, **row})
    if args.json:
        print(json.dumps({"policy": policy.name, "dtype": args.dtype, "plans": rows}))
        return 0
    table = Table("bytes of one request", *(f"{row['length']:,} tokens" for row in rows))
    for part in rows[0]["parts"]:
        device = [f"{row['parts'][part][0]:,}" if row["parts"][part][0] else "" for row in rows]
        host = [f"{row['parts'][part][1]:,} (host)" if row["parts"][part][1] else "" for row in rows]
        table.add_row(part, *(f"{a}{b}" or "0" for a, b in zip(device, host, strict=True)))
    table.add_row("device, all parts", *(f"{row['device_bytes']:,}" for row in rows))
    table.add_row("full attention", *(f"{row['full_bytes']:,}" for row in rows))
    table.add_row("full / this", *(f"{row['full_bytes'] / row['device_bytes']:.2f}" for row in rows))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """`jshadow eval`."""
    from jshadow.evaluation.runner import main

    return main(args)


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="jshadow", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    json_help = "print one JSON object instead of text"

    add = commands.add_parser("generate", help="answer a prompt", description="Answer a prompt, streaming the text.")
    add.set_defaults(run=run_generate)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("source", nargs="?", choices=["-"], help="read the prompt from standard input")
    add.add_argument("--prompt", help="the prompt")
    add.add_argument("--prompt-file", help="a UTF-8 file with the prompt")
    add.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    add.add_argument("--policy", default="shadowkv", help="policy name (default: %(default)s; see `jshadow policies`)")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument("--baseline", metavar="POLICY", help="run this policy first and show both side by side")
    add.add_argument("--fetch", default="auto", help="auto, resident or device_put (default: %(default)s)")
    add.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    add.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add.add_argument("--top-k", type=int)
    add.add_argument("--top-p", type=float)
    add.add_argument("--min-p", type=float)
    add.add_argument("--seed", type=int, default=0)
    add.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text (repeatable)")
    add.add_argument("--capacity", type=int, help="tokens to allocate (default: what is needed, rounded up)")
    add.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    add.add_argument("--json", action="store_true", help=json_help)

    add = commands.add_parser("convert", help="make an HF directory", description="Convert a checkpoint.")
    add.set_defaults(run=run_convert)
    add.add_argument("source", metavar="SRC", help="a .gguf file, an HF directory or a hub id")
    add.add_argument("target", metavar="DST", help="directory to write; must not exist")
    add.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    add.add_argument("--json", action="store_true", help=json_help)

    add = commands.add_parser("policies", help="list the policies", description="Policies and their default settings.")
    add.set_defaults(run=run_policies)
    add.add_argument("--json", action="store_true", help=json_help)

    add = commands.add_parser("plan", help="count KV bytes", description="KV bytes by part, without loading weights.")
    add.set_defaults(run=run_plan)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("--lengths", default="2048,4096,8192", help="prompt tokens, comma list (default: %(default)s)")
    add.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    add.add_argument("--policy", default="shadowkv", help="policy name (default: %(default)s)")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument("--fetch", default="device_put", help="auto, resident or device_put (default: %(default)s)")
    add.add_argument("--dtype", default="bfloat16", help="of keys and values (default: %(default)s)")
    add.add_argument("--json", action="store_true", help=json_help)

    add = commands.add_parser("eval", help="measure policies", description="Measure policies against full attention.")
    add.set_defaults(run=run_eval)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("--tasks", default="needle_noise,needle_docs", help="comma list (default: %(default)s)")
    add.add_argument("--lengths", default="1024,2048", help="prompt tokens, comma list (default: %(default)s)")
    add.add_argument("--policies", default="full,shadowkv", help="NAME or NAME:key=value:..., comma list")
    add.add_argument("--samples", type=int, default=10, help="samples of each task and length (default: %(default)s)")
    add.add_argument("--seed", type=int, default=0)
    add.add_argument("--fetch", default="auto", help="auto, resident or device_put (default: %(default)s)")
    add.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    add.add_argument("--out", help="directory for per-sample results")
    add.add_argument("--json", action="store_true", help=json_help)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it worked, 2 after a typed error, 130 when interrupted."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except JshadowError as error:
        print(f"jshadow: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
