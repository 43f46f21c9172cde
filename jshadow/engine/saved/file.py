"""Files of tensors with the SHA-256 of the header and of every tensor or block of bytes, and states in several of them.

A `Place` is a slice of an array: for each axis, its first index, and its last index + 1. On a mesh, an array may have
more left rows than on one device, so that all devices have equally many. What is too long holds no data. A file
has the array as one device has it.

Several processes write a state together, in parts, each what lies beside its devices. The file of the state is then an
index. It is a safetensors file with the lengths and the token ids. Its metadata has the record of the state, a run id,
the dtype and shape of every tensor ("leaves"), and the name, the size and the SHA-256 of the header of every part
("parts"). The parts lie in a folder beside it, one for each process.

A part is a safetensors file. Each of its tensors is a slice of a tensor of the state, named by that tensor and the
first index of each axis ("layers.3.frozen.left@0.64.0"). Its metadata has the run id and the SHA-256 of every block of
`block` bytes of every slice. So a reader can check the blocks that it needs alone. All slices together are the state as
one device has it. So it can be loaded on one device and on any mesh.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshadow.engine.agree import exchange
from jshadow.engine.saved.record import read_json_text, read_leaf
from jshadow.errors import CheckpointError, DistributedError
from jshadow.weights.convert.files import PARTIAL, remove_for_good, staged_file, sync, workspace
from jshadow.weights.convert.safetensors_file import (
    DTYPES_OF_TAGS,
    TAGS,
    Layout,
    TensorFile,
    encode_header,
    write_payload,
)
from jshadow.weights.digest import canonical, host_array, raw_bytes, sha256

Place = tuple[tuple[int, int], ...]


def place_of(index: Sequence[slice], shape: Sequence[int]) -> Place:
    """Return the slice that an index of a shard stands for, in an array of this shape."""
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
    )


def whole(shape: Sequence[int]) -> Place:
    """Return the slice that is a whole array."""
    return tuple((0, size) for size in shape)


def sizes(place: Place) -> tuple[int, ...]:
    """Return the shape of a slice."""
    return tuple(max(0, last - first) for first, last in place)


def common(one: Place, other: Place) -> Place:
    """Return what two slices have in common. One of its sizes is 0 if that is nothing."""
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True))


def within(place: Place, outer: Place) -> tuple[slice, ...]:
    """Return the index of a slice in an array that holds the slice `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(place, outer, strict=True))


def cut(place: Place, shape: Sequence[int]) -> Place:
    """Return the part of a slice that lies inside an array of this shape."""
    return common(place, whole(shape))


def padded(place: Place, shape: Sequence[int], dtype: Any, read: Callable[[Place], np.ndarray]) -> np.ndarray:
    """Return a slice of an array that is longer than the one of which `read` returns slices. Zeros follow its end."""
    inside = cut(place, shape)
    if inside == place:
        return read(place)
    out = np.zeros(sizes(place), dtype)
    if math.prod(sizes(inside)):
        out[within(inside, place)] = read(inside)
    return out


def without_zeros(value: np.ndarray) -> tuple[int, ...]:
    """Return the shape of an array without the zeros at the end of one axis: of that by which it gets smallest.

    At least one index of the axis stays. A number counts as zero if all of its bits are 0, so that `padded` gives back
    the same bits. Each axis costs at most one pass over the array.
    """
    numbers = value.view(f"u{value.dtype.itemsize}")
    kept = list(value.shape)
    for axis, size in enumerate(value.shape if value.size else ()):
        slices = np.moveaxis(numbers, axis, 0)
        low, high = 1, size  # all slices from `high` on are zero, and `low` of them stay at least
        if slices[-1].any():
            continue
        while low < high:
            middle = (low + high) // 2
            if slices[middle:high].any():
                low = middle + 1
            else:
                high = middle
        kept[axis] = high
    shapes = [(*value.shape[:axis], kept[axis], *value.shape[axis + 1 :]) for axis in range(value.ndim)]
    return min(shapes, key=math.prod, default=())


def runs(place: Place, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of numbers of a slice in an array of this shape, in C order: the first of each, and how many."""
    counts = sizes(place)
    if not math.prod(counts):
        return
    inner = len(shape)  # the axes from here on are whole, so a run goes over them
    while inner > 0 and counts[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    outer = max(0, inner - 1)
    length = math.prod(counts[outer:])
    base = sum(first * stride for (first, _), stride in zip(place, strides, strict=True))
    for index in np.ndindex(*counts[:outer]):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


_BLOCK = 2**22  # bytes of a block


def block_digests(value: np.ndarray, block: int) -> list[str]:
    """Return the SHA-256 of each block of a tensor in C order. The last block may be shorter."""
    content = raw_bytes(value)
    return [sha256(content[start : start + block]) for start in range(0, len(content), block)]


def read_slice(
    file: TensorFile, name: str, place: Place, digests: Sequence[str] | None = None, block: int = _BLOCK
) -> np.ndarray:
    """Read a slice of a tensor, and only the bytes or blocks of the file in which it lies.

    The SHA-256 of each block is compared. With `digests` of None, only the bytes of the slice are read.
    """
    dtype, shape = DTYPES_OF_TAGS[file.tags[name]], file.shapes[name]
    out = np.empty(sizes(place), dtype)
    target, done, number, held = raw_bytes(out), 0, -1, memoryview(b"")
    total = math.prod(shape) * dtype.itemsize
    with file.bytes_of(name) as read:
        for first, count in runs(place, shape):
            start, end = first * dtype.itemsize, (first + count) * dtype.itemsize
            while start < end:
                if digests is None:
                    piece = memoryview(read(start, end))
                else:
                    wanted = start // block
                    low, high = wanted * block, min(total, (wanted + 1) * block)
                    if wanted != number:
                        number, held = wanted, memoryview(read(low, high))
                        if sha256(held) != digests[wanted]:
                            raise CheckpointError(
                                f"{file.path} is damaged: bytes {low} to {high} of {name} do not have the SHA-256 that "
                                "the header gives"
                            )
                    piece = held[start - low : min(end, high) - low]
                target[done : done + len(piece)] = piece
                done, start = done + len(piece), start + len(piece)
    return out


_THREADS = 4  # number of threads that read and hash; both release Python's global lock


def header_digest(texts: Mapping[str, str], table: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Return the SHA-256 of the parsed header: the metadata `texts`, and the dtype tag and shape of each tensor.

    Offsets are left out. They follow from the sizes, because the format allows no gap and no overlap.
    """
    return sha256(canonical({"metadata": dict(texts), "tensors": {name: list(entry) for name, entry in table.items()}}))


def open_described(
    path: Path, kind: str, versions: Mapping[str, Sequence[int]]
) -> tuple[TensorFile, dict[str, str], dict[str, Any]]:
    """Open a file of one of these formats and versions, and check its header. An error names the file as `kind`.

    Return the file, its metadata texts, and the SHA-256 of each tensor, or a list of one for each block of it.
    """
    file = TensorFile(path, kind)
    texts = dict(file.metadata)
    known = versions.get(texts.get("format", ""))
    if known is None:
        raise CheckpointError(f"{path} must be {kind}, got a safetensors file of format {texts.get('format')!r:.80}")
    with described(path, kind):
        number = read_json_text(texts, "version")
        if number not in known:
            told = " and ".join(map(str, known))
            raise CheckpointError(f"{path} is of format version {number}; this jshadow understands version {told}")
        recorded = texts.pop("header_sha256", None)
        if recorded != header_digest(texts, {name: (file.tags[name], shape) for name, shape in file.shapes.items()}):
            raise CheckpointError(f"{path} is damaged: its header does not have the SHA-256 that it gives")
        digests = read_json_text(texts, "sha256")
        if not isinstance(digests, dict) or digests.keys() != file.shapes.keys():
            raise ValueError("sha256 must have one digest for each tensor")
    return file, texts, digests


@contextlib.contextmanager
def described(path: Path, kind: str) -> Iterator[None]:
    """Turn errors of reading metadata into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} must be {kind}, got metadata that does not fit: {error}") from error


def read_checked(file: TensorFile, name: str, digests: Mapping[str, str] | None) -> np.ndarray:
    """Read a tensor of the file, and compare its SHA-256 with that in `digests`, unless these are None."""
    value = file.read(name)
    if digests is not None and sha256(raw_bytes(value)) != digests[name]:
        raise CheckpointError(f"{file.path} is damaged: {name} does not have the SHA-256 that the header gives")
    return value


def read_all(
    file: TensorFile, digests: Mapping[str, str] | None, spare: int, always: Sequence[str]
) -> dict[str, np.ndarray]:
    """Read every tensor of a file, in a few threads, and check it. Return those that fit into memory.

    In the order of the file, each tensor that still fits into `spare` bytes is returned, and those in `always`. The
    others are only read and checked. With `digests` of None, nothing is checked.
    """
    kept: dict[str, np.ndarray] = {}
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    names = iter(file.shapes)
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            while True:
                # At most one tensor for each thread is in flight, so that little memory is taken beside `kept`.
                for name in itertools.islice(names, _THREADS - len(waiting)):
                    waiting.append((name, pool.submit(read_checked, file, name, digests)))
                if not waiting:
                    return kept
                name, result = waiting.popleft()
                value = result.result()
                if value.nbytes <= spare or name in always:
                    kept[name] = value
                    spare -= value.nbytes
        finally:
            pool.shutdown(cancel_futures=True)


_UNKNOWN = "0" * 64  # the placeholder of a digest until its tensor is written


def write_hashed(
    path: Path, layout: Layout, texts: Mapping[str, str], read: Callable[[str], np.ndarray], block: int | None = None
) -> tuple[int, str]:
    """Write a file, reading one tensor at a time in C order. Return its bytes, and the SHA-256 of its header.

    "sha256" and "header_sha256" are added to the metadata `texts`. Without `block`, "sha256" has one digest for each
    tensor. Otherwise it has a list with one for each block of so many bytes.
    """
    digests: dict[str, Any] = {}
    for name, (dtype, shape) in layout.items():
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        digests[name] = _UNKNOWN if block is None else [_UNKNOWN] * -(-nbytes // block)
    table = {name: (TAGS[dtype], shape) for name, (dtype, shape) in layout.items()}

    def hashed(name: str) -> np.ndarray:
        value = read(name)
        digests[name] = sha256(raw_bytes(value)) if block is None else block_digests(value, block)
        return value

    def all_texts() -> dict[str, str]:
        known = {**texts, "sha256": canonical(digests).decode()}
        return known | {"header_sha256": header_digest(known, table)}

    with path.open("wb") as file:
        file.write(encode_header(layout, all_texts()))
        write_payload(file, layout, hashed)
        size = file.tell()
        file.seek(0)
        known = all_texts()
        file.write(encode_header(layout, known))  # as long as before
    return size, known["header_sha256"]


# States in parts

INDEX_FORMAT, INDEX_VERSION = "jshadow KV state in parts", 1
PART_FORMAT, PART_VERSION = "jshadow part of a KV state", 1
_PART_KIND = "a part of a saved KV state (safetensors)"
_PARTS = ".parts-"  # between the name of an index and its run id in the name of the folder


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
            file, texts, digests = open_described(path, _PART_KIND, {PART_FORMAT: [PART_VERSION]})
        except CheckpointError as error:
            raise CheckpointError(f"{which}: {error}") from error
        with described(path, _PART_KIND):
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


_SECONDS = 3600.0  # a process may write or read its part for so long


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
    answers = [json.loads(text) for text in exchange(name, json.dumps(answer), _SECONDS)]
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
                final = target.with_name(f"{target.name}{_PARTS}{run}")
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
    texts = {"format": PART_FORMAT, "version": str(PART_VERSION), "run": canonical(run).decode(), "block": str(_BLOCK)}
    size, digest = write_hashed(path, layout, texts, lambda name: pieces[name][2](), _BLOCK)
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
        if folder.parent == target.parent and _PARTS in folder.name:
            remove_for_good(folder)
