"""Saved states in parts: which slices a process writes and reads, and parts that are missing, damaged or foreign.

Two threads stand for two processes. Real ones write in `test_mesh.py`.
"""

import json
import math
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from sealed import content_of, seal
from small_state import LENGTHS_SMALL, equal, file_size_limit, save_small, small

from jshadow import load_state, save_state
from jshadow.engine.saved import blocks, together, write_parts
from jshadow.engine.saved.blocks import block_digests, read_slice
from jshadow.engine.saved.layout import Split
from jshadow.engine.saved.slices import cut, padded, runs, sizes, within
from jshadow.engine.saved.state import StateContent, read_state_info
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import TensorFile, write_tensors

TOKENS = [[3] * int(length) for length in LENGTHS_SMALL]
ANSWER_SECONDS = 60


class Pair:
    """Two threads that call the writing of parts together, as two processes do."""

    def __init__(self, patch):
        self.own, self.barrier, self.told = threading.local(), threading.Barrier(2), ["", ""]
        self.pool = ThreadPoolExecutor(2)
        patch.setattr(jax, "process_index", lambda: getattr(self.own, "number", 0))
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(together, "exchange", self.exchange)

    def exchange(self, name, value, seconds):
        self.told[self.own.number] = value
        self.barrier.wait(ANSWER_SECONDS)
        told = list(self.told)
        self.barrier.wait(ANSWER_SECONDS)
        return told

    def call(self, work):
        def one(number):
            self.own.number = number
            try:
                return work(number)
            except CheckpointError as error:
                return f"{type(error).__name__}: {error}"

        return [future.result() for future in [self.pool.submit(one, number) for number in (0, 1)]]


def half(number, leaf):
    """What a process writes of a tensor: its part along the longest axis, or nothing of a row of one number."""
    axis = int(np.argmax(leaf.shape))
    middle = (leaf.shape[axis] + 1) // 2
    ends = [(0, size) for size in leaf.shape]
    ends[axis] = (0, middle) if number == 0 else (middle, leaf.shape[axis])
    part = np.asarray(leaf)[tuple(slice(*end) for end in ends)]
    return Split(leaf.shape, np.dtype(leaf.dtype), ((tuple(ends), part),) if part.size else ())


