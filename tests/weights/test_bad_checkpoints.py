"""Damaged checkpoints and conversions that fail: each is refused by name, and nothing is left behind."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import LFS, TINY, assert_same, edit_json, edit_tensors, refused, shard, tiny_directory, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_state import file_size_limit

from jshadow.cli.main import main
from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.weights.convert import convert
from jshadow.weights.convert.files import workspace
from jshadow.weights.params import load, save

ROOT = Path(__file__).resolve().parents[2]


def test_weights_that_do_not_fit_the_config(tmp_path):
    directory, _ = tiny_directory(tmp_path / "m")
    convert(directory, tmp_path / "c", "float32", format="orbax")
    edit_json(tmp_path / "c" / "config.json", intermediate_size=TINY.ffn_dim + 8, attention_bias=True)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", verify=False)
    message = str(caught.value)
    assert "layer_0/attention/q/bias: missing" in message
    assert f"layer_1/mlp/up/kernel: misshaped, expected [32, {TINY.ffn_dim + 8}], got [32, {TINY.ffn_dim}]" in message
    edit_json(tmp_path / "c" / "config.json", attention_bias=None, intermediate_size=TINY.ffn_dim, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="layer_1/mlp/up/kernel: extra"):
        load(tmp_path / "c", verify=False)


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_nan_is_neither_converted_nor_saved(tmp_path, format):
    directory, params = tiny_directory(tmp_path / "m")
    edit_tensors(directory, lambda held: held["model.norm.weight"].__setitem__(3, np.nan))
    with pytest.raises(CheckpointError, match=r"norm[./](weight|scale): 1 of 32 values are NaN or Inf"):
        convert(directory, tmp_path / "out", "float32", format=format)
    params.weights["norm"]["scale"] = np.where(np.arange(32) == 3, np.inf, 1).astype(np.float32)
    with pytest.raises(CheckpointError, match="1 of 32 values are NaN or Inf"):
        save(params, tmp_path / "out", format=format)
    assert os.listdir(tmp_path) == ["m"]


def test_an_overflow_while_casting_is_refused(tmp_path):
    directory, _ = tiny_directory(tmp_path / "m")
    edit_tensors(directory, lambda held: held["model.norm.weight"].__setitem__(3, 1e6))
    convert(directory, tmp_path / "c", "float32", format="orbax")
    with pytest.raises(CheckpointError, match="norm/scale: 1 values are NaN or Inf in float16"):
        load(tmp_path / "c", "float16")


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_an_unknown_variant_is_refused_and_named(tmp_path, format):
    directory, _ = tiny_directory(tmp_path / "m")
    edit_json(directory / "config.json", rope_scaling={"rope_type": "mrope", "factor": 2.0})
    with pytest.raises(ConfigError, match="mrope"):
        convert(directory, tmp_path / "out", format=format)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
@pytest.mark.parametrize("limit", [0, 2_000, 20_000])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, format, limit):
    directory, params = tiny_directory(tmp_path / "m")
    with file_size_limit(limit), pytest.raises(CheckpointError, match=r"out|weights|config"):
        convert(directory, tmp_path / "out", "float32", format=format)
    assert os.listdir(tmp_path) == ["m"]
    with file_size_limit(limit), pytest.raises(CheckpointError):
        save(params, tmp_path / "out", format=format)
    assert os.listdir(tmp_path) == ["m"]
    convert(directory, tmp_path / "out", "float32", format=format)
    assert_same(load(tmp_path / "out", "float32"), params)


@pytest.mark.parametrize("late", [0.05, 0.15])
def test_what_a_late_writer_makes_is_removed_too(tmp_path, late):
    """A thread of a failed writer creates the directory again after it was removed."""

    def write(made):
        time.sleep(late)
        made.mkdir(parents=True, exist_ok=True)
        (made / "file").write_text("late")

    def fail():
        with workspace(tmp_path, ".out.partial-") as made:
            threads.append(threading.Thread(target=write, args=(made,)))
            threads[0].start()
            raise KeyboardInterrupt

    threads: list[threading.Thread] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    threads[0].join()
    assert os.listdir(tmp_path) == []


KINDS = ("gguf", "directory", "orbax")


def source_of(kind, tmp_path):
    """What a kind of conversion reads, in which format it writes, and the params."""
    directory, params = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY) if kind == "gguf" else directory
    return source, "orbax" if kind == "orbax" else "huggingface", params


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_conversion_leaves_nothing(tmp_path, error, kind):
    source, format, _ = source_of(kind, tmp_path)
    before = sorted(os.listdir(tmp_path))

    def stop(done, total):
        if done == 5:
            raise error("stop")

    expected = CheckpointError if error is OSError else error
    with pytest.raises((expected, CheckpointError) if kind == "orbax" else expected):
        convert(source, tmp_path / "out", progress=stop, format=format)
    assert sorted(os.listdir(tmp_path)) == before


KILLED = """
import signal, sys, time
from jshadow.weights.convert import convert
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits a deaf one
seconds = 3 if sys.argv[4] == "orbax" else 30
wait = lambda done, _: done == 6 and (print("go", flush=True), time.sleep(seconds))
convert(*sys.argv[1:4], format=sys.argv[4], progress=wait)
"""
SIGNALS = [
    pytest.param(kind, sign, marks=() if (kind, sign) == ("gguf", signal.SIGINT) else pytest.mark.slow)
    for kind in ("gguf", "orbax")
    for sign in (signal.SIGINT, signal.SIGKILL)
]


@pytest.mark.process
@pytest.mark.parametrize(("kind", "sign"), SIGNALS)
def test_a_killed_conversion_leaves_no_target_and_restarts_cleanly(tmp_path, kind, sign):
    source, format, params = source_of(kind, tmp_path)
    before = sorted(os.listdir(tmp_path))
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), "float32", format]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "go\n"
        time.sleep(0.2)
        if kind == "gguf":  # a second conversion at the same time leaves the first one's files alone

            def fail(done, total):
                raise RuntimeError("stop")

            with pytest.raises(RuntimeError):
                convert(source, tmp_path / "out", progress=fail)
            assert len([name for name in os.listdir(tmp_path) if "partial" in name]) == 1
        process.send_signal(sign)
        assert process.wait(60) != 0
    assert not (tmp_path / "out").exists()
    if kind == "gguf" and sign is signal.SIGINT:
        assert sorted(os.listdir(tmp_path)) == before
    convert(source, tmp_path / "out", "float32", format=format)  # and sweeps what the killed one could not
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out"])
    assert_same(load(tmp_path / "out", "float32"), params)


@pytest.mark.parametrize("mesh", [3, "cpu", [1]])
def test_a_mesh_is_a_mesh(tmp_path, mesh):
    directory, _ = tiny_directory(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"mesh must be a jax\.sharding\.Mesh"):
        load(directory, mesh=mesh)


def test_paths_are_paths(tmp_path):
    directory, params = tiny_directory(tmp_path / "m")
    calls = [
        lambda: convert(None, tmp_path / "o"),
        lambda: convert(directory, None),
        lambda: save(params, None),
        lambda: load(None),
        lambda: convert(directory, "a\0b"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="must be a string or a path"):
            call()
    for size in ("inf", "nan", "0", "-1"):
        assert main(["convert", str(directory), str(tmp_path / "o"), "--shard-gb", size]) == 2


def test_what_may_not_be_read_is_told(tmp_path, monkeypatch):
    """The error is that of a file of a different user. It is simulated, because root can read all files."""
    directory, _ = tiny_directory(tmp_path / "m")
    convert(directory, tmp_path / "c", "float32")
    really = Path.open
    for name in ("config.json", "model.safetensors", "manifest.json"):

        def closed(path: Path, *args: Any, name: str = name, **options: Any) -> Any:
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return really(path, *args, **options)

        monkeypatch.setattr(Path, "open", closed)
        for call in (lambda: load(tmp_path / "c"), lambda: convert(tmp_path / "c", tmp_path / "o")):
            with pytest.raises(CheckpointError, match=f"{name}.*Permission denied"):
                call()
        monkeypatch.setattr(Path, "open", really)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "pickle"}, "format must be one of"),
        ({"shard_bytes": 0}, "shard_bytes must be"),
        ({"shard_bytes": True}, "shard_bytes must be"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"dtype": "int4"}, "dtype"),
        ({"dtype": None}, "dtype"),
    ],
)
@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_bad_settings(tmp_path, kind, options, told):
    source, _, _ = source_of(kind, tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=told):
        convert(source, tmp_path / "out", **options)
    assert sorted(os.listdir(tmp_path)) == before


def files(directory: Path) -> list[str]:
    """The names of all files below a directory."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest_file(directory: Path) -> Path:
    """The largest file below a directory."""
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def grow(path: Path) -> None:
    """Append a byte to a file."""
    path.write_bytes(path.read_bytes() + b"x")


