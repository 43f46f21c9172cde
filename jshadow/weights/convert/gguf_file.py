"""A reader of GGUF files (versions 2 and 3). It compares every count with the number of bytes that are left.

The reader of the `gguf` package trusts the counts in the header. A file of 49 bytes that announces an array of 2^63
elements makes it run forever, and other damage raises an IndexError. So this module parses the header itself. Only the
decoding of quantized formats (`gguf.quants`) comes from the package.
"""

import mmap
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jshadow.errors import CheckpointError
from jshadow.weights.convert.files import check_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
KIND = "a GGUF file"
STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
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
MIN_FIELD, MIN_STRING, MIN_TENSOR = 13, 8, 24  # the smallest possible entry of each kind, in bytes
MAX_DIMENSIONS = 4


class TensorInfo(NamedTuple):
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
    """An opened GGUF file whose header is checked. The tensor data is memory-mapped and not read yet.

    Attributes:
        path: the file.
        metadata: key -> number, bool, string, list of strings, or list of numbers.
        tensors: name -> TensorInfo. Every tensor lies inside the file.

    Raises:
        CheckpointError: the file is missing, empty, a Git LFS pointer, not GGUF, of an unsupported version, big-endian
            or truncated; or it has an impossible count, length, type or offset.
    """

    def __init__(self, path: Path) -> None:
        check_file(path, KIND)
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
        """Read tensor `name`, and convert it to float32. Its shape is that in `tensors`.

        Raises:
            CheckpointError: `gguf.quants` cannot decode the type of the tensor.
        """
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
        dtype = SCALARS.get(code)
        if dtype is None:
            raise self.error(f"{what} has the unknown or nested type {code}")
        self.fits(count, dtype.itemsize, what)
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

    def value(self, what: str) -> Any:
        code = self.u32(f"type of {what}")
        if code == STRING:
            return self.string(what)
        if code != ARRAY:
            return self.numbers(code, 1, what)[0]
        code, count = self.u32(f"element type of {what}"), self.u64(f"array length of {what}")
        if code != STRING:
            return self.numbers(code, count, f"array length of {what}")
        self.fits(count, MIN_STRING, f"array length of {what}")
        return [self.string(what) for _ in range(count)]


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Check the magic bytes and the version, and return (number of tensors, number of metadata fields)."""
    magic = bytes(cursor.data[:4])
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path} must be {KIND} (magic {MAGIC!r}), got {magic!r}")
    cursor.at = 4
    version = cursor.u32("version")
    if version not in VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise cursor.error(f"version must be one of {VERSIONS}, got {version}{hint}")
    tensors, fields = cursor.u64("tensor count"), cursor.u64("metadata count")
    cursor.fits(tensors, MIN_TENSOR, "tensor count")
    cursor.fits(fields, MIN_FIELD, "metadata count")
    return tensors, fields


def _tensor_infos(cursor: _Cursor, count: int, alignment: Any) -> dict[str, TensorInfo]:
    gguf = gguf_package()
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment must be a power of two, got {alignment!r}")
    infos: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.string("tensor name")
        if name in infos:
            raise cursor.error(f"tensor {name!r} occurs twice")
        rank = cursor.u32(f"rank of {name!r}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise cursor.error(f"rank of tensor {name!r} must lie in [1, {MAX_DIMENSIONS}], got {rank}")
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
        infos[name] = TensorInfo(shape, code, start, nbytes)
    data = -(-cursor.at // alignment) * alignment
    for name, info in infos.items():
        end = data + info.start + info.nbytes
        if end > cursor.size:
            raise cursor.error(f"tensor {name!r} ends at byte {end}, beyond the file: an interrupted download?")
    return {name: info._replace(start=data + info.start) for name, info in infos.items()}
