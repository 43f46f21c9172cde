"""Helpers for all checkpoint files: checks before reading, and writes that are complete or leave nothing behind."""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.tokenizer import read_text


@contextlib.contextmanager
def quiet_transformers() -> Iterator[Any]:
    """A context manager that imports and yields transformers, without its warning that torch is missing.

    Inside the block, transformers logs only errors.
    """
    name, logger = "TRANSFORMERS_NO_ADVISORY_WARNINGS", logging.getLogger("transformers")
    before = os.environ.get(name)
    os.environ[name] = "1"  # the import sets the level of the logger, so a level set before it would be lost
    try:
        import transformers
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield transformers
    finally:
        logger.setLevel(level)


# `remove_for_good` tries up to REMOVALS times, a tenth of a second apart. It stops when the directory was gone QUIET
# times in a row.
REMOVALS, QUIET = 50, 3
PARTIAL = ".partial-"  # in the names of directories that are being written
_LFS_HEAD = b"version https://git-lfs"


def check_file(path: Path, kind: str) -> int:
    """Check that a file can be a weight file, before a parser reads it. Return its size.

    Args:
        kind: description of the expected kind for the error message, such as "a safetensors file".

    Returns:
        The size of the file in bytes.

    Raises:
        CheckpointError: the file is missing, not a regular file, empty, or a Git LFS pointer.
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
            if file.read(len(_LFS_HEAD)) == _LFS_HEAD:
                raise CheckpointError(
                    f"{path} must be {kind}, got a Git LFS pointer of {size} bytes: "
                    "run `git lfs pull` in its repository"
                )
    return size


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """A context manager that turns errors of the operating system about `path` into a CheckpointError."""
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def check_path(name: str, value: Any) -> Path:
    """Turn a string or path into a Path with "~" expanded. Raises ConfigError for anything else."""
    if not isinstance(value, str | os.PathLike) or "\0" in os.fspath(value):
        raise ConfigError(f"{name} must be a string or a path, got {value!r}")
    return Path(value).expanduser()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if it is missing, does not parse or is not an object."""
    check_file(path, "a JSON object")
    try:
        value = json.loads(read_text(path), parse_constant=_refuse_constant, parse_float=_finite)
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
    """Write a JSON object in the format of Hugging Face: indented by two spaces, with sorted keys and a newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A context manager that creates the directory `target` completely or not at all.

    A temporary directory beside `target` is renamed to `target` when the block ends. If the block fails, it is removed.

    Args:
        target: directory to create. It must not exist.

    Yields:
        The temporary directory to write to. Its files are synced before the rename, so that a crash of the machine
        leaves either the complete directory or none.

    Raises:
        CheckpointError: `target` exists, or its parent cannot be written.
    """
    refuse_existing(target)
    try:
        with workspace(target.parent, f".{target.name}{PARTIAL}") as partial:
            yield partial
            for path in sorted(partial.rglob("*")):
                sync(path)
            sync(partial)
            refuse_existing(target)  # rename would replace an empty directory created in the meantime
            partial.rename(target)
            sync(target.parent)
    except OSError as error:  # most often a full disk
        raise CheckpointError(f"output directory {target} cannot be created: {error}") from error


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A context manager that writes the file `target` completely or not at all.

    A temporary file is renamed to `target` when the block ends. If the block fails, it is removed.

    Args:
        target: file to create or to replace.

    Yields:
        A path on the same file system. The file is synced before the rename, so that a crash of the machine leaves
        either the complete old file or the complete new one.

    Raises:
        CheckpointError: `target` cannot be written.
    """
    try:
        with workspace(target.parent, f".{target.name}{PARTIAL}") as partial:
            fresh = partial / target.name
            yield fresh
            sync(fresh)
            fresh.replace(target)
            sync(target.parent)
    except OSError as error:  # most often a full disk
        raise CheckpointError(f"file {target} cannot be written: {error}") from error


@contextlib.contextmanager
def workspace(parent: Path, prefix: str) -> Iterator[Path]:
    """A context manager that creates a directory in `parent`. It is removed at the end, unless it was renamed.

    A killed process cannot clean up. So each directory is locked while its process lives. The next process that creates
    a directory with the same prefix removes all those that are not locked.

    Args:
        parent: directory to create it in. It is created if it does not exist.
        prefix: start of the name.

    Yields:
        The directory.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent, prefix)
    folder, handle = _locked_folder(parent, prefix)
    try:
        yield folder
    except BaseException:  # also KeyboardInterrupt
        remove_for_good(folder)
        raise
    finally:
        os.close(handle)
    shutil.rmtree(folder, ignore_errors=True)  # does nothing after a rename


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[Path]:
    """A context manager that creates a folder for temporary files, which only this user may read.

    It lies where the system has such folders, and is removed as a `workspace` is. Raises OSError.
    """
    with workspace(Path(tempfile.gettempdir()), f"{prefix}{PARTIAL}") as folder:
        folder.chmod(0o700)
        yield folder