def write_halves(pair, path, first=3):
    """Write the small state in two parts. Return its bytes as both tell them, or the errors."""
    params, state = small()
    content = StateContent.of(state, params, [[first] * len(row) for row in TOKENS], {})

    def work(number):
        whole = content.index
        leaves = {name: leaf if name in whole else half(number, leaf) for name, leaf in content.leaves.items()}
        return write_parts.write_parts(path, content.record.texts(), leaves, whole)

    return pair.call(work)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The index of a state in two parts, the bytes that both told, and the index of another run."""
    folder = tmp_path_factory.mktemp("halves")
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(patch)
        told = write_halves(pair, folder / "state")
        write_halves(pair, folder / "other")
    return folder / "state", told, folder / "other"


def parts_of(index):
    folder = json.loads(TensorFile(index).metadata["parts"])[0]["file"].split("/")[0]
    return sorted((index.parent / folder).iterdir())


def copied(index, folder):
    parts = parts_of(index)[0].parent
    shutil.copytree(parts, folder / parts.name)
    return shutil.copy(index, folder / index.name)


def change_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def load(index):
    return load_state(index, small()[0])


# What is written and read


def test_the_parts_are_the_state(halves, tmp_path):
    """Saved again by one process, it is the file of one process: of the format and version that it always had."""
    path, told, _ = halves
    loaded, alone = load(path), save_small(tmp_path / "alone", first=3)
    assert equal(loaded, small()[1])
    save_state(tmp_path / "again", loaded, small()[0], tokens=TOKENS)
    assert (tmp_path / "again").read_bytes() == alone
    metadata = TensorFile(tmp_path / "alone").metadata
    assert (metadata["format"], metadata["version"]) == ("jshadow KV state", "3")
    assert {"run", "parts", "leaves"} & metadata.keys() == set()
    assert told == [path.stat().st_size + sum(part.stat().st_size for part in parts_of(path))] * 2
    # no number is in both parts
    index, parts = TensorFile(path), [TensorFile(part) for part in parts_of(path)]
    assert len(parts) == 2
    assert not parts[0].shapes.keys() & parts[1].shapes.keys()
    leaves = json.loads(index.metadata["leaves"])
    counts = [sum(math.prod(shape) for shape in part.shapes.values()) for part in parts]
    assert sum(counts) == sum(math.prod(shape) for key, (_, shape) in leaves.items() if key not in index.shapes)
    assert min(counts) > 0.4 * sum(counts)
    # the index tells of the state without the parts
    info, one = read_state_info(shutil.copy(path, tmp_path / "index")), read_state_info(tmp_path / "alone")
    assert (info["tokens"], info["lengths"]) == (one["tokens"], one["lengths"]) == (TOKENS, LENGTHS_SMALL.tolist())
    assert read_state_info(path)["nbytes"] == told[0]
    assert {key for key in info if info[key] != one[key]} == {"format", "version", "nbytes"}


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 5)])
def test_runs_are_the_numbers_of_a_slice(shape):
    array, random = np.arange(math.prod(shape)).reshape(shape), np.random.default_rng(1)
    for _ in range(60):
        place = tuple(tuple(sorted(random.integers(0, size + 1, 2).tolist())) for size in shape)
        found = [first + i for first, count in runs(place, shape) for i in range(count)]
        assert found == array[tuple(slice(*end) for end in place)].ravel().tolist()
    assert list(runs(tuple((0, size) for size in shape), shape)) == [(0, array.size)]


def test_zeros_follow_the_end_of_an_array():
    array = np.arange(1, 13).reshape(3, 4)

    def read(place):
        return array[within(place, ((0, 3), (0, 4)))]

    for place, want in (
        (((1, 3), (2, 6)), [[7, 8, 0, 0], [11, 12, 0, 0]]),
        (((0, 1), (4, 6)), [[0, 0]]),
        (((0, 1), (0, 2)), [[1, 2]]),
    ):
        assert padded(place, (3, 4), array.dtype, read).tolist() == want
    assert sizes(cut(((0, 1), (4, 6)), (3, 4))) == (1, 0)


def test_only_the_blocks_of_a_slice_are_read_and_checked(tmp_path, monkeypatch):
    value = np.random.default_rng(0).standard_normal((4, 6, 8), np.float32)
    write_tensors(tmp_path / "file", {"x": value.shape}, "float32", lambda _: value)
    block = 64
    digests = block_digests(value, block)
    assert len(digests) == value.nbytes // block
    change_byte(tmp_path / "file", -1)  # in the last block
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


# Nothing half-written


def listing(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_saving_ends_in_all_where_one_fails(tmp_path, monkeypatch):
    """The old state stays, and no other file is left. Then a new state replaces it, and the old parts are removed."""
    pair = Pair(monkeypatch)
    write_halves(pair, tmp_path / "old")
    before = listing(tmp_path)
    real = write_parts.write_part

    def full(path, *rest):
        if jax.process_index() == 1:
            raise OSError(27, "File too large")
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(write_parts, "write_part", full)
        for name in ("old", "new"):
            for number, told in enumerate(write_halves(pair, tmp_path / name, first=1)):
                assert told.startswith("CheckpointError: ")
                assert "cannot be written in parts by 2 processes, which must share its directory" in told
                assert "File too large" in told
                assert ("process 1 of 2 failed" in told) == (number == 0)
    assert listing(tmp_path) == before
    write_halves(pair, tmp_path / "old", first=1)
    assert len(os.listdir(tmp_path)) == 2
    assert read_state_info(tmp_path / "old")["tokens"] == [[1] * len(row) for row in TOKENS]


def test_a_state_of_one_process_that_replaces_another_removes_its_parts(halves, tmp_path):
    index = copied(halves[0], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    params, state = small()
    with file_size_limit(1000), pytest.raises(CheckpointError, match="too large"):
        save_state(index, state, params)
    load(index)
    save_state(index, state, params)
    assert os.listdir(tmp_path) == ["state"]
    load(index)


# Damage


def test_a_part_that_is_missing_cut_or_foreign(halves, tmp_path):
    """Of another run, or of another process."""
    index = copied(halves[0], tmp_path)
    parts, run = parts_of(index), TensorFile(index).metadata["run"].strip('"')
    whole = [part.read_bytes() for part in parts]
    other = parts_of(halves[2])[0].read_bytes()
    for number, data, told in (
        *((number, None, rf".*{number}-of-2.*no such file") for number in (0, 1)),
        *((number, whole[number][:-7], ".*truncated") for number in (0, 1)),
        (0, other, f" .* must be of run '{run}', got '"),
        (0, whole[1], " .* must have the header_sha256 that the index gives"),
    ):
        parts[number].unlink()
        if data is not None:
            parts[number].write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"part {number} of 2:{told}"):
            load(index)
        parts[number].write_bytes(whole[number])
    load(index)


def test_any_changed_byte_is_noticed(halves, tmp_path):
    index = copied(halves[0], tmp_path)
    random = np.random.default_rng(0)
    for path in (index, *parts_of(index)):
        data = path.read_bytes()
        for at in [*random.integers(8, len(data), 25), len(data) - 1]:
            change_byte(path, at)
            with pytest.raises(CheckpointError):
                load(index)
            path.write_bytes(data)
    load(index)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"version": "2"}, "format version 2; this jshadow understands version 1"),
        ({"parts": "[]"}, "parts must be a list of files in a folder beside the index"),
        ({"parts": '[{"file":"../x/y","bytes":1,"header_sha256":""}]'}, "parts must be a list of files"),
        ({"parts": '[{"file":"/y","bytes":1,"header_sha256":""}]'}, "parts must be a list of files"),
        ({"run": '"another"'}, "must be of run 'another', got '"),
        ({"leaves": "{}"}, "must be a slice of a tensor of the state"),
        ({"leaves": '{"last":["int32",[-1]]}'}, "leaves must have a dtype and a shape for each tensor"),
        ({"format": "something else"}, "got a safetensors file of format 'something else'"),
        # with right digests everywhere, the numbers of all slices are still counted
        (lambda x: {"parts": json.dumps(json.loads(x["parts"])[:1])}, r"the parts must have \d+ of \S+, got \d+"),
    ],
)
def test_an_index_that_is_not_as_jshadow_writes_it(halves, tmp_path, texts, told):
    index = copied(halves[0], tmp_path)
    tensors, known = content_of(index)
    seal(index, tensors, known | (texts(known) if callable(texts) else texts))
    with pytest.raises(CheckpointError, match=told):
        load(index)
