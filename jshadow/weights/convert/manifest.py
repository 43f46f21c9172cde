"""The manifest of a converted checkpoint: its format, and the size and SHA-256 digest of every file."""

import concurrent.futures
import hashlib
import os
from pathlib import Path
from typing import Any

from jshadow.errors import CheckpointError
from jshadow.weights.convert.files import read_json, write_json

MANIFEST = "manifest.json"
VERSION = 1
ORBAX_WEIGHTS = "weights"  # name of the folder that holds the orbax checkpoint
KINDS = ("huggingface", "orbax")
BLOCK = 2**20  # how many bytes of a file are read at once


def write_manifest(directory: Path, kind: str) -> None:
    """Write the manifest of a complete directory of format `kind`. It lists all files except itself."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = _all_digests(paths)
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    write_json(directory / MANIFEST, {"format": kind, "version": VERSION, "files": files})


def kind_of(directory: Path) -> str:
    """Return the format of a checkpoint directory. Without a manifest it is "huggingface".

    Raises:
        CheckpointError: the manifest is damaged or of a newer version, or an orbax checkpoint has no manifest.
    """
    if (directory / MANIFEST).exists():
        return str(_read(directory)["format"])
    if (directory / ORBAX_WEIGHTS).is_dir():
        raise CheckpointError(f"{directory} has {ORBAX_WEIGHTS} but no {MANIFEST}: it was written or copied in part")
    return "huggingface"


def check_manifest(directory: Path) -> None:
    """Compare a directory with its manifest. A directory without a manifest passes.

    Raises:
        CheckpointError: files are missing, or have a different size or different bytes. The message lists all of them.
    """
    if not (directory / MANIFEST).exists():
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
            f"{directory}: {len(problems)} file(s) do not match {MANIFEST}:\n  {shown}\n"
            f"convert it again, or remove {MANIFEST} if the change was meant"
        )


def _read(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    manifest = read_json(path)
    if (
        manifest.get("version") != VERSION
        or isinstance(manifest["version"], bool)
        or manifest.get("format") not in KINDS
    ):
        raise CheckpointError(
            f"{path} must be a manifest of version {VERSION} and format {KINDS}, "
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
            while block := file.read(BLOCK):
                hasher.update(block)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return hasher.hexdigest()
