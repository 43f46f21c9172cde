"""Files of tensors with the SHA-256 of the header and of every tensor or block of bytes: how they are written and read.

A `Place` is a slice of an array: for each axis, its first index, and its last index + 1. On a mesh, an array may have
more left rows than on one device, so that all devices have equally many. What is too long holds no data. A file
has the array as one device has it."""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.engine.saved.record import read_json_text
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import (
    DTYPES_OF_TAGS,
    TAGS,
    Layout,
    TensorFile,
    encode_header,
    write_payload,
)
from jshadow.weights.digest import canonical, raw_bytes, sha256

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


BLOCK = 2**22  # bytes of a block


def block_digests(value: np.ndarray, block: int) -> list[str]:
    """Return the SHA-256 of each block of a tensor in C order. The last block may be shorter."""
    content = raw_bytes(value)
    return [sha256(content[start : start + block]) for start in range(0, len(content), block)]


def read_slice(
    file: TensorFile, name: str, place: Place, digests: Sequence[str] | None = None, block: int = BLOCK
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


THREADS = 4  # number of threads that read and hash; both release Python's global lock


def header_digest(texts: Mapping[str, str], table: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Return the SHA-256 of the parsed header: the metadata `texts`, and the dtype tag and shape of each tensor.

    Offsets are left out. They follow from the sizes, because the format allows no gap and no overlap.
    """
    return sha256(canonical({"metadata": dict(texts), "tensors": {name: list(entry) for name, entry in table.items()}}))


def open_described(
    path: Path, kind: str, versions: Mapping[str, int]
) -> tuple[TensorFile, dict[str, str], dict[str, Any]]:
    """Open a file of one of these formats and versions, and check its header. An error names the file as `kind`.

    Return the file, its metadata texts, and the SHA-256 of each tensor, or a list of one for each block of it.
    """
    file = TensorFile(path, kind)
    texts = dict(file.metadata)
    version = versions.get(texts.get("format", ""))
    if version is None:
        raise CheckpointError(f"{path} must be {kind}, got a safetensors file of format {texts.get('format')!r:.80}")
    with described(path, kind):
        number = read_json_text(texts, "version")
        if number != version:
            raise CheckpointError(f"{path} is of format version {number}; this jshadow understands version {version}")
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
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            while True:
                # At most one tensor for each thread is in flight, so that little memory is taken beside `kept`.
                for name in itertools.islice(names, THREADS - len(waiting)):
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


UNKNOWN = "0" * 64  # the placeholder of a digest until its tensor is written


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
        digests[name] = UNKNOWN if block is None else [UNKNOWN] * -(-nbytes // block)
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
