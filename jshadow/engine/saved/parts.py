"""A saved state in parts, which several processes write together, each what lies beside its devices.

The file of the state is then an index. It is a safetensors file with the lengths and the token ids. Its metadata has
the record of the state, a run id, the dtype and shape of every tensor ("leaves"), and the name, the size and the
SHA-256 of the header of every part ("parts"). The parts lie in a folder beside it, one for each process.

A part is a safetensors file. Each of its tensors is a slice of a tensor of the state, named by that tensor and the
first index of each axis ("layers.3.frozen.left@0.64.0"). Its metadata has the run id and the SHA-256 of every block of
`block` bytes of every slice. So a reader can check the blocks that it needs alone.

All slices together are the state as one device has it. So it can be loaded on one device and on any mesh.
"""

import contextlib
import functools
import math
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshadow.engine.saved.blocks import BLOCK, read_slice
from jshadow.engine.saved.file import described, open_described
from jshadow.engine.saved.layout import Split
from jshadow.engine.saved.record import read_json_text
from jshadow.engine.saved.slices import Place, common, sizes, whole, within
from jshadow.engine.saved.together import together
from jshadow.engine.saved.write import write_hashed
from jshadow.errors import CheckpointError, DistributedError
from jshadow.weights.convert.files import remove_for_good, staged_file, sync, workspace
from jshadow.weights.convert.safetensors_file import DTYPES_OF_TAGS, TAGS, TensorFile
from jshadow.weights.digest import canonical, host_array

INDEX_FORMAT, INDEX_VERSION = "jshadow KV state in parts", 1
PART_FORMAT, PART_VERSION = "jshadow part of a KV state", 1
PART_KIND = "a part of a saved KV state (safetensors)"
PARTS = ".parts-"  # between the name of an index and its run id in the name of the folder


# Writing


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
                folder = stack.enter_context(workspace(target.parent, f".{target.name}.partial-"))
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
                try:
                    with replacing(target), staged_file(target) as fresh:
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


# Reading


def part_paths(index: TensorFile) -> list[Path]:
    """Return the files of the parts of a state, or [] if it is stored in one file.

    Raises:
        CheckpointError: the index does not name them as jshadow does.
    """
    if index.metadata.get("format") != INDEX_FORMAT:
        return []
    with described(index.path, "an index of parts"):
        return [index.path.parent / name for name in (entry["file"] for entry in read_entries(index))]


def read_entries(index: TensorFile) -> list[dict[str, Any]]:
    """Return the table of parts of an index. Raises ValueError if it is not as jshadow writes it."""
    entries = read_json_text(index.metadata, "parts")
    good = isinstance(entries, list) and all(
        isinstance(entry, dict)
        and [type(entry.get(name)) for name in ("file", "bytes", "header_sha256")] == [str, int, str]
        and len(Path(entry["file"]).parts) == 2
        and ".." not in Path(entry["file"]).parts
        and not Path(entry["file"]).is_absolute()
        for entry in entries
    )
    if not good or not entries:
        raise ValueError(f"parts must be a list of files in a folder beside the index, got {entries!r:.80}")
    return entries


class Parts:
    """The tensors of a state in parts. The headers of all parts are read and checked.

    Attributes:
        shapes: tensor name -> shape, with those of the index.
        tags: tensor name -> the format's name of its dtype, such as "BF16".

    Raises:
        CheckpointError: a part is missing, damaged, or of another run.
    """

    def __init__(self, index: TensorFile) -> None:
        """Open the parts of a state. The header of its index was checked."""
        self.path = index.path
        with described(index.path, "an index of parts"):
            entries, run = read_entries(index), read_json_text(index.metadata, "run")
            leaves = read_json_text(index.metadata, "leaves")
            self.shapes = {name: tuple(shape) for name, (_, shape) in leaves.items()}
            self.tags = {name: TAGS[dtype] for name, (dtype, _) in leaves.items()}
        self.slices: dict[str, list[tuple[Place, TensorFile, str, list[str], int]]] = {name: [] for name in leaves}
        for number, entry in enumerate(entries):
            self._open(index.path.parent / entry["file"], entry, run, f"part {number} of {len(entries)}")
        for name, shape in self.shapes.items():
            numbers = sum(math.prod(sizes(place)) for place, *_ in self.slices[name])
            if numbers != math.prod(shape) and name not in index.shapes:
                raise CheckpointError(f"{self.path}: the parts must have {math.prod(shape)} of {name}, got {numbers}")

    def _open(self, path: Path, entry: Mapping[str, Any], run: str, which: str) -> None:
        try:
            file, texts, digests = open_described(path, PART_KIND, {PART_FORMAT: PART_VERSION})
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {which}: {error}") from error
        with described(path, PART_KIND):
            theirs, block = read_json_text(texts, "run"), read_json_text(texts, "block")
            if theirs != run:
                raise CheckpointError(
                    f"{self.path}: {which}: {path} must be of run {run!r:.40}, got run {theirs!r:.40}"
                )
            if file.metadata["header_sha256"] != entry["header_sha256"]:
                raise CheckpointError(f"{self.path}: {which}: {path} must have the header_sha256 of the index")
            if type(block) is not int or block < 1:
                raise ValueError(f"block must be a number of bytes, got {block!r:.40}")
            for piece, shape in file.shapes.items():
                name, firsts = piece.rsplit("@", 1)
                starts = [int(first) for first in firsts.split(".") if first]
                place = tuple((first, first + size) for first, size in zip(starts, shape, strict=True))
                outside = common(place, whole(self.shapes[name])) != place
                if outside or file.tags[piece] != self.tags[name]:
                    raise ValueError(f"{piece} must lie in {name}")
                self.slices[name].append((place, file, piece, digests[piece], block))

    def read(self, name: str, place: Place) -> np.ndarray:
        """Read a slice of a tensor of the state, and check the blocks in which it lies.

        Raises:
            CheckpointError: a part cannot be read, or a block is damaged.
        """
        parts = []
        for outer, *where in self.slices[name]:
            inside = common(place, outer)
            if all(sizes(inside)):
                parts.append((inside, outer, where))
        if len(parts) == 1 and parts[0][0] == place:
            return self._read_part(*parts[0])
        out = np.empty(sizes(place), DTYPES_OF_TAGS[self.tags[name]])
        for inside, outer, where in parts:
            out[within(inside, place)] = self._read_part(inside, outer, where)
        return out

    @staticmethod
    def _read_part(inside: Place, outer: Place, where: Any) -> np.ndarray:
        file, piece, digests, block = where
        first = tuple((a - c, b - c) for (a, b), (c, _) in zip(inside, outer, strict=True))
        return read_slice(file, piece, first, digests, block)
