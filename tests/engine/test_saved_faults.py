"""Saved states that are damaged, half-written or of another model, policy or content: refused by name, never wrong."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_tokens
from checkpoint_files import LFS
from safetensors.numpy import save
from sealed import content_of, seal
from small_state import LENGTHS_SMALL, POLICY, SMALL, equal, file_size_limit, save_small, small
from tiny_text import byte_tokenizer

from jshadow import Full, StreamingLLM, load_fitted, load_state, save_fitted, save_state
from jshadow.cache import host_memory, offload
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.saved import file as saved_file
from jshadow.engine.saved import state as saved_read
from jshadow.engine.saved.fitted import read_fitted_info
from jshadow.engine.saved.state import bare, places, read_state_info
from jshadow.errors import CheckpointError, ConfigError, HostMemoryError, StateMismatch
from jshadow.models.config import RopeConfig
from jshadow.policies import Loki
from jshadow.policies.settings import with_settings
from jshadow.weights.convert.safetensors_file import TensorFile
from jshadow.weights.digest import canonical, raw_bytes, sha256
from jshadow.weights.params import Params, init_params


@pytest.fixture
def path(tmp_path):
    """The file of the small state."""
    save_small(tmp_path / "state")
    return tmp_path / "state"


def load(path: Path, policy: Any = None) -> KVState:
    return load_state(path, small()[0], policy)


def same(path: Path) -> bool:
    return equal(load(path), small()[1])


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise error

    return fail


# Damage


def flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def header_of(data: bytes) -> int:
    """The size of the JSON, which begins at byte 8."""
    return int.from_bytes(data[:8], "little")


def retype_header(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes of the JSON replaced by others that JSON likes."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        changed[8 + rng.integers(header_of(data))] = rng.choice(list(b'0123456789.,:"{}[] \n\\abE-'))
    return bytes(changed)


def swap_blocks(data: bytes, rng: np.random.Generator) -> bytes:
    size = int(rng.choice([1, 8, 16, 64, 256]))
    a, b = sorted(rng.choice(len(data) // size, 2, replace=False) * size)
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


MUTATIONS = {
    "truncate": (150, lambda data, rng: data[: rng.integers(len(data))]),
    "append_zeros": (50, lambda data, rng: data + bytes(rng.integers(1, 9))),
    "append": (50, lambda data, rng: data + rng.bytes(rng.integers(1, 99))),
    "flip_in_header": (300, lambda data, rng: flip(data, rng.integers(8 + header_of(data)), int(rng.integers(8)))),
    "flip_anywhere": (200, lambda data, rng: flip(data, rng.integers(len(data)), int(rng.integers(8)))),
    "retype_header": (150, retype_header),
    "swap_blocks": (150, swap_blocks),
}


def same_arrays(path: Path) -> bool:
    """Whether a file has the learned arrays of `LEARNED`."""
    loaded = load_fitted(path, small()[0], LEARNER)
    return all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(learned())))


LEARNER = Loki(budget=9, columns=3, calibration="offline")
READERS = {"a state": (same, read_state_info), "learned arrays": (same_arrays, read_fitted_info)}


def learned() -> dict[str, np.ndarray]:
    shapes = LEARNER.fitted_shapes(SMALL).items()
    return {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_file_is_refused_or_the_same(path, kind, name, record_property):
    is_same, read_info = READERS[kind]
    if kind == "learned arrays":
        save_fitted(path, learned(), LEARNER, small()[0], about={"tokens": 60})
    data, (times, mutation), info = path.read_bytes(), MUTATIONS[name], read_info(path) | {"nbytes": 0}
    rng, harmless = np.random.default_rng(len(name)), 0
    for _ in range(times if kind == "a state" else times // 2):
        path.write_bytes(mutation(data, rng))
        with contextlib.suppress(CheckpointError, StateMismatch):
            assert is_same(path)
            harmless += 1
        with contextlib.suppress(CheckpointError):  # it does not read all tensors, but what it says is right
            assert read_info(path) | {"nbytes": 0} == info
    record_property("harmless", harmless)
    assert harmless <= (0.2 * times if name in ("retype_header", "swap_blocks") else 0)


def test_white_space_in_the_header_is_no_damage(path):
    """The digest is of what the header says, so a file that another tool wrote anew can still be right."""
    data = path.read_bytes()
    size = header_of(data)
    text = json.dumps(json.loads(data[8 : 8 + size]), indent=1).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert same(path)


def test_damage_is_found_before_anything_is_placed(path, monkeypatch):
    """So is a host without the memory. What the host cannot hold twice is read again, and is no damage."""
    data = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(saved_read, "spare_bytes", lambda expected: 0)
        assert same(path)
    with monkeypatch.context() as patch:  # a fetch mode that this machine lacks for such rows
        patch.setattr(offload, "tier_shapes", raising(ConfigError("fetch must be 'device_put' or 'resident'")))
        with pytest.raises(ConfigError, match="state cannot be loaded here: fetch must be 'device_put'"):
            load(path)
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("placed"))
    asked = []
    with monkeypatch.context() as patch:
        lacking = raising(HostMemoryError("too little"))
        patch.setattr(host_memory, "check_host_memory", lambda plans: asked.extend(plans) or lacking())
        with pytest.raises(HostMemoryError):
            load(path)
    assert asked == [small()[1].specs]
    path.write_bytes(flip(data, len(data) - 1, 0))
    with pytest.raises(CheckpointError, match=r"damaged: \S+ does not have the SHA-256"):
        load(path)


# Writing


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_full_disk_leaves_the_old_file(path, share):
    old = path.read_bytes()
    with file_size_limit(int(share * len(old))), pytest.raises(CheckpointError, match=r"cannot be written.*too large"):
        save_small(path, first=1)
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == ["state"]
    assert save_small(path, first=1) != old
    assert same(path)


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
    stop_at(5, saved, "within")  # called once for each tensor that is written
elif point == "rename":
    stop_at(1, pathlib.Path, "replace")
small_state.save_small(path, first=1)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("point", ["tensors", "rename"])
def test_a_killed_writer_leaves_the_old_file(path, point):
    old, folder, support = path.read_bytes(), path.parent, Path(__file__).parents[1] / "support"
    paths = [str(support), str(support.parents[1]), os.environ.get("PYTHONPATH", "")]
    options = {"env": os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}, "text": True}
    with subprocess.Popen([sys.executable, "-c", CHILD, point, str(path)], stdout=subprocess.PIPE, **options) as child:
        try:
            assert child.stdout.readline() == "there\n"
            assert len(os.listdir(folder)) == 2  # it is at work beside the old file
            mine = save_small(path, first=2)  # a second writer does not take away what the first is at
            assert len(os.listdir(folder)) == 2
        finally:
            child.kill()
    assert path.read_bytes() == mine != old
    assert same(path)
    assert len(os.listdir(folder)) == 2  # what the killed one had written
    assert save_small(path) == old
    assert os.listdir(folder) == ["state"]


@pytest.mark.parametrize("call", ["host_array", "within"])  # before the file is begun, and while it is written
def test_any_error_while_writing_leaves_nothing(tmp_path, monkeypatch, call):
    monkeypatch.setattr(saved_read, call, raising(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        save_small(tmp_path / "state")
    assert not os.listdir(tmp_path)


# Reading


def test_each_tensor_is_read_once_and_hashed_in_threads(path, monkeypatch):
    reads, threads, read, digest = [], set(), TensorFile.read, saved_file.sha256
    together = threading.Barrier(2)

    def hashed(content):
        if threading.current_thread() is not threading.main_thread() and len(threads) < 2:
            threads.add(threading.get_ident())
            together.wait(30)  # breaks where one thread hashes one tensor after the other
        return digest(content)

    monkeypatch.setattr(TensorFile, "read", lambda file, name: reads.append(name) or read(file, name))
    monkeypatch.setattr(saved_file, "sha256", hashed)
    assert same(path)
    assert len(reads) == len(set(reads))
    assert len(threads) == 2


# Other files


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file"),
        (b"", "empty file"),
        (LFS, "git lfs pull"),
        (b"short", "5 bytes"),
        *((content, "something else") for content in (b"\x80\x04\x95pickle" * 9, b"\xff" * 99, b"[" * 999)),
        (save({"lengths": np.zeros(2, np.int32)}), "must be a .*format None"),
        (save({"lengths": np.zeros(2, np.int32)}, {"format": "pt"}), "must be a .*format 'pt'"),
        ("directory", "not a regular file"),
    ],
)
def test_no_state_at_all(tmp_path, content, told):
    if content == "directory":
        (tmp_path / "state").mkdir()
    elif content is not None:
        (tmp_path / "state").write_bytes(content)
    told_kinds = {"a saved KV state": (load, read_state_info), "a file of fitted arrays": (same_arrays,)}
    for kind, readers in told_kinds.items():
        for read in readers:
            with pytest.raises(CheckpointError, match=told.replace("must be a ", f"must be {kind}")):
                read(tmp_path / "state")


# Files that another writer sealed well, and whose content is wrong all the same


def reseal(path: Path, edit: Callable[[dict, dict], Any], *, digests: bool = True) -> None:
    """Write a file again with another content and digests that are right for it."""
    tensors, texts = content_of(path)
    texts = {name: text if name == "format" else json.loads(text) for name, text in texts.items()}
    edit(tensors, texts)
    if digests:
        texts["sha256"] = {name: sha256(raw_bytes(value)) for name, value in tensors.items()}
    seal(path, tensors, {name: text if name == "format" else canonical(text).decode() for name, text in texts.items()})


def sets(**fields: Any) -> Callable[[dict, dict], Any]:
    return lambda tensors, texts: texts.update(fields)


def fills(name: str, value: int) -> Callable[[dict, dict], Any]:
    return lambda tensors, texts: tensors[name].fill(value)


def lacks(name: str) -> Callable[[dict, dict], Any]:
    return lambda tensors, texts: texts["policy"]["settings"].pop(name)


WINDOW = "layers.0.live.window.k"  # [B, H, window, D]


def with_all_zeros(tensors: dict, texts: dict) -> None:
    """Make a file of version 3, which has the zeros at the end of each tensor too."""
    texts["version"] = 3
    for name, leaf in places(small()[1]).items():
        array = np.zeros(bare(leaf).shape, bare(leaf).dtype)
        if name in tensors:
            array[tuple(map(slice, tensors[name].shape))] = tensors[name]
            tensors[name] = array


def test_the_seal_itself_is_no_difference(path):
    reseal(path, lambda tensors, texts: None)
    assert same(path)
    short = path.stat().st_size
    reseal(path, with_all_zeros)
    assert path.stat().st_size > short
    assert same(path)
    reseal(path, lambda tensors, texts: texts["sha256"].pop("lengths"), digests=False)
    with pytest.raises(CheckpointError, match="one digest for each tensor"):
        load(path)


MALFORMED = {"config": [1], "policy": {"name": "shadowkv"}, "dtype": "float8", "fetch": "auto", "windows": [1.5]}
WRONG = [
    (sets(version=2), "format version 2; this jshadow understands version 3"),
    (sets(version="x"), "format version x"),
    (lambda t, x: x.pop("version"), "version must be present"),
    (lambda t, x: x.pop("weights"), "weights must be present"),
    *((sets(**{name: value}), f"{name} must be") for name, value in MALFORMED.items()),
    *((sets(**wrong), "batch, capacity must be") for wrong in ({"batch": True}, {"capacity": -1})),
    (sets(windows=[]), "1 layers .* got 0 windows"),
    (sets(windows=[2**31 - 1]), "windows must be at most 17 at capacity=16, got 2147483647"),
    (sets(capacity=257), "context=256.* 257"),
    (sets(capacity=12), "windows must be at most 13"),
    (sets(capacity=15), "tensor"),
    (sets(batch=3), "tensor"),
    (sets(batch=2**31 - 1), r"lengths must have batch=2147483647 rows, got \(2,\)"),
    (sets(fitted_tree=[1]), "no state has these sizes"),
    (sets(fitted_tree={"a": ["F99", [2]]}), "fitted_tree must"),
    (sets(fitted_tree={"a": ["int32", [2]]}), r"fitted\.a: missing"),
    (lambda t, x: t.pop("lengths"), "lengths"),
    (lambda t, x: t.update(stranger=t["lengths"]), "stranger: extra"),
    (lambda t, x: t.pop("tokens.0"), r"tokens\.1: extra"),
    (lambda t, x: t.update({"tokens.1": t["tokens.0"]}), r"tokens\.1 must have 6 ids, got 13"),
    (lambda t, x: t.update({"tokens.1": t["tokens.1"].astype(np.float32)}), r"tokens\.1: extra"),
    (lambda t, x: t.update(lengths=t["lengths"][:1]), "lengths must have batch=2 rows"),
    (lambda t, x: t.update({WINDOW: t[WINDOW][:1, :, :1]}), rf"{WINDOW}: expected"),
    (lambda t, x: t.update({WINDOW: t[WINDOW][:, :, :0]}), rf"{WINDOW}: expected"),
    (lambda t, x: t.update({WINDOW: np.pad(t[WINDOW], ((0, 1), *[(0, 0)] * 3))}), rf"{WINDOW}: expected"),
    (lambda t, x: t.update(lengths=t["lengths"].astype(np.uint32)), "lengths: expected .*I32.*got .*U32"),
    (lambda t, x: t.update(lengths=t["lengths"].astype(np.int64)), "I64"),
    (fills("lengths", 17), r"capacity=16.*got \[17, 17\]"),
    (fills("lengths", -1), r"got \[-1, -1\]"),
    (fills("layers.0.frozen.chunks", -7), "room of each row must be at least 0"),
]
# A policy that is none here, or that lacks a setting.
FOREIGN = [
    (sets(policy={"name": "shadowkv", "settings": {"speed": 1}}), "'speed'"),
    (sets(policy={"name": "shadowkv", "settings": {"rank": 99}}), "rank"),
    (sets(policy={"name": "shadowkv", "settings": {"rank": [1]}}), "rank"),
    (sets(policy={"name": "other", "settings": {}}), "policy.name: file has 'other'.*pass policy="),
    *(
        (lacks(name), rf"policy\.settings\.{name}: file has nothing")
        for name in ("rank", "keys.weights", "landmarks.tokens")
    ),
]


@pytest.mark.parametrize(
    ("edit", "told", "error"),
    [*((*row, CheckpointError) for row in WRONG), *((*row, StateMismatch) for row in FOREIGN)],
)
def test_a_well_sealed_file_with_a_wrong_content(path, edit, told, error):
    reseal(path, edit)
    with pytest.raises(error, match=told):
        load(path)
    with contextlib.suppress(CheckpointError):
        read_state_info(path)


# Files of another model, policy, dtype or tokenizer


def lines_of(path: Path, params: Params, policy: Any = None) -> list[str]:
    with pytest.raises(StateMismatch) as caught:
        load_state(path, params, policy)
    head, *lines = str(caught.value).split("\n  ")
    assert head.endswith(f"{len(lines)} difference(s):")
    assert all(": file has " in line for line in lines)
    return [line.split(":")[0] for line in lines]


def narrow() -> Params:
    leaves = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), small()[0].weights)
    return Params(jax.device_put(leaves), SMALL)


WIDER = dataclasses.replace(SMALL, ffn_dim=12, rope=RopeConfig(theta=5e5), eos_ids=(3,))
KEYS = [f"policy.settings.{name}" for name in ("keys", "keys.bits", "keys.profile", "rank")]


@pytest.mark.parametrize(
    ("make", "policy", "fields"),
    [
        (lambda: init_params(WIDER), None, ["config.eos_ids", "config.ffn_dim", "config.rope.theta", "weights"]),
        (lambda: init_params(dataclasses.replace(SMALL, num_layers=2)), None, ["config.num_layers", "weights"]),
        (lambda: init_params(SMALL, seed=1), None, ["weights"]),
        (narrow, None, ["dtype", "weights"]),
        (lambda: small()[0], dataclasses.replace(POLICY, rank=3), ["policy.settings.rank"]),
        (lambda: small()[0], with_settings(POLICY, {"rank": None, "keys": "transform"}), KEYS),
        (
            lambda: small()[0],
            with_settings(POLICY, {"landmarks.tokens": 2, "values.dtype": "int8"}),
            ["policy.settings.landmarks.tokens", "policy.settings.values.dtype"],
        ),
    ],
)
def test_another_model_or_policy_is_refused_field_by_field(path, make, policy, fields):
    assert lines_of(path, make(), policy) == fields


def test_another_tokenizer_is_refused(path):
    plain, state = small()
    params, other, third = (Params(plain.weights, SMALL, byte_tokenizer()) for _ in range(3))
    save_state(path, state, params)
    assert equal(load_state(path, other), state)
    third.tokenizer.chat_template += "!"
    for params in (third, plain):
        assert lines_of(path, params) == ["tokenizer"]


def test_everything_at_once_is_one_error(path):
    config = dataclasses.replace(SMALL, ffn_dim=4)
    other = Params(init_params(config, dtype="bfloat16").weights, config, byte_tokenizer())
    found = lines_of(path, other, Full())
    assert {"config.ffn_dim", "dtype", "weights", "tokenizer", "policy.name"} <= set(found)
    assert "policy.name" in lines_of(path, small()[0], StreamingLLM())


@dataclasses.dataclass(frozen=True)
class Unlisted(StreamingLLM):
    """A policy that is not in POLICIES."""

    name = "unlisted"


def test_a_policy_that_is_not_listed_must_be_given(path):
    params, own = small()[0], Unlisted(sinks=1, window=6)
    _, state = decode.prefill(params, random_tokens(2, 13, config=SMALL), LENGTHS_SMALL, own, capacity=16)
    save_state(path, state, params)
    assert lines_of(path, params) == ["policy.name"]
    assert lines_of(path, params, Unlisted(sinks=2, window=6)) == ["policy.settings.sinks"]
    assert equal(load(path, Unlisted(sinks=1, window=6)), state)
