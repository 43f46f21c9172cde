"""A GGUF file: its header, checked before anything is read, and its tensors."""

import mmap
import re
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jshadow.errors import CheckpointError
from jshadow.weights.convert.files import check_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_KIND = "a GGUF file"
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
_MIN_FIELD, _MIN_STRING, _MIN_TENSOR = 13, 8, 24  # the smallest possible entry of each kind, in bytes
_MAX_DIMENSIONS = 4


class _TensorInfo(NamedTuple):
    """The place of a tensor in the file.

    Attributes:
        shape: shape in NumPy's order.
        kind: code of the tensor's type in ggml.
        start: offset of the first byte in the file.
        nbytes: number of bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    nbytes: int


class GGUFFile:
    """An opened GGUF model whose header is checked. The tensor data is memory-mapped and not read yet.

    A model that is split into several files is opened by its first one. The others lie beside it.

    Attributes:
        path: the file.
        metadata: key -> number, bool, string, list of strings, or list of numbers.
        tensors: name -> shape, in NumPy's order. Every tensor lies inside its file.

    Raises:
        CheckpointError: the file is missing, empty, a Git LFS pointer, not GGUF, of an unsupported version, big-endian
            or truncated; it has an impossible count, length, type or offset; or a file of a split model is missing, or
            does not belong to the others.
    """

    def __init__(self, path: Path) -> None:
        first = _Part(path)
        self.path, self.metadata, self._parts = path, first.metadata, [first]
        for number, other in enumerate(_other_paths(path, first.metadata), 1):
            part, expected = _Part(other), {"split.no": number, "split.count": first.metadata["split.count"]}
            if (found := {key: part.metadata.get(key) for key in expected}) != expected:
                raise CheckpointError(f"{other} must have {expected}, got {found}")
            self._parts.append(part)
        self._part_of: dict[str, _Part] = {}
        for part in self._parts:
            if twice := self._part_of.keys() & part.tensors.keys():
                raise CheckpointError(f"{part.path}: tensor {min(twice)!r} occurs twice")
            self._part_of |= dict.fromkeys(part.tensors, part)
        self.tensors = {name: part.tensors[name].shape for name, part in self._part_of.items()}

    def read(self, name: str) -> np.ndarray:
        """Read tensor `name`, and convert it to float32. Its shape is that in `tensors`.

        Raises:
            CheckpointError: `gguf.quants` cannot decode the type of the tensor.
        """
        return self._part_of[name].read(name)


def _other_paths(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """Return the paths of the files behind the first one of a split model."""
    count, number = metadata.get("split.count", 1), metadata.get("split.no")
    if count in (0, 1):
        return []
    named = re.fullmatch(r"(.+)-00001-of-(\d{5})\.gguf", path.name)
    if isinstance(count, bool) or not isinstance(count, int) or number != 0:
        raise CheckpointError(
            f"{path} must be the first file of its model (split.no=0), got split.no={number!r} of split.count={count!r}"
        )
    if named is None or int(named[2]) != count:
        raise CheckpointError(
            f"the first of split.count={count} files must be named NAME-00001-of-{count:05}.gguf, got {path.name}"
        )
    others = [path.with_name(f"{named[1]}-{index:05}-of-{count:05}.gguf") for index in range(2, count + 1)]
    if missing := [other.name for other in others if not other.exists()]:
        raise CheckpointError(f"{path} lacks {len(missing)} of split.count={count} files: {', '.join(missing[:8])}")
    return others


class _Part:
    """One file of a model."""

    def __init__(self, path: Path) -> None:
        check_file(path, _KIND)
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, self._map)
        tensor_count, field_count = _counts(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = cursor.string("metadata key")
            if key in self.metadata:
                raise cursor.error(f"metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(f"metadata {key!r}")
        self.tensors = _tensor_infos(cursor, tensor_count, self.metadata.get("general.alignment", 32))

    def read(self, name: str) -> np.ndarray:
        gguf = gguf_package()
        info = self.tensors[name]
        kind = gguf.GGMLQuantizationType(info.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.frombuffer(self._map, np.uint8, info.nbytes, info.start)
        rows = rows.reshape(*info.shape[:-1], info.shape[-1] // block * size)
        try:
            with np.errstate(all="ignore"):  # an overflowing scale becomes Inf, which is reported later
                return gguf.quants.dequantize(rows, kind).astype(np.float32, copy=False).reshape(info.shape)
        except (NotImplementedError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} of type {kind.name} cannot be read: {error}") from error


def gguf_package() -> ModuleType:
    """Import the optional package `gguf`. Raises CheckpointError with the install command if it is missing."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise CheckpointError("reading GGUF needs the package gguf: pip install 'jshadow[gguf]'") from error
    return gguf


