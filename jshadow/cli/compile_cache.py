"""The command line's cache of compiled programs, so that a second run of a command compiles nothing.

The cache is JAX's own persistent compilation cache. It is set up by JAX's environment variables before JAX is imported,
so that processes which a command starts also use it. A variable that is already set stays as it is.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from jshadow.cli.fields import option

_FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
# Small programs are also kept: a short answer runs dozens of them, and each takes a fraction of a second to compile.
KEEP_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
WRITE_FAILED, READ_FAILED = (f"Error {verb} persistent compilation cache entry" for verb in ("writing", "reading"))


@dataclasses.dataclass(kw_only=True)
class CacheOptions:
    """Whether compiled programs are kept."""

    title: ClassVar[str] = ""
    compile_cache: bool = option(
        f"do not keep compiled programs on disk (default: {_FOLDER_VARIABLE}, or ~/.cache/jshadow/xla)", True
    )


def default_folder() -> Path:
    """Return `jshadow/xla` in the user's cache folder: $XDG_CACHE_HOME if it is an absolute path, else ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jshadow" / "xla"


def cache_folder() -> str:
    """Return the folder or the bucket of compiled programs. Raises RuntimeError if the user has no home folder."""
    return os.environ.get(_FOLDER_VARIABLE, "") or str(default_folder())


def check_writable(folder: str | Path) -> None:
    """Write a file into a folder, and remove it. Raises OSError if that fails."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"x")


@contextlib.contextmanager
def compile_cache(args: Any) -> Iterator[None]:
    """Run a command with the cache that its options ask for. If the cache cannot be used, one line on stderr says so.

    A command without the option `compile_cache` compiles nothing, and nothing is done.
    """
    if not hasattr(args, "compile_cache"):
        yield
        return
    if args.compile_cache:
        _set_up()
    else:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    with one_warning():
        yield


def _set_up() -> None:
    """Set JAX's variables, and make the folder. If it cannot be written, warn and turn the cache off."""
    try:
        folder = cache_folder()
        if "://" not in folder:  # JAX can also keep the cache in a bucket
            Path(folder).mkdir(parents=True, exist_ok=True)
            check_writable(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        _warn(str(error))
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        return
    for name, value in (KEEP_ALL | {_FOLDER_VARIABLE: folder}).items():
        os.environ.setdefault(name, value)


def _warn(reason: str) -> None:
    print(f"jshadow: compiled programs are not kept on disk: {reason}", file=sys.stderr)


@contextlib.contextmanager
def one_warning() -> Iterator[None]:
    """Turn JAX's warnings of entries that cannot be written into one line, and drop those of entries it cannot read.

    Without this, JAX warns once for each program. A program whose entry JAX cannot read is compiled again.
    """
    show, failed = warnings.showwarning, False

    def show_once(message: Warning | str, *others: object, **named: object) -> None:
        nonlocal failed
        text = str(message)
        if text.startswith(WRITE_FAILED):
            if not failed:
                failed = True
                _warn(text.rpartition("': ")[2])
        elif not text.startswith(READ_FAILED):
            show(message, *others, **named)  # type: ignore[arg-type]

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = show
