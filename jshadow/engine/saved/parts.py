"""A saved state in parts, which several processes write together, each what lies beside its devices.

The file of the state is then an index. It is a safetensors file with the lengths and the token ids. Its metadata has
the record of the state, a run id, the dtype and shape of every tensor ("leaves"), and the name, the size and the
SHA-256 of the header of every part ("parts"). The parts lie in a folder beside it, one for each process.

A part is a safetensors file. Each of its tensors is a slice of a tensor of the state, named by that tensor and the
first index of each axis ("layers.3.frozen.left@0.64.0"). Its metadata has the run id and the SHA-256 of every block of
`block` bytes of every slice. So a reader can check the blocks that it needs alone.

All slices together are the state as one device has it. So it can be loaded on one device and on any mesh.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshadow.engine.saved.blocks import read_slice
from jshadow.engine.saved.file import described, open_described
from jshadow.engine.saved.record import read_json_text
from jshadow.engine.saved.slices import Place, common, sizes, whole, within
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import DTYPES_OF_TAGS, TAGS, TensorFile

INDEX_FORMAT, INDEX_VERSION = "jshadow KV state in parts", 1
PART_FORMAT, PART_VERSION = "jshadow part of a KV state", 1
PART_KIND = "a part of a saved KV state (safetensors)"
PARTS = ".parts-"  # between the name of an index and its run id in the name of the folder


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


def read_leaves(index: TensorFile) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the format's dtype name and the shape of every tensor of a state in parts.

    Raises:
        ValueError: the index does not have them as jshadow writes them.
    """
    leaves = read_json_text(index.metadata, "leaves")
    good = isinstance(leaves, dict) and all(
        isinstance(leaf, list)
        and len(leaf) == 2
        and leaf[0] in TAGS
        and isinstance(leaf[1], list)
        and all(type(size) is int and 0 <= size < 2**31 for size in leaf[1])
        for leaf in leaves.values()
    )
    if not good:
        raise ValueError(f"leaves must have a dtype and a shape for each tensor, got {leaves!r:.80}")
    return {name: (TAGS[dtype], tuple(shape)) for name, (dtype, shape) in leaves.items()}


class Slice(NamedTuple):
    """A slice of a tensor of a state, as a part has it.

    Attributes:
        file: the part.
        name: its tensor.
        digests: the SHA-256 of each of its blocks.
        block: bytes of a block.
    """

    file: TensorFile
    name: str
    digests: list[str]
    block: int

    def read(self, place: Place, outer: Place) -> np.ndarray:
        """Read a slice of the state's tensor, which lies in this slice `outer` of it."""
        inside = tuple((a - c, b - c) for (a, b), (c, _) in zip(place, outer, strict=True))
        return read_slice(self.file, self.name, inside, self.digests, self.block)


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
            leaves = read_leaves(index)
        self.shapes = {name: shape for name, (_, shape) in leaves.items()}
        self.tags = {name: tag for name, (tag, _) in leaves.items()}
        self.slices: dict[str, list[tuple[Place, Slice]]] = {name: [] for name in leaves}
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
                self.slices[name].append((place, Slice(file, piece, digests[piece], block)))

    def read(self, name: str, place: Place) -> np.ndarray:
        """Read a slice of a tensor of the state, and check the blocks in which it lies.

        Raises:
            CheckpointError: a part cannot be read, or a block is damaged.
        """
        parts = [(common(place, outer), outer, held) for outer, held in self.slices[name]]
        parts = [(inside, outer, held) for inside, outer, held in parts if all(sizes(inside))]
        if len(parts) == 1 and parts[0][0] == place:
            return parts[0][2].read(place, parts[0][1])
        out = np.empty(sizes(place), DTYPES_OF_TAGS[self.tags[name]])
        for inside, outer, held in parts:
            out[within(inside, place)] = held.read(inside, outer)
        return out
