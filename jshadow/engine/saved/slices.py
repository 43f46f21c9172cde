"""Slices of arrays that are split over devices or over files, and where their numbers lie in a file.

A `Place` is a slice of an array: for each axis, its first index, and its last index + 1. On a mesh, an array may have
more left rows than on one device, so that all devices have equally many. What is too long holds no data. A file
has the array as one device has it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

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
    """Return a slice of an array that is longer than the one that is read. Zeros follow the end of that one.

    Args:
        place: the slice.
        shape: the shape of the array that is read.
        dtype: its dtype.
        read: returns a slice of it.
    """
    inside = cut(place, shape)
    if inside == place:
        return read(place)
    out = np.zeros(sizes(place), dtype)
    if math.prod(sizes(inside)):
        out[within(inside, place)] = read(inside)
    return out


def runs(place: Place, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the runs of numbers of a slice in an array in C order: the first number of each, and how many.

    The runs follow each other in the slice in C order.

    Args:
        place: a slice that lies inside the array.
        shape: the shape of the array.
    """
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
