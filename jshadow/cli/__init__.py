"""The command line."""

from jshadow.cli.main import main as main
