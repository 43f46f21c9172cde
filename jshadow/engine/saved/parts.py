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
import dataclasses
import functools
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshadow.engine.agree import exchange
from jshadow.engine.saved.file import (
    BLOCK,
    Place,
    common,
    cut,
    described,
    open_described,
    place_of,
    read_slice,
    sizes,
    whole,
    within,
    write_hashed,
)
from jshadow.engine.saved.record import read_json_text, read_leaf
from jshadow.errors import CheckpointError, DistributedError
from jshadow.weights.convert.files import PARTIAL, remove_for_good, staged_file, sync, workspace
from jshadow.weights.convert.safetensors_file import DTYPES_OF_TAGS, TAGS, TensorFile
from jshadow.weights.digest import canonical, host_array

INDEX_FORMAT, INDEX_VERSION = "jshadow KV state in parts", 1
PART_FORMAT, PART_VERSION = "jshadow part of a KV state", 1
PART_KIND = "a part of a saved KV state (safetensors)"
PARTS = ".parts-"  # between the name of an index and its run id in the name of the folder


def part_paths(index: TensorFile) -> list[Path]:
    """Return the files of the parts of a state, or [] if it is stored in one file."""
    if index.metadata.get("format") != INDEX_FORMAT:
        return []
    with described(index.path, "an index of parts"):
        return [index.path.parent / name for name in (entry["file"] for entry in _read_entries(index))]


def _read_entries(index: TensorFile) -> list[dict[str, Any]]:
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


