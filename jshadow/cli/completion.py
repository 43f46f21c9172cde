"""`jshadow --print-completion SHELL`: a script that completes commands, options and file names."""

import argparse
from collections.abc import Sequence
from typing import Any

SHELLS = ("bash", "zsh")
FILES = ("FILE", "FILES")  # metavars of options that take a file
PATHS = ("model", "source", "target", "out", "place", "prompt_file")  # arguments that take a file or a folder


class PrintCompletion(argparse.Action):
    """The action that prints the completion script of a shell and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script of the shell `values` to standard output."""
        import shtab

        mark_files(parser)
        print(shtab.complete(parser, str(values)))
        parser.exit()


def mark_files(parser: argparse.ArgumentParser) -> None:
    """Make the script offer file names for the arguments of all commands that take a path."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                mark_files(command)
        elif action.metavar in FILES or (action.dest in PATHS and action.choices is None):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
