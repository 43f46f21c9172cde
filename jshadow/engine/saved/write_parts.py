"""Writing a saved state in parts (`parts.py`): completely or not at all, by several processes together."""

import contextlib
import functools
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshadow.engine.saved.blocks import BLOCK
from jshadow.engine.saved.layout import Split
from jshadow.engine.saved.parts import (
    INDEX_FORMAT,
    INDEX_VERSION,
    PART_FORMAT,
    PART_VERSION,
    PARTS,
    part_paths,
)
from jshadow.engine.saved.slices import sizes, whole
from jshadow.engine.saved.together import together
from jshadow.engine.saved.write import write_hashed
from jshadow.errors import CheckpointError, DistributedError
from jshadow.weights.convert.files import PARTIAL, remove_for_good, staged_file, sync, workspace
from jshadow.weights.convert.safetensors_file import TensorFile
from jshadow.weights.digest import canonical, host_array


def write_parts(target: Path, texts: Mapping[str, str], leaves: Mapping[str, Any], named: frozenset[str]) -> int:
    """Write the part of this process, and as process 0 the index. All processes must call this.

    Args:
        target: the index, in a directory that all processes share.
        texts: metadata of the index.
        leaves: tensors by name, in the order of the files: a `Split`, or an array that all processes have.
        named: names of tensors that the index holds.

    Returns:
        The bytes of the index and of all parts.

    Raises:
        CheckpointError: a file cannot be written, in this process or in another. No file is left, and an old state at
            the target stays as it was.
        DistributedError: another process did not come.
    """
    doing = f"saving {target.name}"
    try:
        with contextlib.ExitStack() as stack:

            def begin() -> list[str]:
                if jax.process_index() != 0:
                    return []
                folder = stack.enter_context(workspace(target.parent, f".{target.name}{PARTIAL}"))
                return [secrets.token_hex(16), folder.name]

            def write() -> dict[str, Any]:
                name = f"{jax.process_index()}-of-{jax.process_count()}.safetensors"
                return write_part(target.parent / folder / name, run, leaves, named)

            def commit() -> int:
                if jax.process_index() != 0:
                    return 0
                final = target.with_name(f"{target.name}{PARTS}{run}")
                table = [{**part, "file": f"{final.name}/{part['file']}"} for part in parts]
                sync(target.parent / folder)
                (target.parent / folder).rename(final)
                with replacing(target):
                    try:
                        with staged_file(target) as fresh:
                            return write_index(fresh, {**texts, **part_texts(run, table, leaves)}, leaves, named)
                    except BaseException:
                        remove_for_good(final)
                        raise

            run, folder = together(doing, written(target, begin))[0]
            parts = together(doing, written(target, write))
            size: int = together(doing, written(target, commit))[0]
    except DistributedError:
        raise
    except Exception:
        together(f"{doing}: removing the parts", lambda: None)  # no process goes on before they are removed
        raise
    return size + sum(part["bytes"] for part in parts)


def part_texts(run: str, table: Any, leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata that only an index has."""
    known = {name: [np.dtype(leaf.dtype).name, list(leaf.shape)] for name, leaf in leaves.items()}
    own = {"run": run, "parts": table, "leaves": known}
    texts = {name: canonical(value).decode() for name, value in own.items()}
    return texts | {"format": INDEX_FORMAT, "version": str(INDEX_VERSION)}


def write_index(path: Path, texts: Mapping[str, str], leaves: Mapping[str, Any], named: frozenset[str]) -> int:
    """Write the index of a state, and return its bytes. Raises OSError if it cannot be written."""
    layout = {name: (np.dtype(leaf.dtype).name, tuple(leaf.shape)) for name, leaf in leaves.items() if name in named}
    return write_hashed(path, layout, texts, lambda name: host_array(leaves[name]))[0]


def written(target: Path, work: Any) -> Any:
    """Return `work` with errors of the operating system turned into a CheckpointError."""

    def checked() -> Any:
        try:
            return work()
        except OSError as error:  # most often a full disk, or a directory that only one process has
            raise CheckpointError(
                f"file {target} cannot be written in parts by {jax.process_count()} processes, which must share its "
                f"directory: {error}"
            ) from error

    return checked


def write_part(path: Path, run: str, leaves: Mapping[str, Any], named: frozenset[str]) -> dict[str, Any]:
    """Write the slices of this process to a file, and return the entry of the index for it.

    Raises:
        OSError: the file cannot be written.
    """
    pieces = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Split):
            slices = leaf.pieces()
        elif name in named or jax.process_index() != 0:
            slices = []
        else:
            slices = [(whole(leaf.shape), functools.partial(host_array, leaf))]
        for place, read in slices:
            dtype = np.dtype(leaf.dtype).name
            pieces[f"{name}@{'.'.join(str(first) for first, _ in place)}"] = (dtype, sizes(place), read)
    layout = {name: (dtype, shape) for name, (dtype, shape, _) in pieces.items()}
    texts = {"format": PART_FORMAT, "version": str(PART_VERSION), "run": canonical(run).decode(), "block": str(BLOCK)}
    size, digest = write_hashed(path, layout, texts, lambda name: pieces[name][2](), BLOCK)
    sync(path)
    return {"file": path.name, "bytes": size, "header_sha256": digest}


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[None]:
    """A context manager that replaces a saved state. At its end, the parts of the old one are removed."""
    old: list[Path] = []
    if target.is_file():
        with contextlib.suppress(CheckpointError):
            old = part_paths(TensorFile(target))
    yield
    for folder in {path.parent for path in old}:
        if folder.parent == target.parent and PARTS in folder.name:
            remove_for_good(folder)
