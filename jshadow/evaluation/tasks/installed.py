"""Files of other people's packages. They are read where the package is installed, and are never part of jshadow."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError


def installed_file(distribution: str, version: str | None, file: str, install: str) -> Path:
    """Return the path of a file of an installed package.

    Args:
        distribution: name of the package in an index.
        version: the version that it must have, or None for any.
        file: path of the file in the folder of installed packages.
        install: the command that installs the package.

    Raises:
        ConfigError: the package is not installed or has another version, or the file is missing.
    """
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"this task needs the package {distribution}: {install}") from error
    if version is not None and found.version != version:
        raise ConfigError(f"{distribution} must have the version {version}, got {found.version}: {install}")
    path = Path(str(found.locate_file(file)))
    if not path.is_file():
        raise ConfigError(f"this task needs the file {path}, which is missing: {install}")
    return path


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises ConfigError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"this task needs {path}, which cannot be read: {error!r}") from error
