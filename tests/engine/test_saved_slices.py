"""Slices of arrays and of files: which numbers they are, and which blocks are read and checked for them."""

import numpy as np
import pytest

from jshadow.engine.saved import blocks
from jshadow.engine.saved.blocks import block_digests, read_slice
from jshadow.engine.saved.slices import cut, padded, runs, sizes, within
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import TensorFile, write_tensors


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 5)])
def test_runs_are_the_numbers_of_a_slice(shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    random = np.random.default_rng(1)
    for _ in range(60):
        ends = [sorted(random.integers(0, size + 1, 2).tolist()) for size in shape]
        place = tuple(map(tuple, ends))
        expected = array[tuple(slice(*end) for end in ends)]
        found = [first + i for first, count in runs(place, shape) for i in range(count)]
        assert found == expected.ravel().tolist()
    whole = tuple((0, size) for size in shape)
    assert list(runs(whole, shape)) == [(0, array.size)]


def test_zeros_follow_the_end_of_an_array():
    array = np.arange(1, 13).reshape(3, 4)

    def read(place):
        return array[within(place, ((0, 3), (0, 4)))]

    assert padded(((1, 3), (2, 6)), (3, 4), array.dtype, read).tolist() == [[7, 8, 0, 0], [11, 12, 0, 0]]
    assert padded(((0, 1), (4, 6)), (3, 4), array.dtype, read).tolist() == [[0, 0]]
    assert padded(((0, 1), (0, 2)), (3, 4), array.dtype, read).tolist() == [[1, 2]]
    assert sizes(cut(((0, 1), (4, 6)), (3, 4))) == (1, 0)


def test_only_the_blocks_of_a_slice_are_read_and_checked(tmp_path, monkeypatch):
    value = np.random.default_rng(0).standard_normal((4, 6, 8), np.float32)
    write_tensors(tmp_path / "file", {"x": value.shape}, "float32", lambda _: value)
    block = 64
    digests = block_digests(value, block)
    assert len(digests) == value.nbytes // block
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1  # in the last block
    (tmp_path / "file").write_bytes(data)
    file, checked = TensorFile(tmp_path / "file"), []
    monkeypatch.setattr(blocks, "sha256", lambda held, real=blocks.sha256: checked.append(len(held)) or real(held))
    for place in [((1, 2), (0, 6), (0, 8)), ((0, 3), (1, 2), (2, 5)), ((0, 0), (0, 6), (0, 8))]:
        checked.clear()
        expected = value[tuple(slice(*end) for end in place)]
        assert np.array_equal(read_slice(file, "x", place, digests, block), expected)
        assert sum(checked) <= expected.nbytes + 2 * block * max(1, place[0][1] - place[0][0])
        assert np.array_equal(read_slice(file, "x", place), expected)
    with pytest.raises(CheckpointError, match=r"bytes 704 to 768 of x do not have the SHA-256"):
        read_slice(file, "x", ((3, 4), (5, 6), (7, 8)), digests, block)
