"""The command line: parses the arguments, runs a command, and turns typed errors into exit codes.

The modules of the commands import JAX only when a command runs, so that help and completion are fast.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from jshadow.cli import bench, fit, library
from jshadow.cli.advise import Advise
from jshadow.cli.chat import Chat
from jshadow.cli.compile_cache import compile_cache
from jshadow.cli.console import SlowProgress
from jshadow.cli.doctor import Doctor, backend_advice
from jshadow.cli.eval import Eval
from jshadow.cli.fields import Command, add_command, command_of, option
from jshadow.cli.generate import Generate
from jshadow.cli.laws import Laws
from jshadow.cli.plan import Plan
from jshadow.cli.policies import Policies
from jshadow.cli.serve import Serve
from jshadow.errors import ConfigError, JshadowError

_ABOUT = "Long-context LLM inference: ShadowKV and its sister methods."
_SHELLS = ("bash", "zsh")
_FILES = ("FILE", "_FILES")  # metavars of options that take a file
_PATHS = ("model", "source", "target", "out", "place", "prompt_file")  # arguments that take a file or a folder


@dataclasses.dataclass(kw_only=True)
class _Convert(Command):
    """Convert a checkpoint, tensor by tensor, so that a large one needs little memory.

    DST gets a manifest of its files.
    """

    source: str = option(
        "a .gguf file, an HF or Orbax directory, or a hub id", metavar="SRC", positional=True, required=True
    )
    target: str = option("directory to write; must not exist", metavar="DST", positional=True, required=True)
    dtype: str = option("dtype of the written tensors", "bfloat16")
    format: str = option("huggingface or orbax", "huggingface")
    shard_gb: float = option("GB of each safetensors file, at most", 5.0, metavar="GB")

    def run(self) -> int:
        """Return 0 when the directory is complete."""
        from jshadow.weights.convert import convert

        if not 0 < self.shard_gb < 1e9:
            raise ConfigError(f"--shard-gb must be above 0 and finite, got {self.shard_gb!r}")
        size = int(self.shard_gb * 1e9)
        with SlowProgress("converting", first="") as progress:
            convert(self.source, self.target, self.dtype, progress, format=self.format, shard_bytes=size)
        asked = {"source": self.source, "target": self.target, "dtype": self.dtype, "format": self.format}
        print(json.dumps(asked) if self.json else f"{self.target}: written")
        return 0


class _Print(argparse.Action):
    """The action that prints the versions of jshadow and JAX, or the completion script of a shell, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.dest == "version":
            from importlib.metadata import version

            print(f"jshadow {version('jshadow')} (jax {version('jax')})")
        else:
            import shtab

            _mark_files(parser)
            print(shtab.complete(parser, str(values)))
        parser.exit()


def _mark_files(parser: argparse.ArgumentParser) -> None:
    """Make the script offer file names for the arguments of all commands that take a path."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark_files(command)
        elif action.metavar in _FILES or (action.dest in _PATHS and action.choices is None):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    top = argparse.ArgumentParser(prog="jshadow", description=_ABOUT, argument_default=argparse.SUPPRESS)
    top.add_argument("--version", action=_Print, nargs=0, help="print the version and exit")
    top.add_argument(
        "--print-completion", action=_Print, choices=_SHELLS, help="print a script of shell completion and exit"
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_command(commands, "generate", Generate, "answer a prompt")
    add_command(commands, "chat", Chat, "ask about a document")
    about = commands.add_parser("library", help="store documents, ask about them", description=library.ABOUT)
    actions = about.add_subparsers(required=True, metavar="ACTION")
    add_command(actions, "add", library.Add, "read documents")
    add_command(actions, "list", library.List, "list the documents")
    add_command(actions, "ask", library.Ask, "ask about a document")
    add_command(actions, "remove", library.Remove, "remove a document")
    add_command(commands, "serve", Serve, "answer over HTTP, with OpenAI's routes")
    add_command(commands, "convert", _Convert, "turn one kind of checkpoint into another")
    add_command(commands, "policies", Policies, "list the policies, count their bytes")
    add_command(commands, "laws", Laws, "check a policy")
    add_command(commands, "plan", Plan, "count KV bytes, plan a GPU")
    about = commands.add_parser("bench", help="measure decode steps", description=bench.ABOUT)
    parts = about.add_subparsers(required=True, metavar="PART")
    add_command(parts, "layer", bench.Layer, "one decode step of one layer's attention")
    add_command(parts, "decode", bench.Decode, "decode steps of a checkpoint")
    add_command(parts, "prefill", bench.Prefill, "the prefill of a checkpoint")
    add_command(parts, "ceilings", bench.Ceilings, "what the machine can do at best")
    add_command(commands, "fit", fit.Fit, "learn a policy's arrays")
    add_command(commands, "calibrate", fit.Calibrate, "find OmniKV's filter layers")
    add_command(commands, "eval", Eval, "measure policies")
    add_command(commands, "advise", Advise, "choose a policy for your documents")
    add_command(commands, "doctor", Doctor, "look at this machine")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments after the name of the program. None: the arguments of this process.

    Returns:
        The exit status. 0: success. 1: `jshadow laws` found a broken law, `jshadow bench` could not measure a setting,
        `jshadow doctor` found a fault, JAX cannot start the backend, or the reader of standard output closed the pipe.
        2: a JshadowError. 130: an interrupt.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the encoding of the terminal lacks
    try:
        try:
            return _run_command(argv)
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
        if (problem := _backend_problem()) is None:
            raise
        print(f"jshadow: {problem}", file=sys.stderr)
        return 1


def _run_command(argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command, and return its exit status."""
    command = command_of(parser().parse_args(argv))
    command.command_line = ["jshadow", *(sys.argv[1:] if argv is None else argv)]
    with compile_cache(command):
        return command.run()


def _backend_problem() -> str | None:
    """Return why JAX cannot start the backend that JAX_PLATFORMS names, and what to do, or None if it can."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if not asked or "jax" not in sys.modules:
        return None
    import jax

    try:
        jax.devices()
    except Exception:
        return f"JAX cannot start the backend of JAX_PLATFORMS={asked!r}: {backend_advice(asked)}"
    return None