def remove_abandoned(parent: Path, prefix: str = ".") -> None:
    """Remove the directories that killed processes left of files in `parent` whose temporary names have a prefix."""
    with contextlib.suppress(OSError):
        for path in list(parent.glob(f"{prefix}*")):
            if PARTIAL in path.name and path.is_dir():
                with contextlib.suppress(OSError), _locked(path):  # BlockingIOError: another process uses it
                    shutil.rmtree(path)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Create a directory and lock it. Return it with the handle of the lock.

    Another process may remove the directory before it is locked. Then another one is created.
    """
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
        with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as stack:
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                stack.pop_all()
                return folder, handle


def remove_for_good(path: Path) -> None:
    """Remove a directory even if a thread of a failed writer still writes to it or creates it again."""
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
    """Raise CheckpointError if `target` exists, even as a broken link."""
    if os.path.lexists(target):
        raise CheckpointError(f"output directory {target} must not exist yet; remove it or choose another name")


def sync(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_MANIFEST = "manifest.json"
_VERSION = 1
ORBAX_WEIGHTS = "weights"  # name of the folder that holds the orbax checkpoint
KINDS = ("huggingface", "orbax")
_BLOCK = 2**20  # how many bytes of a file are read at once


def write_manifest(directory: Path, kind: str) -> None:
    """Write the manifest of a complete directory of format `kind`. It lists all files except itself."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = _all_digests(paths)
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    write_json(directory / _MANIFEST, {"format": kind, "version": _VERSION, "files": files})


def kind_of(directory: Path) -> str:
    """Return the format of a checkpoint directory. Without a manifest it is "huggingface".

    Raises:
        CheckpointError: the manifest is damaged or of a newer version, or an orbax checkpoint has no manifest.
    """
    if (directory / _MANIFEST).exists():
        return str(_read(directory)["format"])
    if (directory / ORBAX_WEIGHTS).is_dir():
        raise CheckpointError(f"{directory} has {ORBAX_WEIGHTS} but no {_MANIFEST}: it was written or copied in part")
    return "huggingface"


def check_manifest(directory: Path) -> None:
    """Compare a directory with its manifest. A directory without a manifest passes.

    Raises:
        CheckpointError: files are missing, or have a different size or different bytes. The message lists all of them.
    """
    if not (directory / _MANIFEST).exists():
        return
    files = _read(directory)["files"]
    weight_files = (directory / ORBAX_WEIGHTS).rglob("*") if (directory / ORBAX_WEIGHTS).is_dir() else ()
    weights = [*directory.glob("*.safetensors"), *(path for path in weight_files if path.is_file())]
    names = [path.relative_to(directory).as_posix() for path in weights]
    problems = [f"{name}: not in the manifest" for name in names if name not in files]
    sound = []
    for name, record in files.items():
        path = directory / name
        if not _is_file(path):
            problems.append(f"{name}: missing")
        elif path.stat().st_size != record["bytes"]:
            problems.append(f"{name}: {record['bytes']} bytes when it was written, {path.stat().st_size} now")
        else:
            sound.append(name)
    if not problems:  # digests take long, so they are computed only if all other checks pass
        digests = _all_digests([directory / name for name in sound])
        for name, digest in zip(sound, digests, strict=True):
            if digest != files[name]["sha256"]:
                problems.append(f"{name}: other bytes than when it was written")
    if problems:
        shown = "\n  ".join(problems[:100])
        raise CheckpointError(
            f"{directory}: {len(problems)} file(s) do not match {_MANIFEST}:\n  {shown}\n"
            f"convert it again, or remove {_MANIFEST} if the change was meant"
        )


def _read(directory: Path) -> dict[str, Any]:
    path = directory / _MANIFEST
    manifest = read_json(path)
    if (
        manifest.get("version") != _VERSION
        or isinstance(manifest["version"], bool)
        or manifest.get("format") not in KINDS
    ):
        raise CheckpointError(
            f"{path} must be a manifest of version {_VERSION} and format {KINDS}, "
            f"got version={manifest.get('version')!r} and format={manifest.get('format')!r}"
        )
    files = manifest["files"] if isinstance(manifest.get("files"), dict) else {}
    sound = all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    )
    if not files or not sound:
        raise CheckpointError(f"{path}: files must map names to bytes and sha256")
    outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise CheckpointError(f"{path}: files must lie beside it, got {outside[0]!r}")
    return manifest


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example, the name is too long
        return False


def _all_digests(paths: list[Path]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            hasher = hashlib.sha256()
            while block := file.read(_BLOCK):
                hasher.update(block)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return hasher.hexdigest()
