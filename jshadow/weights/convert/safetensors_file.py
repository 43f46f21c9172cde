"""Reading and writing single safetensors files, tensor by tensor, so that a model is never in memory twice.

The format (version 1) is a little-endian uint64 n, n bytes of JSON header (name -> dtype, shape, data_offsets), and the
raw bytes of the tensors. The package `safetensors` parses and validates the header. This module adds error messages
that say what to do, and a writer that holds one tensor at a time.
"""

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert.files import check_file, readable
from jshadow.weights.digest import raw_bytes

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# The dtypes of JAX without its 64-bit mode.
TAGS = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Those that are only read.
_MORE_TAGS = {
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
DTYPES_OF_TAGS = {tag: DTYPES.get(name, np.dtype(name)) for name, tag in TAGS.items()} | _MORE_TAGS
READABLE_TAGS = ("F64", "F32", "F16", "BF16")
_KIND = "a safetensors file"
_CHECKED = 2**22  # how many values are checked at once
_MAX_HEADER = 100_000_000  # maximum bytes of a header, as the format defines

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor name -> (name of its dtype, shape), in the file's order


class UnfitTensor(CheckpointError):
    """The numbers of a tensor are refused. Who reads many tensors goes on, and reports all of these errors."""


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of "float32", "bfloat16" or "float16". Raises ConfigError for anything else."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


_BLOCK = 2**24  # bytes that are compared at a time


def same_tensor(one: "tuple[TensorFile, str]", other: "tuple[TensorFile, str]") -> bool:
    """Return whether two tensors, each given as its file and its name, have equal shapes, dtypes and bytes.

    Raises:
        CheckpointError: a file cannot be read.
    """
    (file, name), (second, its_name) = one, other
    if (file.shapes[name], file.tags[name]) != (second.shapes[its_name], second.tags[its_name]):
        return False
    size = file.sizes[name]
    blocks = [(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]
    with file.bytes_of(name) as read, second.bytes_of(its_name) as read_other:
        return all(read(*block) == read_other(*block) for block in blocks)


class TensorFile:
    """One safetensors file, opened for reading.

    Attributes:
        path: the file.
        shapes: tensor name -> shape.
        sizes: tensor name -> number of bytes.
        tags: tensor name -> the format's name of its dtype, such as "BF16".
        metadata: the metadata texts of the header.

    Raises:
        CheckpointError: the file is missing, empty, a Git LFS pointer, truncated, or not a safetensors file.
    """

    def __init__(self, path: Path, kind: str = _KIND) -> None:
        check_file(path, kind)
        self.path = path
        try:
            with safe_open(path, framework="numpy") as opened:  # this validates the header
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
                self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
                self.tags = {name: str(part.get_dtype()) for name, part in slices.items()}
                self.metadata: dict[str, str] = opened.metadata() or {}
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            places = {name: header[name]["data_offsets"] for name in self.shapes}
            self._starts = {name: 8 + length + begin for name, (begin, _) in places.items()}
            self.sizes = {name: end - begin for name, (begin, end) in places.items()}
        except (SafetensorError, OSError, ValueError) as error:
            with readable(path):  # the file may have been removed by now
                raise CheckpointError(_describe_damage(path, error, kind)) from error

    def read(self, name: str) -> np.ndarray:
        """Read tensor `name` in the dtype of the file, which must be one of DTYPES_OF_TAGS.

        The file is read and not memory-mapped, because the pages of a mapped file count as memory of the process.
        """
        dtype, shape = DTYPES_OF_TAGS[self.tags[name]], self.shapes[name]
        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[name])
                value = np.fromfile(file, dtype, math.prod(shape))
            return value.reshape(shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error

    @contextlib.contextmanager
    def bytes_of(self, name: str) -> Iterator[Callable[[int, int], bytes]]:
        """A context manager that yields a function, which reads the bytes `start` to `end` of tensor `name` alone.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:

                def read(start: int, end: int) -> bytes:
                    file.seek(self._starts[name] + start)
                    content = file.read(end - start)
                    if len(content) != end - start:
                        raise OSError(f"the file ends before byte {end} of it")
                    return content

                yield read
        except OSError as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error


def _describe_damage(path: Path, error: Exception, kind: str = _KIND) -> str:
    """Return an error message for a file that the parser refused, which says what the user can do."""
    size = path.stat().st_size
    cut = "truncated, probably by an interrupted download or copy: fetch it again"
    with path.open("rb") as file:
        head = file.read(9)
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        if len(head) < 9 or length > _MAX_HEADER or head[8:9] != b"{":
            return f"{path} must be {kind}, got {size} bytes of something else: {error}"
        begin = 8 + length  # of the tensors
        if begin > size:
            return f"{path} is {cut} (its header alone needs {begin} bytes, the file has {size})"
        file.seek(8)
        raw = file.read(length)
    try:
        ends = [int(info["data_offsets"][1]) for name, info in json.loads(raw).items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        return f"{path} must be {kind}, got a header that does not parse: {error}"
    expected = begin + max(ends, default=0)
    if size < expected:
        return f"{path} is {cut} (its header expects {expected} bytes, the file has {size})"
    return f"{path} is damaged (its header describes {expected} bytes, the file has {size}): {error}"


def cast(value: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, str | None]:
    """Cast a tensor to `dtype` without changing its order in memory, and check its values.

    The values are checked after the cast, because float16 overflows at 65504.

    Returns:
        The tensor, and a text about NaN or Inf values, or None if there are none.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        out = value.astype(dtype, order="K", copy=False)
    return out, not_finite(out)


def not_finite(value: np.ndarray) -> str | None:
    """Return a text about the NaN or Inf values of a tensor, or None if there are none."""
    flat = value.ravel(order="K")  # a view if the tensor is contiguous, transposed or not
    bad = sum(
        block.size - int(np.count_nonzero(np.isfinite(block)))
        for block in (flat[start : start + _CHECKED] for start in range(0, flat.size, _CHECKED))
    )
    return f"{bad} of {value.size} values are NaN or Inf in {value.dtype.name}" if bad else None


def write_tensors(
    path: Path,
    layout: Layout,
    read: Callable[[str], np.ndarray],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write one safetensors file, reading one tensor at a time.

    Args:
        path: file to write.
        layout: tensor name -> (dtype, shape), in the order of the file.
        read: returns the tensor of a name, in any float dtype and in the shape given by `layout`.
        progress: called with (number of tensors written, number of all tensors).

    Raises:
        CheckpointError: tensors have NaN or Inf, or are not fit. The message lists all of them.
    """
    problems: list[str] = []

    def checked(name: str) -> np.ndarray:
        dtype, shape = layout[name]
        try:
            value, problem = cast(read(name), DTYPES[dtype])
        except UnfitTensor as error:
            problems.append(str(error))
            return np.zeros(shape, DTYPES[dtype])
        if problem:
            problems.append(f"{name}: {problem}")
        return np.ascontiguousarray(value)

    with path.open("wb") as file:
        file.write(encode_header(layout, {"format": "pt"}))  # transformers refuses a file without this key
        write_payload(file, layout, checked, progress)
    raise_all(str(path.name), problems)


def write_payload(
    file: BinaryIO,
    layout: Layout,
    read: Callable[[str], np.ndarray],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the bytes of all tensors, reading one at a time. The position of the file must be the end of its header.

    Args:
        file: a file that is open for writing.
        layout: the layout that `encode_header` was called with.
        read: returns the tensor of a name, in C order.
        progress: called with (number of tensors written, number of all tensors).
    """
    for done, (name, announced) in enumerate(layout.items(), start=1):
        value = read(name)
        if (value.dtype.name, value.shape) != announced:
            raise AssertionError(f"{name} announced as {announced}, got {value.dtype.name} {value.shape}")
        file.write(raw_bytes(value))
        if progress:
            progress(done, len(layout))


def encode_header(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file. Its length depends only on the layout and on the lengths of the metadata texts."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, (dtype, shape) in layout.items():
        end = start + np.dtype(dtype).itemsize * math.prod(shape)
        entries[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def raise_all(owner: str, problems: list[str], most: int = 100) -> None:
    """Raise one CheckpointError that lists up to `most` problems. Does nothing if there are none."""
    if not problems:
        return
    shown = "\n  ".join(problems[:most])
    more = f"\n  and {len(problems) - most} more" if len(problems) > most else ""
    raise CheckpointError(f"{owner}: {len(problems)} tensor(s) do not fit:\n  {shown}{more}")
