"""Saved states in parts: which slices a process writes and reads, and parts that are missing, damaged or foreign.

Two threads stand for two processes. Real ones write in `test_saved_mesh.py`.
"""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from small_state import LENGTHS_SMALL, equal, file_size_limit, save_small, small

from jshadow import load_state, save_state
from jshadow.engine.saved import blocks, together, write_parts
from jshadow.engine.saved.blocks import block_digests, read_slice
from jshadow.engine.saved.file import header_digest
from jshadow.engine.saved.layout import Split
from jshadow.engine.saved.slices import cut, padded, runs, sizes, within
from jshadow.engine.saved.state import StateContent, read_state_info
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import TAGS, TensorFile, encode_header, write_payload, write_tensors

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
        """What all say of a thing."""
        self.told[self.own.number] = value
        self.barrier.wait(ANSWER_SECONDS)
        told = list(self.told)
        self.barrier.wait(ANSWER_SECONDS)
        return told

    def call(self, work):
        """The results of `work(number)` of both, or their errors."""

        def one(number):
            self.own.number = number
            try:
                return work(number)
            except CheckpointError as error:
                return f"{type(error).__name__}: {error}"

        return [future.result() for future in [self.pool.submit(one, number) for number in (0, 1)]]


def half(number, name, leaf):
    """What a process writes of a tensor: its part along the longest axis, or nothing of a row of one number."""
    axis = int(np.argmax(leaf.shape))
    middle = (leaf.shape[axis] + 1) // 2
    ends = [(0, size) for size in leaf.shape]
    ends[axis] = (0, middle) if number == 0 else (middle, leaf.shape[axis])
    place = tuple(ends)
    part = np.asarray(leaf)[tuple(slice(*end) for end in place)]
    return Split(leaf.shape, np.dtype(leaf.dtype), ((place, part),) if part.size else ())


def write_halves(pair, path, first=3):
    """Write the small state in two parts. Return its bytes as both tell them, or the errors."""
    params, state = small()
    content = StateContent.of(state, params, [[first] * len(row) for row in TOKENS], {})

    def work(number):
        leaves = {
            name: leaf if name in content.index else half(number, name, leaf) for name, leaf in content.leaves.items()
        }
        return write_parts.write_parts(path, content.record.texts(), leaves, content.index)

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
    """The parts of a state, by the number of their process."""
    folder = json.loads(TensorFile(index).metadata["parts"])[0]["file"].split("/")[0]
    return sorted((index.parent / folder).iterdir())


def copied(index, folder):
    """Copy a state in parts to another folder. Return its index."""
    parts = parts_of(index)[0].parent
    shutil.copytree(parts, folder / parts.name)
    return shutil.copy(index, folder / index.name)


def change_byte(path, at):
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def load(index):
    return load_state(index, small()[0])


# What is written and read


def test_the_parts_are_the_state(halves, tmp_path):
    """Saved again by one process, it is the file of one process: of the format and version that it always had."""
    index, told, _ = halves
    loaded = load(index)
    assert equal(loaded, small()[1])
    save_state(tmp_path / "again", loaded, small()[0], tokens=TOKENS)
    assert (tmp_path / "again").read_bytes() == save_small(tmp_path / "alone", first=3)
    metadata = TensorFile(tmp_path / "alone").metadata
    assert (metadata["format"], metadata["version"]) == ("jshadow KV state", "3")
    assert {"run", "parts", "leaves"} & metadata.keys() == set()
    assert told == [index.stat().st_size + sum(part.stat().st_size for part in parts_of(index))] * 2


def test_no_number_is_in_both_parts(halves):
    index = TensorFile(halves[0])
    parts = [TensorFile(path) for path in parts_of(halves[0])]
    assert len(parts) == 2
    assert not parts[0].shapes.keys() & parts[1].shapes.keys()
    leaves = json.loads(index.metadata["leaves"])
    counts = [sum(int(np.prod(shape)) for shape in part.shapes.values()) for part in parts]
    assert sum(counts) == sum(int(np.prod(shape)) for key, (_, shape) in leaves.items() if key not in index.shapes)
    assert min(counts) > 0.4 * sum(counts)


def test_the_index_tells_of_the_state_without_the_parts(halves, tmp_path):
    index = halves[0]
    save_small(tmp_path / "alone", first=3)
    info, alone = read_state_info(index), read_state_info(tmp_path / "alone")
    assert info["tokens"] == alone["tokens"] == TOKENS
    assert info["nbytes"] == halves[1][0]
    assert {key for key in info if info[key] != alone[key]} == {"format", "version", "nbytes"}
    shutil.copy(index, tmp_path / "index")
    assert read_state_info(tmp_path / "index")["lengths"] == LENGTHS_SMALL.tolist()


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
    """The names and contents of all files below a folder."""
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


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_is_missing_or_cut(halves, tmp_path, number):
    index = copied(halves[0], tmp_path)
    part = parts_of(index)[number]
    data = part.read_bytes()
    part.unlink()
    with pytest.raises(CheckpointError, match=rf"part {number} of 2: .*{number}-of-2.*no such file"):
        load(index)
    part.write_bytes(data[:-7])
    with pytest.raises(CheckpointError, match=rf"part {number} of 2: .*truncated"):
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


def test_a_part_of_another_run_or_of_another_process(halves, tmp_path):
    index = copied(halves[0], tmp_path)
    first, second = parts_of(index)
    data = first.read_bytes()
    shutil.copy(parts_of(halves[2])[0], first)
    run = TensorFile(index).metadata["run"].strip('"')
    with pytest.raises(CheckpointError, match=rf"part 0 of 2: .* must be of run '{run}', got '"):
        load(index)
    shutil.copy(second, first)
    with pytest.raises(CheckpointError, match=r"part 0 of 2: .* must have the header_sha256 that the index gives"):
        load(index)
    first.write_bytes(data)
    load(index)


def edited(path, **texts):
    """Change texts in the metadata of a file, and give it the SHA-256 of its new header."""
    file = TensorFile(path)
    known = {**file.metadata, **texts}
    known.pop("header_sha256")
    dtypes = {tag: name for name, tag in TAGS.items()}
    layout = {name: (dtypes[file.tags[name]], shape) for name, shape in file.shapes.items()}
    values = {name: file.read(name) for name in layout}
    table = {name: (file.tags[name], file.shapes[name]) for name in layout}
    with path.open("wb") as opened:
        opened.write(encode_header(layout, known | {"header_sha256": header_digest(known, table)}))
        write_payload(opened, layout, values.__getitem__)


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
    ],
)
def test_an_index_that_is_not_as_jshadow_writes_it(halves, tmp_path, texts, told):
    index = copied(halves[0], tmp_path)
    edited(index, **texts)
    with pytest.raises(CheckpointError, match=told):
        load(index)


def test_a_slice_that_is_missing_from_a_part(halves, tmp_path):
    """With right digests everywhere, the numbers of all slices are still counted."""
    index = copied(halves[0], tmp_path)
    entries = json.loads(TensorFile(index).metadata["parts"])
    edited(index, parts=json.dumps(entries[:1]))
    with pytest.raises(CheckpointError, match=r"the parts must have \d+ of \S+, got \d+"):
        load(index)
