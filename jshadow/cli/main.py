"""The command line: parses the arguments, runs a command, and turns typed errors into exit codes."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

from jshadow import __version__
from jshadow.cli import bench as cli_bench
from jshadow.cli import eval as cli_eval
from jshadow.cli import fit as cli_fit
from jshadow.cli import generate as cli_generate
from jshadow.cli import laws as cli_laws
from jshadow.cli import patterns as cli_patterns
from jshadow.cli import plan as cli_plan
from jshadow.cli import policies as cli_policies
from jshadow.cli.progress import SlowProgress
from jshadow.errors import ConfigError, JshadowError

ABOUT = "Long-context LLM inference: ShadowKV and its sister methods."


def run_convert(args: argparse.Namespace) -> int:
    """`jshadow convert`."""
    from jshadow.weights.convert import convert

    if not 0 < args.shard_gb < 1e9:
        raise ConfigError(f"--shard-gb must be above 0 and finite, got {args.shard_gb!r}")
    progress = SlowProgress("converting")
    try:
        convert(
            args.source, args.target, args.dtype, progress, format=args.format, shard_bytes=int(args.shard_gb * 1e9)
        )
    finally:
        progress.close()
    if args.json:
        asked = {"source": str(args.source), "target": str(args.target), "dtype": args.dtype, "format": args.format}
        print(json.dumps(asked))
    else:
        print(f"{args.target}: written")
    return 0


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="jshadow", description=ABOUT)
    top.add_argument("--version", action="version", version=f"jshadow {__version__} (jax {version('jax')})")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    json_help = "print one JSON object instead of text"

    cli_generate.add_options(
        commands.add_parser("generate", help="answer a prompt", description="Answer a prompt, streaming the text.")
    )

    add = commands.add_parser(
        "convert",
        help="turn one kind of checkpoint into another",
        description="Convert a checkpoint, tensor by tensor: memory does not grow with it. DST gets a manifest.",
    )
    add.set_defaults(run=run_convert)
    add.add_argument("source", metavar="SRC", help="a .gguf file, an HF or orbax directory, or a hub id")
    add.add_argument("target", metavar="DST", help="directory to write; must not exist")
    add.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    add.add_argument("--format", default="huggingface", help="huggingface or orbax (default: %(default)s)")
    add.add_argument("--shard-gb", type=float, default=5.0, help="most GB of a safetensors file (default: %(default)s)")
    add.add_argument("--json", action="store_true", help=json_help)

    cli_policies.add_options(
        commands.add_parser("policies", help="list the policies, count their bytes", description=cli_policies.ABOUT)
    )

    cli_laws.add_options(commands.add_parser("laws", help="check a policy", description=cli_laws.ABOUT))

    cli_plan.add_options(commands.add_parser("plan", help="count KV bytes, plan a GPU", description=cli_plan.ABOUT))

    cli_patterns.add_options(
        commands.add_parser(
            "prefill-patterns", help="search patterns of sparse prefill", description=cli_patterns.ABOUT
        )
    )

    cli_bench.add_options(commands.add_parser("bench", help="measure decode steps", description=cli_bench.ABOUT))

    cli_fit.add_fit_options(commands.add_parser("fit", help="learn a policy's arrays", description=cli_fit.ABOUT_FIT))
    cli_fit.add_calibrate_options(
        commands.add_parser("calibrate", help="find OmniKV's filter layers", description=cli_fit.ABOUT_CALIBRATE)
    )

    cli_eval.add_options(
        commands.add_parser("eval", help="measure policies", description=cli_eval.ABOUT), cli_generate.PREFILL_HELP
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it worked, 1 after a broken law, 2 after a typed error, 130 when interrupted."""
    args = parser().parse_args(argv)
    args.command_line = ["jshadow", *(sys.argv[1:] if argv is None else argv)]  # for the report
    try:
        return int(args.run(args))
    except JshadowError as error:
        print(f"jshadow: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
