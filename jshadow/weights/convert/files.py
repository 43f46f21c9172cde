"""Checks and writes of all checkpoint files: a file may be missing or a placeholder, and is written as a whole."""

import contextlib
import fcntl
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jshadow.errors import CheckpointError, ConfigError

# Attempts to remove a directory, and checks that must find it gone. They are a tenth of a second apart.
REMOVALS, QUIET = 50, 3
LFS_HEAD = b"version https://git-lfs"


def check_file(path: Path, kind: str) -> int:
    """Refuse a file that cannot be a weight file, before a parser reads it.

    Args:
        path: the file.
        kind: what it should be, for the message ("a safetensors file").

    Returns:
        Its size in bytes.

    Raises:
        CheckpointError: missing, not a regular file, empty, or a Git LFS pointer.
    """
    with readable(path):
        if not path.exists():
            raise CheckpointError(f"{path} must be {kind}, but there is no such file")
        if not path.is_file():
            raise CheckpointError(f"{path} must be {kind}, got something that is not a regular file")
        size = path.stat().st_size
        if size == 0:
            raise CheckpointError(f"{path} must be {kind}, got an empty file (0 bytes)")
        with path.open("rb") as file:
            if file.read(len(LFS_HEAD)) == LFS_HEAD:
                raise CheckpointError(
                    f"{path} must be {kind}, got a Git LFS pointer of {size} bytes: "
                    "run `git lfs pull` where it came from"
                )
    return size


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """The system's errors about a path that cannot be read, as a CheckpointError."""
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def check_path(name: str, value: Any) -> Path:
    """A path from a string or path. Raises ConfigError for anything else."""
    if not isinstance(value, str | os.PathLike) or "\0" in os.fspath(value):
        raise ConfigError(f"{name} must be a string or a path, got {value!r}")
    return Path(value).expanduser()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file where it is missing, garbage or no object."""
    check_file(path, "a JSON object")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} must be a JSON object, got text that does not parse: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must be a JSON object, got a {type(value).__name__}")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    # JSON has no infinity, but 1e999 reads as one. No field of a checkpoint is infinite.
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is beyond the range of a double")
    return float(text)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object the way Hugging Face does: two spaces, sorted keys, a final newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A fresh directory beside `target` that becomes `target` when the block ends, or vanishes when it fails.

    Args:
        target: directory to make; must not exist.

    Yields:
        The temporary sibling to write to. Its files are synced before the rename, so that a crash of the machine
        leaves the whole directory or none.

    Raises:
        CheckpointError: `target` exists, or its parent cannot be written.
    """
    refuse_existing(target)
    try:
        with workspace(target.parent, f".{target.name}.partial-") as partial:
            yield partial
            for path in sorted(partial.rglob("*")):
                sync(path)
            sync(partial)
            refuse_existing(target)  # rename would replace an empty directory that came up meanwhile
            partial.rename(target)
            sync(target.parent)
    except OSError as error:  # disk full, above all
        raise CheckpointError(f"output directory {target} cannot be made: {error}") from error


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A name to write to that becomes the file `target` when the block ends, or vanishes when it fails.

    Args:
        target: file to make or to replace.

    Yields:
        A path on the same file system. What is written there is synced before it takes the name, so that a crash
        leaves the whole old file or the whole new one.

    Raises:
        CheckpointError: `target` cannot be written.
    """
    try:
        with workspace(target.parent, f".{target.name}.partial-") as partial:
            fresh = partial / target.name
            yield fresh
            sync(fresh)
            fresh.replace(target)
            sync(target.parent)
    except OSError as error:  # disk full, above all
        raise CheckpointError(f"file {target} cannot be written: {error}") from error


@contextlib.contextmanager
def workspace(parent: Path, prefix: str) -> Iterator[Path]:
    """A fresh directory in `parent` that is gone when the block ends, unless it was renamed.

    A killed process cannot clean up. So each workspace is locked while its process lives, and the next process that
    makes one with the same prefix removes those whose lock is free.

    Args:
        parent: where; made if need be.
        prefix: how the name begins.

    Yields:
        The directory.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for path in [path for path in parent.iterdir() if path.name.startswith(prefix) and path.is_dir()]:
        with contextlib.suppress(OSError), _locked(path):  # BlockingIOError: another process works there
            shutil.rmtree(path)
    folder = parent / f"{prefix}{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        with _locked(folder):
            yield folder
    except BaseException:  # also KeyboardInterrupt
        remove_for_good(folder)
        raise
    shutil.rmtree(folder, ignore_errors=True)  # after a rename there is nothing here


def remove_for_good(path: Path) -> None:
    """Remove a directory, although a thread of a failed writer may still write to it, or even make it again."""
    gone = 0
    for _ in range(REMOVALS):
        shutil.rmtree(path, ignore_errors=True)
        gone = 0 if path.exists() else gone + 1
        if gone == QUIET:
            return
        time.sleep(0.1)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def refuse_existing(target: Path) -> None:
    """Raise CheckpointError where `target` exists, also as a broken link."""
    if os.path.lexists(target):
        raise CheckpointError(f"output directory {target} must not exist yet; remove it or choose another name")


def sync(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
