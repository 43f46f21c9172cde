"""Saved states that are damaged or half-written: refused by a typed error, and never a wrong state."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_state import equal, file_size_limit, save_small, small

from jshadow import load_state, save_state
from jshadow.engine.saved import file as saved_file
from jshadow.engine.saved import read as saved_read
from jshadow.engine.saved.state import read_state_info
from jshadow.errors import CheckpointError, StateMismatch
from jshadow.weights.convert.safetensors_file import TensorFile

# Damage


def truncate(data: bytes, rng: np.random.Generator) -> bytes:
    """The front of a file."""
    return data[: rng.integers(len(data))]


def append(data: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes more."""
    return data + (bytes(rng.integers(1, 9)) if rng.random() < 0.5 else rng.bytes(rng.integers(1, 99)))


def flip(data: bytes, at: int, bit: int) -> bytes:
    """One bit changed."""
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def flip_in_header(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit of the length or the JSON changed."""
    return flip(data, int(rng.integers(8 + int.from_bytes(data[:8], "little"))), int(rng.integers(8)))


def flip_anywhere(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit changed."""
    return flip(data, int(rng.integers(len(data))), int(rng.integers(8)))


def retype_header(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes of the JSON replaced by others that JSON likes."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        changed[8 + rng.integers(int.from_bytes(data[:8], "little"))] = rng.choice(list(b'0123456789.,:"{}[] \n\\abE-'))
    return bytes(changed)


def swap_blocks(data: bytes, rng: np.random.Generator) -> bytes:
    """Two blocks of one size, each in the other's place."""
    size = int(rng.choice([1, 8, 16, 64, 256]))
    a, b = sorted(rng.choice(len(data) // size, 2, replace=False) * size)
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


MUTATIONS = {truncate: 150, append: 100, flip_in_header: 300, flip_anywhere: 200, retype_header: 150, swap_blocks: 150}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_mutated_file_is_refused_or_the_same(tmp_path, mutation, record_property):
    params, state = small()
    data = save_small(tmp_path / "state")
    info = read_state_info(tmp_path / "state")
    rng = np.random.default_rng(len(mutation.__name__))
    refused = harmless = 0
    for _ in range(MUTATIONS[mutation]):
        mutant = mutation(data, rng)
        (tmp_path / "state").write_bytes(mutant)
        try:
            loaded = load_state(tmp_path / "state", params)
        except (CheckpointError, StateMismatch):
            refused += 1
        else:
            assert equal(loaded, state)
            harmless += 1
        with contextlib.suppress(CheckpointError):
            # it does not read all tensors, but what it says is right
            assert read_state_info(tmp_path / "state") | {"nbytes": 0} == info | {"nbytes": 0}
    record_property("harmless", harmless)
    assert refused >= 0.8 * MUTATIONS[mutation]
    if mutation in (truncate, append, flip_in_header, flip_anywhere):
        assert harmless == 0


def test_white_space_in_the_header_is_no_damage(tmp_path):
    """The digest is of what the header says, so a file that another tool wrote anew can still be right."""
    params, state = small()
    data = save_small(tmp_path / "state")
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + size]), indent=1).encode()
    (tmp_path / "state").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert equal(load_state(tmp_path / "state", params), state)


def test_damage_is_found_before_anything_is_placed(tmp_path, monkeypatch):
    params, _ = small()
    data = save_small(tmp_path / "state")
    (tmp_path / "state").write_bytes(flip(data, len(data) - 1, 0))
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("placed"))
    with pytest.raises(CheckpointError, match=r"damaged: \S+ does not have the SHA-256"):
        load_state(tmp_path / "state", params)


# Writing


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_full_disk_leaves_the_old_file(tmp_path, share):
    params, state = small()
    old = save_small(tmp_path / "state")
    with file_size_limit(int(share * len(old))), pytest.raises(CheckpointError, match=r"cannot be written.*too large"):
        save_small(tmp_path / "state", first=1)
    assert (tmp_path / "state").read_bytes() == old
    assert os.listdir(tmp_path) == ["state"]
    assert save_small(tmp_path / "state", first=1) != old
    assert equal(load_state(tmp_path / "state", params), state)


# Saves the small state over the old file, and stops forever at the given point, having said so.
CHILD = """
import pathlib, sys, time
import small_state
from jshadow.engine.saved import state as saved

def stop_at(call, owner, name):
    real, calls = getattr(owner, name), []
    def wrapped(*args, **options):
        calls.append(name)
        if len(calls) == call:
            print("there", flush=True)
            time.sleep(600)
        return real(*args, **options)
    setattr(owner, name, wrapped)

small_state.small()
point, path = sys.argv[1], pathlib.Path(sys.argv[2])
if point == "tensors":
    stop_at(5, saved, "host_array")
elif point == "rename":
    stop_at(1, pathlib.Path, "replace")
small_state.save_small(path, first=1)
"""


@pytest.mark.parametrize("point", ["tensors", "rename"])
def test_a_killed_writer_leaves_the_old_file(tmp_path, point):
    params, state = small()
    old = save_small(tmp_path / "state")
    paths = [
        str(Path(__file__).parents[1] / "support"),
        str(Path(__file__).parents[2]),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, point, str(tmp_path / "state")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout.readline() == "there\n"
            assert len(os.listdir(tmp_path)) == 2  # it is at work beside the old file
            # a second writer does not take away what the first is at
            mine = save_small(tmp_path / "state", first=2)
            assert len(os.listdir(tmp_path)) == 2
        finally:
            os.kill(child.pid, signal.SIGKILL)
    assert (tmp_path / "state").read_bytes() == mine != old
    assert equal(load_state(tmp_path / "state", params), state)
    assert len(os.listdir(tmp_path)) == 2  # what the killed one had written
    save_small(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    assert (tmp_path / "state").read_bytes() == old


def test_any_error_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def failing(leaf: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr("jshadow.engine.saved.state.host_array", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        save_state(tmp_path / "state", small()[1], small()[0])
    assert not os.listdir(tmp_path)


# Reading


def test_each_tensor_is_read_once_and_hashed_in_threads(tmp_path, monkeypatch):
    params, state = small()
    save_small(tmp_path / "state")
    reads, threads, read, digest = [], set(), TensorFile.read, saved_file.sha256
    together = threading.Barrier(2)

    def hashed(content):
        if threading.current_thread() is not threading.main_thread() and len(threads) < 2:
            threads.add(threading.get_ident())
            together.wait(30)  # breaks where one thread hashes one tensor after the other
        return digest(content)

    monkeypatch.setattr(TensorFile, "read", lambda file, name: reads.append(name) or read(file, name))
    monkeypatch.setattr(saved_file, "sha256", hashed)
    assert equal(load_state(tmp_path / "state", params), state)
    assert len(reads) == len(set(reads))
    assert len(threads) == 2


def test_a_tensor_that_does_not_fit_the_host_twice_is_read_again(tmp_path, monkeypatch):
    params, state = small()
    save_small(tmp_path / "state")
    monkeypatch.setattr(saved_read, "spare_bytes", lambda expected: 0)
    assert equal(load_state(tmp_path / "state", params), state)