@dataclasses.dataclass(frozen=True)
class Split:
    """An array that is split over devices, as a file has it. `parts` are the slices that this process writes.

    Each comes with its array. Together, the processes have every number once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[Place, Any], ...]

    @classmethod
    def of(cls, array: jax.Array, shape: tuple[int, ...]) -> "Split":
        """Return an array of a mesh, without what follows the end of an array of this shape."""
        parts = []
        for shard in array.addressable_shards:
            outer = place_of(shard.index, array.shape)
            place = cut(outer, shape)
            if shard.replica_id == 0 and all(sizes(place)):
                parts.append((outer, shard.data))
        return cls(shape, np.dtype(array.dtype), tuple(parts))

    def pieces(self) -> list[tuple[Place, Callable[[], np.ndarray]]]:
        """Return the slices that this process writes, and for each a function that copies it to the host."""
        return [(cut(outer, self.shape), functools.partial(self.read, outer, data)) for outer, data in self.parts]

    def read(self, outer: Place, data: Any) -> np.ndarray:
        """Copy one of `parts` to the host, in C order, without what follows the end of the array."""
        return np.asarray(host_array(data)[within(cut(outer, self.shape), outer)], order="C")

    def on_host(self) -> np.ndarray:
        """Copy the whole array to the host. This process must have all slices."""
        out = np.empty(self.shape, self.dtype)
        for place, read in self.pieces():
            out[within(place, whole(self.shape))] = read()
        return out

    def copied(self, copy: Callable[[Any], Any]) -> "Split":
        """Return the array with a copy of each part."""
        return dataclasses.replace(self, parts=tuple((place, copy(data)) for place, data in self.parts))


class Parts:
    """The tensors of a state in parts, whose index was checked. The headers of all parts are read and checked."""

    def __init__(self, index: TensorFile) -> None:
        self.path = index.path
        with described(index.path, "an index of parts"):
            entries, run = _read_entries(index), read_json_text(index.metadata, "run")
            told = "leaves must have a dtype and a shape for each tensor"
            table = read_json_text(index.metadata, "leaves")
            if not isinstance(table, dict):
                raise ValueError(f"{told}, got {table!r:.80}")
            leaves = {name: read_leaf(leaf, told) for name, leaf in table.items()}
        self.shapes = {name: leaf.shape for name, leaf in leaves.items()}
        self.tags = {name: TAGS[leaf.dtype.name] for name, leaf in leaves.items()}
        self.slices: dict[str, list[tuple[Place, Callable[[Place], np.ndarray]]]] = {name: [] for name in leaves}
        for number, entry in enumerate(entries):
            self._open(index.path.parent / entry["file"], entry, run, f"{index.path}: part {number} of {len(entries)}")
        for name, shape in self.shapes.items():
            numbers = sum(math.prod(sizes(place)) for place, _ in self.slices[name])
            if numbers != math.prod(shape) and name not in index.shapes:
                raise CheckpointError(f"{self.path}: the parts must have {math.prod(shape)} of {name}, got {numbers}")

    def _open(self, path: Path, entry: Mapping[str, Any], run: str, which: str) -> None:
        """Open a part and check its header. `which` names it in error messages."""
        try:
            file, texts, digests = open_described(path, PART_KIND, {PART_FORMAT: PART_VERSION})
        except CheckpointError as error:
            raise CheckpointError(f"{which}: {error}") from error
        with described(path, PART_KIND):
            theirs, block = read_json_text(texts, "run"), read_json_text(texts, "block")
            if theirs != run:
                raise CheckpointError(f"{which}: {path} must be of run {run!r:.40}, got {theirs!r:.40}")
            if file.metadata["header_sha256"] != entry["header_sha256"]:
                raise CheckpointError(f"{which}: {path} must have the header_sha256 that the index gives")
            if type(block) is not int or block < 1:
                raise ValueError(f"block must be a number of bytes, got {block!r:.40}")
            for piece, shape in file.shapes.items():
                name, _, firsts = piece.rpartition("@")
                starts = [int(first) for first in firsts.split(".") if first]
                place = tuple((first, first + size) for first, size in zip(starts, shape, strict=True))
                outer, nbytes = self.shapes.get(name), math.prod(shape) * DTYPES_OF_TAGS[file.tags[piece]].itemsize
                if outer is None or file.tags[piece] != self.tags[name] or common(place, whole(outer)) != place:
                    raise ValueError(f"{piece} must be a slice of a tensor of the state")
                if not isinstance(digests[piece], list) or len(digests[piece]) != -(-nbytes // block):
                    raise ValueError(f"sha256 must have a digest for each block of {piece}")
                read = functools.partial(read_slice, file, piece, digests=digests[piece], block=block)
                self.slices[name].append((place, read))

    def read(self, name: str, place: Place) -> np.ndarray:
        """Read a slice of a tensor of the state, and check the blocks in which it lies."""
        found = [(common(place, outer), outer, read) for outer, read in self.slices[name]]
        parts = [
            (inside, read(tuple((a - c, b - c) for (a, b), (c, _) in zip(inside, outer, strict=True))))
            for inside, outer, read in found
            if all(sizes(inside))
        ]
        if len(parts) == 1 and parts[0][0] == place:
            return parts[0][1]
        out = np.empty(sizes(place), DTYPES_OF_TAGS[self.tags[name]])
        for inside, value in parts:
            out[within(inside, place)] = value
        return out


SECONDS = 3600.0  # a process may write or read its part for so long


def together(name: str, work: Callable[[], Any]) -> list[Any]:
    """Do some work in every process, and return the value of each, which JSON can express.

    The work runs no program on several devices. If it fails in one process, it fails in all of them.
    """
    failure: Exception | None = None
    answer: dict[str, Any] = {}
    try:
        answer["value"] = work()
    except Exception as error:
        failure, answer["error"] = error, f"{type(error).__name__}: {error}"
    answers = [json.loads(text) for text in exchange(name, json.dumps(answer), SECONDS)]
    if failure is not None:
        raise failure
    for number, one in enumerate(answers):
        if "error" in one:
            raise CheckpointError(f"{name}: process {number} of {len(answers)} failed: {one['error']}")
    return [one["value"] for one in answers]


def write_parts(target: Path, texts: Mapping[str, str], leaves: Mapping[str, Any], named: frozenset[str]) -> int:
    """Write the part of this process, and as process 0 the index. All processes must call this. Return all bytes.

    `leaves` has a `Split`, or an array that all processes have, for each tensor. `named` has the names of those in the
    index. If a process fails, all of them do, no file is left, and an old state at the target stays as it was.
    """
    doing, first = f"saving {target.name}", jax.process_index() == 0

    def all_do(work: Callable[[], Any]) -> list[Any]:
        def checked() -> Any:
            try:
                return work()
            except OSError as error:  # most often a full disk, or a directory that only one process has
                raise CheckpointError(
                    f"file {target} cannot be written in parts by {jax.process_count()} processes, which must share "
                    f"its directory: {error}"
                ) from error

        return together(doing, checked)

    try:
        with contextlib.ExitStack() as stack:

            def begin() -> list[str]:
                if not first:
                    return []
                folder = stack.enter_context(workspace(target.parent, f".{target.name}{PARTIAL}"))
                return [secrets.token_hex(16), folder.name]

            def write() -> dict[str, Any]:
                name = f"{jax.process_index()}-of-{jax.process_count()}.safetensors"
                return write_part(target.parent / folder / name, run, leaves, named)

            def commit() -> int:
                if not first:
                    return 0
                final = target.with_name(f"{target.name}{PARTS}{run}")
                table = [{**part, "file": f"{final.name}/{part['file']}"} for part in parts]
                sync(target.parent / folder)
                (target.parent / folder).rename(final)
                with replacing(target):
                    try:
                        with staged_file(target) as fresh:
                            return _write_index(fresh, texts, {"run": run, "parts": table}, leaves, named)
                    except BaseException:
                        remove_for_good(final)
                        raise

            run, folder = all_do(begin)[0]
            parts = all_do(write)
            size: int = all_do(commit)[0]
    except DistributedError:
        raise
    except Exception:
        together(f"{doing}: removing the parts", lambda: None)  # no process goes on before they are removed
        raise
    return size + sum(part["bytes"] for part in parts)


def _write_index(
    path: Path, texts: Mapping[str, str], own: dict[str, Any], leaves: Mapping[str, Any], named: frozenset[str]
) -> int:
    """Write the index of a state, whose metadata has also `own` and the table of leaves. Return its bytes."""
    known = {name: [np.dtype(leaf.dtype).name, list(leaf.shape)] for name, leaf in leaves.items()}
    more = {name: canonical(value).decode() for name, value in (own | {"leaves": known}).items()}
    layout = {name: (dtype, tuple(shape)) for name, (dtype, shape) in known.items() if name in named}
    everything = {**texts, **more, "format": INDEX_FORMAT, "version": str(INDEX_VERSION)}
    return write_hashed(path, layout, everything, lambda name: host_array(leaves[name]))[0]


def write_part(path: Path, run: str, leaves: Mapping[str, Any], named: frozenset[str]) -> dict[str, Any]:
    """Write the slices of this process to a file, and return the entry of the index for it."""
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
    """Remove the parts of the saved state at the target, if the block, which replaces it, succeeds."""
    old: list[Path] = []
    if target.is_file():
        with contextlib.suppress(CheckpointError):
            old = part_paths(TensorFile(target))
    yield
    for folder in {path.parent for path in old}:
        if folder.parent == target.parent and PARTS in folder.name:
            remove_for_good(folder)
