"""The command line `jshadow`, a module for each command."""

from jshadow.cli.main import main as main