@pytest.fixture(params=["huggingface", "orbax"])
def converted(request, tmp_path):
    """A converted directory of either format."""
    directory, _ = tiny_directory(tmp_path / "m", "bfloat16")
    convert(directory, tmp_path / "c", format=request.param)
    return tmp_path / "c"


CHANGES = {
    "a bit": (flip, "other bytes than when it was written"),
    "a byte more": (grow, "bytes when it was written"),
    "gone": (Path.unlink, "missing"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["weights", "config"])
def test_a_manifest_that_does_not_match_is_refused_with_the_file_s_name(converted, tmp_path, change, which):
    path = converted / "config.json" if which == "config" else largest_file(converted)
    act, told = CHANGES[change]
    act(path)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load(converted)
    assert path.name in str(caught.value)
    if which == "weights" and (converted / "weights").exists():
        assert told in str(caught.value)
    before = files(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=path.name):
        convert(converted, tmp_path / "out")
    assert files(tmp_path) == before


def test_what_the_manifest_does_not_name_may_change(converted):
    params = load(converted)
    (converted / "notes.txt").write_text("mine")
    assert_same(load(converted), params)
    edit_json(converted / "config.json", note="mine")
    with pytest.raises(CheckpointError, match=r"config\.json: \d+ bytes when it was written"):
        load(converted)
    assert_same(load(converted, verify=False), params)


BAD_MANIFESTS = {
    "version": ({"version": 2}, "version=2"),
    "format": ({"format": "zip"}, "format='zip'"),
    "no files": ({"files": {}}, "files must map"),
    "files kind": ({"files": {"config.json": 3}}, "files must map"),
    "outside": ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "'../x'"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest_is_refused(converted, case):
    changes, told = BAD_MANIFESTS[case]
    edit_json(converted / "manifest.json", **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        load(converted)
    assert told in str(caught.value)


def test_an_orbax_directory_in_part_is_refused(tmp_path):
    directory, _ = tiny_directory(tmp_path / "m")
    convert(directory, tmp_path / "c", "float32", format="orbax")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="written or copied in part"):
        load(tmp_path / "c")
    refused(tmp_path / "c", tmp_path / "out", CheckpointError, ("written or copied in part",))


def test_weights_that_the_manifest_does_not_name(converted):
    told = json.loads((converted / "manifest.json").read_text())
    kept = {name: entry for name, entry in told["files"].items() if name == "config.json"}
    edit_json(converted / "manifest.json", files=kept)
    with pytest.raises(CheckpointError, match="not in the manifest"):
        load(converted)
    edit_json(converted / "manifest.json", files=told["files"] | {"x" * 300: {"bytes": 1, "sha256": ""}})
    with pytest.raises(CheckpointError, match="xxx: missing"):
        load(converted)


Q0 = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def set_value(name: str, value: float) -> Callable[[Path], None]:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].flat[3] = value

    return lambda directory: edit_tensors(directory, edit)


def only_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def weights_become(content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / "model.safetensors").write_bytes(content) and None


def config_sets(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / "config.json", **changes)


def config_text(text: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / "config.json").write_bytes(text) and None


def index_names(name: str) -> Callable[[Path], None]:
    def breaks(directory: Path) -> None:
        shard(directory)
        edit_json(directory / "model.safetensors.index.json", weight_map={"a": name})

    return breaks


W = "model.safetensors"
BAD: dict[str, tuple[Callable[[Path], Any], type[JshadowError], tuple[str, ...]]] = {
    "no directory": (shutil.rmtree, CheckpointError, ("does not exist",)),
    "no config": (lambda d: (d / "config.json").unlink(), CheckpointError, ("config.json", "no such file")),
    "config garbage": (config_text(b"{'a': 1"), CheckpointError, ("config.json", "does not parse")),
    "config binary": (config_text(b"\xff\xfe\x00"), CheckpointError, ("config.json", "does not parse")),
    "config deep": (config_text(b"[" * 100_000), CheckpointError, ("config.json", "does not parse")),
    "config list": (config_text(b"[1]"), CheckpointError, ("config.json", "list")),
    "config NaN": (config_text(b'{"rms_norm_eps": NaN}'), CheckpointError, ("config.json", "NaN")),
    "config empty": (config_text(b""), CheckpointError, ("config.json", "empty")),
    "model_type": (config_sets(model_type="gpt9"), ConfigError, ("model_type", "gpt9", "llama")),
    "quantized": (config_sets(quantization_config={"quant_method": "q"}), ConfigError, ("quantization_config", "'q'")),
    "remote code": (config_sets(auto_map={"AutoModel": "x.Y"}), ConfigError, ("auto_map", "x.Y")),
    "lacks key": (config_sets(hidden_size=None), ConfigError, ("lacks hidden_size",)),
    "kind of theta": (config_sets(rope_theta="big"), ConfigError, ("config.json", "big")),
    "kind of eps": (config_sets(rms_norm_eps="x"), ConfigError, ("config.json", "wrong type")),
    "rope kind": (config_sets(rope_scaling={"rope_type": "yarn"}), ConfigError, ("rope_type", "yarn")),
    "huge size": (config_sets(vocab_size=10**12), ConfigError, ("vocab_size", "2147483647", "1000000000000")),
    "huge depth": (config_sets(num_hidden_layers=10**9), CheckpointError, ("num_hidden_layers", "1000000000")),
    "eos": (config_sets(eos_token_id=TINY.vocab_size), ConfigError, ("eos", str(TINY.vocab_size))),
    "generation eos": (
        lambda d: edit_json(d / "generation_config.json", eos_token_id=[0, 9999]),
        ConfigError,
        ("eos_ids", "9999"),
    ),
    "only .bin": (only_pickle, CheckpointError, ("pytorch_model.bin", "refused", "safetensors")),
    "no weights": (lambda d: (d / W).unlink(), CheckpointError, ("must hold model.safetensors",)),
    "no index": (lambda d: (d / W).rename(d / "a.safetensors"), CheckpointError, ("a.safetensors", "index.json")),
    "missing shard": (lambda d: (d / shard(d)[1]).unlink(), CheckpointError, ("1 of 3 shards", "model-00002-of-00003")),
    "index outside": (index_names("../x.safetensors"), CheckpointError, ("weight_map", "../x.safetensors")),
    "index pickle": (index_names("x.bin"), CheckpointError, ("weight_map", "x.bin")),
    "index empty": (
        lambda d: (shard(d), edit_json(d / "model.safetensors.index.json", weight_map={})),
        CheckpointError,
        ("weight_map",),
    ),
    "truncated data": (lambda d: cut(d / W, 0.7), CheckpointError, (W, "interrupted download", "expects")),
    "truncated header": (lambda d: cut(d / W, 0.01), CheckpointError, (W, "interrupted download", "header alone")),
    "trailing bytes": (lambda d: (d / W).write_bytes((d / W).read_bytes() + b"x"), CheckpointError, (W, "damaged")),
    "garbage": (weights_become(b"\x93NUMPY garbage" * 50), CheckpointError, (W, "something else")),
    "five bytes": (weights_become(b"short"), CheckpointError, (W, "5 bytes")),
    "huge header": (weights_become(struct.pack("<Q", 2**62) + b"{}"), CheckpointError, (W, "something else")),
    "bad header": (weights_become(struct.pack("<Q", 8) + b"{'a': 1}"), CheckpointError, (W, "does not parse")),
    "empty file": (weights_become(b""), CheckpointError, (W, "0 bytes")),
    "LFS pointer": (weights_become(LFS), CheckpointError, (W, "Git LFS pointer", "git lfs pull")),
    "a directory": (lambda d: ((d / W).unlink(), (d / W).mkdir()), CheckpointError, (W, "not a regular file")),
    "missing": (lambda d: edit_tensors(d, lambda t: t.pop(Q0)), CheckpointError, (Q0, "missing")),
    "extra": (
        lambda d: edit_tensors(d, lambda t: t.update(stranger=np.ones(2, np.float32))),
        CheckpointError,
        ("stranger", "extra"),
    ),
    "stray bias": (
        lambda d: edit_tensors(d, lambda t: t.update({Q0.replace("weight", "bias"): np.ones(32, np.float32)})),
        CheckpointError,
        ("q_proj.bias", "extra"),
    ),
    "misshaped": (config_sets(intermediate_size=48), CheckpointError, ("up_proj", "[48, 32]", "[64, 32]")),
    "integers": (
        lambda d: edit_tensors(d, lambda t: t.update({Q0: t[Q0].astype(np.int8)})),
        CheckpointError,
        (Q0, "I8", "BF16"),
    ),
    "NaN": (set_value(Q0, np.nan), CheckpointError, (Q0, "1 of 1024 values are NaN or Inf")),
    "Inf": (set_value(EMBED, -np.inf), CheckpointError, (EMBED, "NaN or Inf")),
    "tokenizer": (
        lambda d: (d / "tokenizer.json").write_text("{}"),
        CheckpointError,
        ("tokenizer files",),
    ),
    "tokenizer code": (
        lambda d: ((d / "tokenizer.json").touch(), edit_json(d / "tokenizer_config.json", auto_map={"a": "b"})),
        CheckpointError,
        ("tokenizer_config.json", "auto_map"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoint_is_refused_by_name(tmp_path: Path, case: str) -> None:
    breaks, error, fragments = BAD[case]
    directory, _ = tiny_directory(tmp_path / "m")
    breaks(directory)
    with pytest.raises(error) as caught:
        load(directory)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("case", [case for case in BAD if not case.startswith("tokenizer")])
def test_convert_refuses_the_same_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    BAD[case][0](directory)
    with pytest.raises(BAD[case][1]):
        convert(directory, tmp_path / "out")
    assert set(os.listdir(tmp_path)) <= {"m"}


def test_all_misfits_are_in_one_error(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")

    def edit(tensors: dict[str, np.ndarray]) -> None:
        del tensors[Q0]
        tensors["stranger"] = np.ones(2, np.float32)
        tensors[EMBED] = np.full_like(tensors[EMBED], np.nan)
        tensors["model.norm.weight"] = np.ones(31, np.float32)

    edit_tensors(directory, edit)
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    for fragment in ("4 tensor(s)", Q0, "missing", "stranger", EMBED, "NaN", "model.norm.weight", "[32]", "[31]"):
        assert fragment in str(caught.value)


def test_overflow_in_float16_is_refused(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    set_value(Q0, 1e5)(directory)
    load(directory, "bfloat16")
    with pytest.raises(CheckpointError, match="float16"):
        load(directory, "float16")


@pytest.mark.timeout(300)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_files_load_or_raise_ours(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory, _ = tiny_directory(Path(folder) / "m", num_layers=1)
        path = directory / data.draw(st.sampled_from(["config.json", W, "generation_config.json"]))
        content = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little") if path.name == W else len(content)
        for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=6)):
            content[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789-e.,:[]{}" ')))
        path.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
        try:
            load(directory)
        except JshadowError:
            return
