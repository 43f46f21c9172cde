"""Reading and writing single safetensors files, tensor by tensor, so that a model is never in memory twice.

The format (version 1): a little-endian uint64 n, n bytes of JSON header (name -> dtype, shape, data_offsets), then the
raw bytes. `safetensors` parses and validates it; this module adds messages that a user can act on, and a writer that
does not need all tensors at once.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert.files import check_file
from jshadow.weights.digest import raw_bytes

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# Everything that JAX holds without its 64-bit mode.
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
DTYPES_OF_TAGS = {tag: DTYPES.get(name, np.dtype(name)) for name, tag in TAGS.items()} | {"F64": np.dtype(np.float64)}
READABLE_TAGS = ("F64", "F32", "F16", "BF16")
KIND = "a safetensors file"
CHECKED = 2**22  # values that are looked at at once
MAX_HEADER = 100_000_000  # the format's own limit

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor name -> name of its dtype, shape; in the order of the file


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy dtype of "float32", "bfloat16" or "float16". Raises ConfigError for anything else."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


class TensorFile:
    """One safetensors file, opened for reading.

    Attributes:
        path: the file.
        shapes: tensor name -> shape, from the header alone.
        tags: tensor name -> dtype tag of the format ("BF16").
        metadata: the texts that the header carries beside the tensors.

    Raises:
        CheckpointError: the file is missing, empty, an LFS pointer, truncated or garbage.
    """

    def __init__(self, path: Path, kind: str = KIND) -> None:
        check_file(path, kind)
        self.path = path
        try:
            with safe_open(path, framework="numpy") as opened:  # which checks the header as the format wants it
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no dict
                self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
                self.tags = {name: str(part.get_dtype()) for name, part in slices.items()}
                self.metadata: dict[str, str] = opened.metadata() or {}
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            self._starts = {name: 8 + length + header[name]["data_offsets"][0] for name in self.shapes}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(describe_damage(path, error, kind)) from error

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`, in the file's dtype (only those of TAGS, and F64, are safe to ask for).

        It is read, not mapped: the pages of a mapped file would count as memory of this process.
        """
        dtype, shape = DTYPES_OF_TAGS[self.tags[name]], self.shapes[name]
        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[name])
                value = np.fromfile(file, dtype, math.prod(shape))
            return value.reshape(shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error


def describe_damage(path: Path, error: Exception, kind: str = KIND) -> str:
    """A message for a file that the parser refused, with what the user can do."""
    size = path.stat().st_size
    cut = "truncated, probably by an interrupted download or copy: fetch it again"
    with path.open("rb") as file:
        head = file.read(9)
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        if len(head) < 9 or length > MAX_HEADER or head[8:9] != b"{":
            return f"{path} must be {kind}, got {size} bytes of something else: {error}"
        if 8 + length > size:
            return f"{path} is {cut} (its header alone needs {8 + length} bytes, the file has {size})"
        file.seek(8)
        raw = file.read(length)
    try:
        ends = [int(info["data_offsets"][1]) for name, info in json.loads(raw).items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        return f"{path} must be {kind}, got a header that does not parse: {error}"
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        return f"{path} is {cut} (its header expects {expected} bytes, the file has {size})"
    return f"{path} is damaged (its header describes {expected} bytes, the file has {size}): {error}"


def cast(value: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, str | None]:
    """A tensor in `dtype`, its order in memory unchanged, and a text on what is wrong with its values, or None.

    float16 overflows at 65504, so the check comes after the cast.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        out = value.astype(dtype, order="K", copy=False)
    return out, not_finite(out)


def not_finite(value: np.ndarray) -> str | None:
    """A text on what is wrong with the values of a tensor, or None."""
    flat = value.ravel(order="K")  # a view of a tensor in one piece, transposed or not
    bad = sum(
        block.size - int(np.count_nonzero(np.isfinite(block)))
        for block in (flat[start : start + CHECKED] for start in range(0, flat.size, CHECKED))
    )
    return f"{bad} of {value.size} values are NaN or Inf in {value.dtype.name}" if bad else None


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    read: Callable[[str], np.ndarray],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write one safetensors file, asking for one tensor at a time.

    Args:
        path: file to write.
        shapes: tensor name -> shape, in the order of the file.
        dtype: dtype of every tensor in the file.
        read: gives the tensor of a name, any float dtype, of the shape told above.
        progress: called with (tensors written, tensors in all).

    Raises:
        CheckpointError: tensors with NaN or Inf, all of them in one message.
    """
    target = check_dtype(dtype)
    problems: list[str] = []

    def checked(name: str) -> np.ndarray:
        value, problem = cast(read(name), target)
        if problem:
            problems.append(f"{name}: {problem}")
        return np.ascontiguousarray(value)

    layout = {name: (dtype, shape) for name, shape in shapes.items()}
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
    """Write the bytes of all tensors, asking for one at a time. The file's position must be the end of its header.

    Args:
        file: open for writing.
        layout: as given to `encode_header`.
        read: gives the tensor of a name, in C order.
        progress: called with (tensors written, tensors in all).
    """
    for done, (name, announced) in enumerate(layout.items(), start=1):
        value = read(name)
        if (value.dtype.name, value.shape) != announced:
            raise AssertionError(f"{name} announced as {announced}, got {value.dtype.name} {value.shape}")
        file.write(raw_bytes(value))
        if progress:
            progress(done, len(layout))


def encode_header(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """The header of a file. Its length only depends on the lengths of the names and texts."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, (dtype, shape) in layout.items():
        end = start + np.dtype(dtype).itemsize * math.prod(shape)
        entries[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return struct.pack("<Q", len(text)) + text


def raise_all(owner: str, problems: list[str], most: int = 100) -> None:
    """Raise one CheckpointError that lists the problems, at most `most` of them."""
    if not problems:
        return
    shown = "\n  ".join(problems[:most])
    more = f"\n  and {len(problems) - most} more" if len(problems) > most else ""
    raise CheckpointError(f"{owner}: {len(problems)} tensor(s) do not fit:\n  {shown}{more}")
