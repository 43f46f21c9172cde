"""What a format of quantized weights tells: the tensors that make up one weight, and how its numbers are decoded."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jshadow.errors import CheckpointError
from jshadow.weights.convert.quantized.codes import from_e4m3, from_e8m0
from jshadow.weights.convert.safetensors_file import TensorFile, UnfitTensor
from jshadow.weights.convert.source import Shape

_BLOCK = 2**16  # how many numbers are decoded at once, so that they stay in the cache of a CPU
FLOATS = ("F32", "BF16", "F16")
ONE_NUMBER: tuple[Shape, ...] = ((), (1,), (1, 1))  # the shapes of a scale for a whole tensor


class Stored(NamedTuple):
    """A tensor in a file."""

    file: TensorFile
    name: str

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.file.shapes[self.name]

    @property
    def tag(self) -> str:
        """The format's name of its dtype."""
        return self.file.tags[self.name]

    def read(self) -> np.ndarray:
        """Read it. Raises CheckpointError."""
        return self.file.read(self.name)


class Part(NamedTuple):
    """What one of the tensors of a quantized weight must be.

    Attributes:
        tags: dtypes that it may have.
        shapes: shapes that it may have.
        is_scale: whether it has scales, which must be finite. They are read as float32. Those of dtype U8 are E8M0.
        optional: whether it may be missing.
    """

    tags: tuple[str, ...]
    shapes: tuple[Shape, ...]
    is_scale: bool = False
    optional: bool = False


class Codes(NamedTuple):
    """A quantized weight of R rows and C columns: each number is (level - zero) * scale.

    Attributes:
        levels: function that returns the levels of rows `start` to `end`, float32 [end - start, C]. It may be called
            with any multiple of 32 as `start`. The caller owns the array.
        scales: float32 [A, B], one for each block.
        block: numbers of rows and columns of a block. The last blocks may be smaller.
        zeros: float32 [A, B], or None for zeros.
        groups: index into the second axis of `scales` for each column, int [C]. None: it follows from `block`.
        may_vanish: whether a scale may be zero where levels are not.
    """

    levels: Callable[[int, int], np.ndarray]
    scales: np.ndarray
    block: tuple[int, int]
    zeros: np.ndarray | None = None
    groups: np.ndarray | None = None
    may_vanish: bool = False


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the tensors of a file make up one weight.

    Attributes:
        shape: shape of the weight as the file has it, [..., out, in].
        parts: what each tensor must be, by what its name has behind the name of the module.
        codes: function of the arrays, by the same keys. Scales are float32. It raises UnfitTensor if numbers contradict
            each other.
        transposed: whether the weight is the transpose of what is decoded, so that its shape is [..., in, out].
        exact: a smaller dtype than float32 that holds all numbers of the format, or None.
    """

    shape: Shape
    parts: Mapping[str, Part]
    codes: Callable[[Mapping[str, np.ndarray]], Codes]
    transposed: bool = False
    exact: np.dtype[Any] | None = None

    @property
    def result(self) -> Shape:
        """The shape of the decoded weight."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    def misfits(self, module: str, found: Mapping[str, Stored]) -> list[str]:
        """Return one line for each tensor of a module that is missing, left over, or of a wrong dtype or shape."""
        lines = []
        for suffix, part in self.parts.items():
            stored = found.get(suffix)
            if stored is None:
                if not part.optional:
                    lines.append(f"{module}{suffix}: missing")
            elif stored.tag not in part.tags:
                lines.append(f"{stored.name}: dtype must be one of {part.tags}, got {stored.tag}")
            elif stored.shape not in part.shapes:
                right = " or ".join(str(list(shape)) for shape in part.shapes)
                lines.append(f"{stored.name}: misshaped, expected {right}, got {list(stored.shape)}")
        return lines + [f"{found[suffix].name}: left over" for suffix in found if suffix not in self.parts]

    def read(self, found: Mapping[str, Stored], dtype: np.dtype[Any]) -> np.ndarray:
        """Read and decode a weight in slices.

        Args:
            found: the tensors, which must have no `misfits`.
            dtype: dtype of the result. Each number is computed in float32 and rounded to it.

        Returns:
            The weight, of shape `result`. It may be a transposed view.

        Raises:
            UnfitTensor: a scale is NaN, infinite, or zero where it may not be, or an index is out of range.
            CheckpointError: a file cannot be read.
        """
        arrays = {suffix: stored.read() for suffix, stored in found.items()}
        scales = [suffix for suffix in arrays if self.parts[suffix].is_scale]
        for suffix in scales:
            arrays[suffix] = as_float32(arrays[suffix])
            if bad := int(np.count_nonzero(~np.isfinite(arrays[suffix]))):
                raise UnfitTensor(f"{found[suffix].name}: {bad} of {arrays[suffix].size} scales are NaN or Inf")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            codes = self.codes(arrays)
            if self.exact is not None and dtype.itemsize > self.exact.itemsize:
                dtype = self.exact
            value, lost = _decoded(codes, (math.prod(self.shape[:-1]), self.shape[-1]), dtype)
        if lost and not codes.may_vanish:
            names = " or ".join(found[suffix].name for suffix in scales)
            raise UnfitTensor(f"{names}: {lost} weights that are not zero have a scale of zero")
        value = value.reshape(self.shape)
        return value.swapaxes(-1, -2) if self.transposed else value


