"""Tensors of a file in blocks of bytes, each with its SHA-256, so that a slice can be read and checked alone."""

import math
from collections.abc import Sequence

import numpy as np

from jshadow.engine.saved.slices import Place, runs, sizes
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import DTYPES_OF_TAGS, TensorFile
from jshadow.weights.digest import raw_bytes, sha256

BLOCK = 2**22  # bytes of a block


def block_digests(value: np.ndarray, block: int) -> list[str]:
    """Return the SHA-256 of each block of a tensor in C order. The last block may be shorter."""
    content = raw_bytes(value)
    return [sha256(content[start : start + block]) for start in range(0, len(content), block)]


def read_slice(
    file: TensorFile, name: str, place: Place, digests: Sequence[str] | None = None, block: int = BLOCK
) -> np.ndarray:
    """Read a slice of a tensor, and only the bytes or blocks of the file in which it lies.

    Args:
        file: the file.
        name: the tensor.
        place: the slice. It lies inside the tensor.
        digests: the SHA-256 of each block, which is compared. None: only the bytes of the slice are read.
        block: bytes of a block.

    Raises:
        CheckpointError: the file cannot be read, or a block is damaged.
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
                        check_block(file, name, (low, high), sha256(held) == digests[wanted])
                    piece = held[start - low : min(end, high) - low]
                target[done : done + len(piece)] = piece
                done, start = done + len(piece), start + len(piece)
    return out


def check_block(file: TensorFile, name: str, at: tuple[int, int], good: bool) -> None:
    """Raise CheckpointError unless a block of a tensor has its SHA-256."""
    if not good:
        raise CheckpointError(
            f"{file.path} is damaged: bytes {at[0]} to {at[1]} of {name} do not have the SHA-256 that the header gives"
        )