class _Cursor:
    """A position in the file that never runs past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid GGUF file: {what} (at byte {self.at} of {self.size})")

    def take(self, count: int, what: str) -> bytes:
        self.fits(count, 1, what)
        start, self.at = self.at, self.at + count
        return self.data[start : self.at]

    def fits(self, count: int, each: int, what: str) -> None:
        """Raise CheckpointError if fewer bytes are left than `count` items of at least `each` bytes need."""
        if count > (self.size - self.at) // each:
            raise self.error(f"{what} announces {count}, but only {self.size - self.at} bytes are left; truncated?")

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def string(self, what: str) -> str:
        raw = self.take(self.u64(f"length of {what}"), f"length of {what}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def numbers(self, code: int, count: int, what: str) -> list[Any]:
        dtype = _SCALARS.get(code)
        if dtype is None:
            raise self.error(f"{what} has the unknown or nested type {code}")
        self.fits(count, dtype.itemsize, what)
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

    def value(self, what: str) -> Any:
        code = self.u32(f"type of {what}")
        if code == _STRING:
            return self.string(what)
        if code != _ARRAY:
            return self.numbers(code, 1, what)[0]
        code, count = self.u32(f"element type of {what}"), self.u64(f"array length of {what}")
        if code != _STRING:
            return self.numbers(code, count, f"array length of {what}")
        self.fits(count, _MIN_STRING, f"array length of {what}")
        return [self.string(what) for _ in range(count)]


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Check the magic bytes and the version, and return (number of tensors, number of metadata fields)."""
    magic = bytes(cursor.data[:4])
    if magic != _MAGIC:
        raise CheckpointError(f"{cursor.path} must be {_KIND} (magic {_MAGIC!r}), got {magic!r}")
    cursor.at = 4
    version = cursor.u32("version")
    if version not in _VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise cursor.error(f"version must be one of {_VERSIONS}, got {version}{hint}")
    tensors, fields = cursor.u64("tensor count"), cursor.u64("metadata count")
    cursor.fits(tensors, _MIN_TENSOR, "tensor count")
    cursor.fits(fields, _MIN_FIELD, "metadata count")
    return tensors, fields


def _tensor_infos(cursor: _Cursor, count: int, alignment: Any) -> dict[str, _TensorInfo]:
    gguf = gguf_package()
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment must be a power of two, got {alignment!r}")
    infos: dict[str, _TensorInfo] = {}
    for _ in range(count):
        name = cursor.string("tensor name")
        if name in infos:
            raise cursor.error(f"tensor {name!r} occurs twice")
        rank = cursor.u32(f"rank of {name!r}")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise cursor.error(f"rank of tensor {name!r} must lie in [1, {_MAX_DIMENSIONS}], got {rank}")
        shape = tuple(cursor.u64(f"shape of {name!r}") for _ in range(rank))[::-1]
        code, start = cursor.u32(f"type of {name!r}"), cursor.u64(f"offset of {name!r}")
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)]
        except (ValueError, KeyError) as error:
            raise cursor.error(f"tensor {name!r} has the unknown type {code}") from error
        if 0 in shape or shape[-1] % block or start % alignment:
            raise cursor.error(f"tensor {name!r} has an impossible shape {shape} or offset {start}")
        nbytes = size * (shape[-1] // block)
        for extent in shape[:-1]:
            nbytes *= extent  # Python integers do not overflow
        infos[name] = _TensorInfo(shape, code, start, nbytes)
    data = -(-cursor.at // alignment) * alignment
    for name, info in infos.items():
        end = data + info.start + info.nbytes
        if end > cursor.size:
            raise cursor.error(f"tensor {name!r} ends at byte {end}, beyond the file: an interrupted download?")
    return {name: info._replace(start=data + info.start) for name, info in infos.items()}
