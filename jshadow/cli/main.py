"""The command line: parses the arguments, runs a command, and turns typed errors into exit codes.

The modules of the commands import JAX only when a command runs, so that help and completion are fast.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from jshadow.cli import bench as cli_bench
from jshadow.cli import chat as cli_chat
from jshadow.cli import eval as cli_eval
from jshadow.cli import fit as cli_fit
from jshadow.cli import generate as cli_generate
from jshadow.cli import laws as cli_laws
from jshadow.cli import library as cli_library
from jshadow.cli import plan as cli_plan
from jshadow.cli import policies as cli_policies
from jshadow.cli import serve as cli_serve
from jshadow.cli.compile_cache import compile_cache
from jshadow.cli.completion import SHELLS, PrintCompletion
from jshadow.cli.options import JSON_HELP
from jshadow.cli.progress import SlowProgress
from jshadow.errors import ConfigError, JshadowError

ABOUT = "Long-context LLM inference: ShadowKV and its sister methods."


def run_convert(args: argparse.Namespace) -> int:
    """Run `jshadow convert`, and return 0 when the directory is complete."""
    from jshadow.weights.convert import convert

    if not 0 < args.shard_gb < 1e9:
        raise ConfigError(f"--shard-gb must be above 0 and finite, got {args.shard_gb!r}")
    with SlowProgress("converting", first="") as progress:
        convert(
            args.source, args.target, args.dtype, progress, format=args.format, shard_bytes=int(args.shard_gb * 1e9)
        )
    if args.json:
        asked = {"source": str(args.source), "target": str(args.target), "dtype": args.dtype, "format": args.format}
        print(json.dumps(asked))
    else:
        print(f"{args.target}: written")
    return 0


class PrintVersion(argparse.Action):
    """The action that prints the versions of jshadow and JAX and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the line to standard output."""
        from importlib.metadata import version

        print(f"jshadow {version('jshadow')} (jax {version('jax')})")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    top = argparse.ArgumentParser(prog="jshadow", description=ABOUT)
    top.add_argument("--version", action=PrintVersion, nargs=0, help="print the version and exit")
    top.add_argument(
        "--print-completion", action=PrintCompletion, choices=SHELLS, help="print a script of shell completion and exit"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    cli_generate.add_options(
        commands.add_parser("generate", help="answer a prompt", description="Answer a prompt, streaming the text.")
    )

    cli_chat.add_options(commands.add_parser("chat", help="ask about a document", description=cli_chat.ABOUT))

    cli_library.add_options(
        commands.add_parser("library", help="store documents, ask about them", description=cli_library.ABOUT)
    )

    cli_serve.add_options(
        commands.add_parser("serve", help="answer over HTTP, with OpenAI's routes", description=cli_serve.ABOUT)
    )

    add = commands.add_parser(
        "convert",
        help="turn one kind of checkpoint into another",
        description="Convert a checkpoint, tensor by tensor, so that a large one needs little memory. DST gets a "
        "manifest of its files.",
    )
    add.set_defaults(run=run_convert)
    add.add_argument("source", metavar="SRC", help="a .gguf file, an HF or Orbax directory, or a hub id")
    add.add_argument("target", metavar="DST", help="directory to write; must not exist")
    add.add_argument("--dtype", default="bfloat16", help="dtype of the written tensors (default: %(default)s)")
    add.add_argument("--format", default="huggingface", help="huggingface or orbax (default: %(default)s)")
    add.add_argument(
        "--shard-gb", type=float, default=5.0, help="GB of each safetensors file, at most (default: %(default)s)"
    )
    add.add_argument("--json", action="store_true", help=JSON_HELP)

    cli_policies.add_options(
        commands.add_parser("policies", help="list the policies, count their bytes", description=cli_policies.ABOUT)
    )

    cli_laws.add_options(commands.add_parser("laws", help="check a policy", description=cli_laws.ABOUT))

    cli_plan.add_options(commands.add_parser("plan", help="count KV bytes, plan a GPU", description=cli_plan.ABOUT))

    cli_bench.add_options(commands.add_parser("bench", help="measure decode steps", description=cli_bench.ABOUT))

    cli_fit.add_fit_options(commands.add_parser("fit", help="learn a policy's arrays", description=cli_fit.ABOUT_FIT))
    cli_fit.add_calibrate_options(
        commands.add_parser("calibrate", help="find OmniKV's filter layers", description=cli_fit.ABOUT_CALIBRATE)
    )

    cli_eval.add_options(commands.add_parser("eval", help="measure policies", description=cli_eval.ABOUT))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments after the name of the program. None: the arguments of this process.

    Returns:
        The exit status. 0: success. 1: `jshadow laws` found a broken law, `jshadow bench` could not measure a setting,
        JAX cannot start the backend, or the reader of standard output closed the pipe. 2: a JshadowError. 130: an
        interrupt.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the encoding of the terminal lacks
    try:
        try:
            return run_command(argv)
        finally:
            sys.stdout.flush()  # a closed pipe is noticed here, not when the process ends
    except BrokenPipeError:
        # The reader has all it wants, as in `jshadow policies | head -1`. What is left in the buffer goes nowhere.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except JshadowError as error:
        print(f"jshadow: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        if (problem := backend_problem()) is None:
            raise
        print(f"jshadow: {problem}", file=sys.stderr)
        return 1


def run_command(argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command, and return its exit status."""
    args = parser().parse_args(argv)
    args.command_line = ["jshadow", *(sys.argv[1:] if argv is None else argv)]  # for the report
    with compile_cache(args):
        return int(args.run(args))


def backend_problem() -> str | None:
    """Return why JAX cannot start the backend that JAX_PLATFORMS names, and what to do, or None if it can."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if not asked or "jax" not in sys.modules:
        return None
    import jax

    try:
        jax.devices()
    except Exception:
        what = f"JAX cannot start the backend of JAX_PLATFORMS={asked!r}"
        if {"cuda", "gpu"} & {part.strip() for part in asked.split(",")}:
            return (
                f"{what}: install it with pip install 'jshadow[cuda12]' (or 'jshadow[cuda13]'), or unset the variable"
            )
        return f"{what}: set the variable to a backend that is installed, or unset it"
    return None