def _decoded(codes: Codes, shape: Shape, dtype: np.dtype[Any]) -> tuple[np.ndarray, int]:
    """Return the numbers [R, C], and how many have a scale of zero although they are not zero."""
    (rows, columns), (height, width) = shape, codes.block
    out, lost, vanishing = np.empty(shape, dtype), 0, not np.all(codes.scales)
    step = max(32, _BLOCK // max(1, columns) // 32 * 32)

    def spread(blocks: np.ndarray, start: int, end: int) -> np.ndarray:
        some = blocks if height >= rows else blocks[np.arange(start, end) // height]
        if codes.groups is not None:
            return np.take(some, codes.groups, axis=1)
        return some if width >= columns else np.repeat(some, width, axis=1)[:, :columns]

    for start in range(0, rows, step):
        end = min(start + step, rows)
        levels, scales = codes.levels(start, end), spread(codes.scales, start, end)
        if codes.zeros is not None:
            levels -= spread(codes.zeros, start, end)
        if vanishing:
            lost += int(np.count_nonzero(levels * (scales == 0)))
        levels *= scales
        out[start:end] = levels
    return out, lost


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A format of quantized weights, with the settings of one checkpoint.

    Attributes:
        mains: what the names of the tensors with the codes have behind the name of the module. Each module with one of
            them, and with a dtype or with companions that no plain weight has, is quantized.
        companions: the same for the other tensors of a quantized weight.
        packing: function of the name of a module and of its tensors. It raises CheckpointError if they are not of the
            format.
        weight: what the name of the decoded weight has behind the name of the module.
        adds_biases: whether modules may have biases of zeros that the model does not have.
    """

    mains: tuple[str, ...]
    companions: tuple[str, ...]
    packing: Callable[[str, Mapping[str, Stored]], Packing]
    weight: str = ".weight"
    adds_biases: bool = False


def matrix(stored: Stored, tag: str) -> tuple[int, int]:
    """Return the two sizes of a matrix. Raises CheckpointError if it has another dtype, is no matrix, or is empty."""
    if stored.tag != tag:
        raise CheckpointError(f"{stored.name}: dtype must be {tag}, got {stored.tag}")
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise CheckpointError(f"{stored.name}: misshaped, expected two axes, got {list(stored.shape)}")
    return stored.shape[0], stored.shape[1]


def blocks_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks a matrix has along each axis. The last ones may be smaller."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def as_float32(scale: np.ndarray) -> np.ndarray:
    """Return scales as float32. They may be E4M3, and E8M0, also as uint8."""
    if scale.dtype == ml_dtypes.float8_e4m3fn:
        return from_e4m3(scale)
    return from_e8m0(scale) if scale.itemsize == 1 else scale.astype(np.float32)
