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
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import seeded
from checkpoint_files import LFS, TINY, assert_same, bare, edit_json, edit_tensors, refused, shard, tiny_directory
from few import quick
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_state import file_size_limit

from jshadow.cli.main import main
from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.weights.convert import convert
from jshadow.weights.convert.files import workspace
from jshadow.weights.params import init_params, load, save

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("huggingface", "orbax")
formats = pytest.mark.parametrize("format", FORMATS)


def test_weights_that_do_not_fit_the_config(tmp_path, directory):
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


def test_layers_whose_tensors_do_not_have_the_heads_of_the_config(tmp_path):
    """Gemma 4's layers differ: the wrong ones are named, and so are values that the config makes from keys."""
    folder = seeded.write_checkpoint("gemma4", tmp_path / "m")
    edit_json(folder / "config.json", per_layer_config={str(layer): {"head_dim": 32} for layer in (1, 2)})
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "layers.1.self_attn.k_proj.weight: misshaped, expected [64, 48], got [24, 48]" in message
    assert "layers.0.self_attn" not in message
    edit_json(folder / "config.json", attention_k_eq_v=False, per_layer_config=None, global_head_dim=24)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj\.weight: missing"):
        load(folder)
    edit_json(folder / "config.json", layer_types=3 * ["full_attention"], attention_k_eq_v=True)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_proj\.weight: extra"):
        load(folder)


@formats
def test_an_overflow_while_casting_is_refused(tmp_path, directory, format):
    edit_tensors(directory, lambda held: held["model.norm.weight"].__setitem__(3, 1e6))
    convert(directory, tmp_path / "c", "float32", format=format)
    load(tmp_path / "c", "bfloat16")
    told = {"huggingface": "model.norm.weight", "orbax": "norm/scale"}[format]
    with pytest.raises(CheckpointError, match=f"{told}: 1 (of 32 )?values are NaN or Inf in float16"):
        load(tmp_path / "c", "float16")


@formats
@pytest.mark.parametrize("limit", [0, 2_000, 20_000])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, directory, params, format, limit):
    for write in (
        lambda: convert(directory, tmp_path / "out", "float32", format=format),
        lambda: save(params, tmp_path / "out", format=format),
    ):
        with file_size_limit(limit), pytest.raises(CheckpointError, match=r"out|weights|config"):
            write()
        assert os.listdir(tmp_path) == ["m"]
    convert(directory, tmp_path / "out", "float32", format=format)
    assert_same(load(tmp_path / "out", "float32"), params)


@pytest.mark.parametrize("late", [0.05, 0.15])
def test_what_a_late_writer_makes_is_removed_too(tmp_path, late):
    """A thread of a failed writer creates the directory again after it was removed."""

    def write(made):
        made.mkdir(parents=True, exist_ok=True)
        (made / "file").write_text("late")

    def fail():
        with workspace(tmp_path, ".out.partial-") as made:
            timers.append(threading.Timer(late, write, [made]))
            timers[0].start()
            raise KeyboardInterrupt

    timers: list[threading.Timer] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    timers[0].join()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
@pytest.mark.parametrize(
    ("kind", "format"), [("source", "huggingface"), ("directory", "huggingface"), ("directory", "orbax")]
)
def test_a_failed_conversion_leaves_nothing(tmp_path, request, error, kind, format):
    source, stop = request.getfixturevalue(kind), Mock(side_effect=[None] * 4 + [error("stop")])
    before = sorted(os.listdir(tmp_path))
    expected = CheckpointError if error is OSError else error
    with pytest.raises((expected, CheckpointError) if format == "orbax" else expected):
        convert(source, tmp_path / "out", progress=stop, format=format)
    assert stop.call_count == 5
    assert sorted(os.listdir(tmp_path)) == before


KILLED = """
import signal, sys, time
from jshadow.weights.convert import convert
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits a deaf one
seconds = 3 if sys.argv[4] == "orbax" else 30
wait = lambda done, _: done == 6 and (print("go", flush=True), time.sleep(seconds))
convert(*sys.argv[1:4], format=sys.argv[4], progress=wait)
"""
SIGNALS = [(kind, sign) for kind in ("gguf", "orbax") for sign in (signal.SIGINT, signal.SIGKILL)]


@pytest.mark.process
@pytest.mark.parametrize(("kind", "sign"), quick(SIGNALS[:1], SIGNALS))
def test_a_killed_conversion_leaves_no_target_and_restarts_cleanly(tmp_path, request, params, kind, sign):
    source = request.getfixturevalue("source" if kind == "gguf" else "directory")
    format, before = "orbax" if kind == "orbax" else "huggingface", sorted(os.listdir(tmp_path))
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), "float32", format]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "go\n"
        time.sleep(0.2)
        if kind == "gguf":  # a second conversion at the same time leaves the first one's files alone
            with pytest.raises(RuntimeError):
                convert(source, tmp_path / "out", progress=Mock(side_effect=RuntimeError))
            assert len([name for name in os.listdir(tmp_path) if "partial" in name]) == 1
        process.send_signal(sign)
        assert process.wait(60) != 0
    assert not (tmp_path / "out").exists()
    if kind == "gguf" and sign is signal.SIGINT:
        assert sorted(os.listdir(tmp_path)) == before
    convert(source, tmp_path / "out", "float32", format=format)  # and sweeps what the killed one could not
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out"])
    assert_same(load(tmp_path / "out", "float32"), params)


def test_what_may_not_be_read_is_told(tmp_path, directory, monkeypatch):
    """The error is that of a file of a different user. It is simulated, because root can read all files."""
    convert(directory, tmp_path / "c", "float32")
    really = Path.open

    def closed(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *args, **options)

    monkeypatch.setattr(Path, "open", closed)
    for name in ("config.json", "model.safetensors", "manifest.json"):
        for call in (lambda: load(tmp_path / "c"), lambda: convert(tmp_path / "c", tmp_path / "o")):
            with pytest.raises(CheckpointError, match=f"{name}.*Permission denied"):
                call()


@pytest.mark.parametrize("kind", ["source", "directory"])
def test_bad_arguments_are_refused(tmp_path, request, params, kind):
    source, out = request.getfixturevalue(kind), tmp_path / "out"
    before = sorted(os.listdir(tmp_path))
    paths = [partial(convert, None, out), partial(convert, source, None), partial(convert, source, "a\0b")]
    dtypes = ("float64", "int8", None, 3, np.float32, [])
    options = [({"format": "pickle"}, "format must be one of"), ({"dtype": "int8"}, "dtype must be one of")]
    options += [({"shard_bytes": size}, "shard_bytes must be") for size in (0, True)]
    options += [({"dtype": dtype}, "dtype") for dtype in ("int4", None)]
    for call, told in (
        *((call, "must be a string or a path") for call in (*paths, partial(save, params, None), partial(load, None))),
        *((partial(load, source, mesh=mesh), r"mesh must be a jax\.sharding\.Mesh") for mesh in (3, "cpu", [1])),
        *((partial(init_params, TINY, seed), "seed") for seed in (-1, 1.5, None, True)),
        *((partial(load, source, dtype), "dtype") for dtype in dtypes),
        *((partial(init_params, TINY, dtype=dtype), "dtype") for dtype in dtypes),
        *((partial(convert, source, out, **changes), told) for changes, told in options),
    ):
        with pytest.raises(ConfigError, match=told):
            call()
    for size in ("inf", "nan", "0", "-1"):
        assert main(["convert", str(source), str(out), "--shard-gb", size]) == 2
    assert sorted(os.listdir(tmp_path)) == before


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=FORMATS)
def converted(request, directory, tmp_path):
    """A converted directory of either format."""
    convert(directory, tmp_path / "c", format=request.param)
    return tmp_path / "c"


CHANGES = [
    (flip, "other bytes than when it was written"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes when it was written"),
    (Path.unlink, "missing"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
@pytest.mark.parametrize("which", ["weights", "config"])
def test_a_manifest_that_does_not_match_is_refused_with_the_file_s_name(converted, tmp_path, change, told, which):
    largest = max(files(converted), key=lambda path: path.stat().st_size)
    path = converted / "config.json" if which == "config" else largest
    change(path)
    before = files(tmp_path)
    for call in (lambda: load(converted), lambda: convert(converted, tmp_path / "out")):
        with pytest.raises((CheckpointError, ConfigError), match=path.name) as caught:
            call()
        assert told in str(caught.value) or which == "config" or not (converted / "weights").exists()
    assert files(tmp_path) == before


def test_what_the_manifest_does_not_name_may_change(converted):
    params = load(converted)
    (converted / "notes.txt").write_text("mine")
    assert_same(load(converted), params)
    edit_json(converted / "config.json", note="mine")
    with pytest.raises(CheckpointError, match=r"config\.json: \d+ bytes when it was written"):
        load(converted)
    assert_same(load(converted, verify=False), params)


LONG = "x" * 300
BAD_MANIFESTS = [
    (lambda files: {"version": 2}, "manifest.json.*version=2"),
    (lambda files: {"format": "zip"}, "manifest.json.*format='zip'"),
    (lambda files: {"files": {}}, "manifest.json.*files must map"),
    (lambda files: {"files": {"config.json": 3}}, "manifest.json.*files must map"),
    (lambda files: {"files": {"../x": {"bytes": 1, "sha256": ""}}}, r"manifest.json.*'\.\./x'"),
    (lambda files: {"files": {"config.json": files["config.json"]}}, "not in the manifest"),
    (lambda files: {"files": files | {LONG: {"bytes": 1, "sha256": ""}}}, "xxx: missing"),
]


@pytest.mark.parametrize(("changes", "told"), BAD_MANIFESTS)
def test_a_bad_manifest_is_refused(converted, changes, told):
    files = json.loads((converted / "manifest.json").read_text())["files"]
    edit_json(converted / "manifest.json", **changes(files))
    with pytest.raises(CheckpointError, match=f"(?s){told}"):
        load(converted)


def test_an_orbax_directory_in_part_is_refused(tmp_path, directory):
    convert(directory, tmp_path / "c", "float32", format="orbax")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="written or copied in part"):
        load(tmp_path / "c")
    refused(tmp_path / "c", tmp_path / "out", CheckpointError, ("written or copied in part",))


Q0, EMBED, W = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.safetensors"
NORM, ONES = "model.norm.weight", np.ones(32, np.float32)
LAYER = "model.layers.{}.input_layernorm.weight"
GENERATION, Edit = "generation_config.json", Callable[[Path], Any]


def cut(keep: float) -> Edit:
    return lambda d: (d / W).write_bytes((d / W).read_bytes()[: int((d / W).stat().st_size * keep)])


def tensors(edit: Callable[[dict[str, np.ndarray]], Any] = lambda held: None, **changes: np.ndarray) -> Edit:
    return lambda d: edit_tensors(d, lambda held: (held.update(changes), edit(held)))


def set_value(name: str, value: float) -> Edit:
    return tensors(lambda held: held[name].reshape(-1).__setitem__(3, value))


def weights(content: bytes) -> Edit:
    return lambda d: (d / W).write_bytes(content)


def config(name: str = "config.json", **changes: Any) -> Edit:
    return lambda d: edit_json(d / name, **changes)


def config_text(text: bytes) -> Edit:
    return lambda d: (d / "config.json").write_bytes(text)


def index(**names: str) -> Edit:
    return lambda d: (shard(d), edit_json(d / "model.safetensors.index.json", weight_map=names))


BAD: dict[str, tuple[Edit, type[JshadowError], tuple[str, ...]]] = {
    "no directory": (shutil.rmtree, CheckpointError, ("does not exist",)),
    "no config": (lambda d: (d / "config.json").unlink(), CheckpointError, ("config.json", "no such file")),
    "config garbage": (config_text(b"{'a': 1"), CheckpointError, ("config.json", "does not parse")),
    "config binary": (config_text(b"\xff\xfe\x00"), CheckpointError, ("config.json", "does not parse")),
    "config deep": (config_text(b"[" * 100_000), CheckpointError, ("config.json", "does not parse")),
    "config list": (config_text(b"[1]"), CheckpointError, ("config.json", "list")),
    "config NaN": (config_text(b'{"rms_norm_eps": NaN}'), CheckpointError, ("config.json", "NaN")),
    "config empty": (config_text(b""), CheckpointError, ("config.json", "empty")),
    "model_type": (config(model_type="gpt9"), ConfigError, ("model_type", "gpt9", "llama")),
    "quantized": (config(quantization_config={"quant_method": "q"}), ConfigError, ("quantization_config", "'q'")),
    "remote code": (config(auto_map={"AutoModel": "x.Y"}), ConfigError, ("auto_map", "x.Y")),
    "another default": (config(hidden_size=None), CheckpointError, (EMBED, "4096]", "got", "[264, 32]")),
    "kind of theta": (config(rope_theta="big"), ConfigError, ("config.json", "big")),
    "kind of eps": (config(rms_norm_eps="x"), ConfigError, ("config.json", "wrong type")),
    "rope kind": (config(rope_scaling={"rope_type": "yarn"}), ConfigError, ("rope_type", "yarn")),
    "rope of images": (config(rope_scaling={"rope_type": "mrope", "factor": 2.0}), ConfigError, ("mrope",)),
    "huge size": (config(vocab_size=10**12), ConfigError, ("vocab_size", "2147483647", "1000000000000")),
    "huge depth": (config(num_hidden_layers=10**9), CheckpointError, ("num_hidden_layers", "1000000000")),
    "eos": (config(eos_token_id=TINY.vocab_size), ConfigError, ("eos", str(TINY.vocab_size))),
    "ends": (config(GENERATION, eos_token_id=[0, 9999]), ConfigError, ("eos_ids", "9999")),
    "only .bin": (
        lambda d: (d / W).rename(d / "pytorch_model.bin"),
        CheckpointError,
        ("pytorch_model.bin", "refused", "safetensors"),
    ),
    "no weights": (lambda d: (d / W).unlink(), CheckpointError, ("must hold model.safetensors",)),
    "no index": (lambda d: (d / W).rename(d / "a.safetensors"), CheckpointError, ("a.safetensors", "index.json")),
    "missing shard": (lambda d: (d / shard(d)[1]).unlink(), CheckpointError, ("1 of 3 shards", "model-00002-of-00003")),
    "index outside": (index(a="../x.safetensors"), CheckpointError, ("weight_map", "../x.safetensors")),
    "index pickle": (index(a="x.bin"), CheckpointError, ("weight_map", "x.bin")),
    "index empty": (index(), CheckpointError, ("weight_map",)),
    "truncated data": (cut(0.7), CheckpointError, (W, "interrupted download", "expects")),
    "truncated header": (cut(0.01), CheckpointError, (W, "interrupted download", "header alone")),
    "trailing bytes": (lambda d: (d / W).write_bytes((d / W).read_bytes() + b"x"), CheckpointError, (W, "damaged")),
    "garbage": (weights(b"\x93NUMPY garbage" * 50), CheckpointError, (W, "something else")),
    "five bytes": (weights(b"short"), CheckpointError, (W, "5 bytes")),
    "huge header": (weights(struct.pack("<Q", 2**62) + b"{}"), CheckpointError, (W, "something else")),
    "bad header": (weights(struct.pack("<Q", 8) + b"{'a': 1}"), CheckpointError, (W, "does not parse")),
    "empty file": (weights(b""), CheckpointError, (W, "0 bytes")),
    "LFS pointer": (weights(LFS), CheckpointError, (W, "Git LFS pointer", "git lfs pull")),
    "a directory": (lambda d: ((d / W).unlink(), (d / W).mkdir()), CheckpointError, (W, "not a regular file")),
    "missing": (tensors(lambda t: t.pop(Q0)), CheckpointError, (Q0, "missing")),
    "extra": (tensors(stranger=ONES), CheckpointError, ("stranger", "extra")),
    "layer too many": (tensors(**{LAYER.format(2): ONES}), CheckpointError, (LAYER.format(2), "extra")),
    "layer before the drafts": (
        tensors(**{LAYER.format(2): ONES, "model.layers.3.eh_proj.weight": ONES}),
        CheckpointError,
        (": 1 tensor(s)", LAYER.format(2), "extra"),
    ),
    "only the base": (
        tensors(lambda t: (t.pop("lm_head.weight"), bare(t))),
        CheckpointError,
        (": 1 tensor(s)", "lm_head.weight", "missing"),
    ),
    "base and more": (
        tensors(lambda t: (bare(t), t.update(stranger=ONES))),
        CheckpointError,
        (": 1 tensor(s)", "stranger", "extra"),
    ),
    "two prefixes": (tensors(**{"norm.weight": ONES}), CheckpointError, (": 1 tensor(s)", "norm.weight: extra")),
    "stray bias": (tensors(**{Q0.replace("weight", "bias"): ONES}), CheckpointError, ("q_proj.bias", "extra")),
    "misshaped": (config(intermediate_size=48), CheckpointError, ("up_proj", "[48, 32]", "[64, 32]")),
    "integers": (tensors(lambda t: t.update({Q0: t[Q0].astype(np.int8)})), CheckpointError, (Q0, "I8", "BF16")),
    "all in one error": (
        tensors(lambda t: (t.pop(Q0), t.update({"stranger": ONES, NORM: ONES[:31]}), t[EMBED].fill(np.nan))),
        CheckpointError,
        ("4 tensor(s)", Q0, "missing", "stranger", EMBED, "NaN", NORM, "[32]", "[31]"),
    ),
    "NaN": (set_value(Q0, np.nan), CheckpointError, (Q0, "1 of 1024 values are NaN or Inf")),
    "Inf": (set_value(EMBED, -np.inf), CheckpointError, (EMBED, "NaN or Inf")),
    "tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), CheckpointError, ("tokenizer files",)),
    "tokenizer code": (
        lambda d: ((d / "tokenizer.json").touch(), edit_json(d / "tokenizer_config.json", auto_map={"a": "b"})),
        CheckpointError,
        ("tokenizer_config.json", "auto_map"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused_by_name(tmp_path, directory, case):
    """A conversion to either format refuses it too, and leaves nothing."""
    breaks, error, fragments = BAD[case]
    breaks(directory)
    with pytest.raises(error) as caught:
        load(directory)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value
    for format in FORMATS if not case.startswith("tokenizer") else ():
        with pytest.raises(error) as caught:
            convert(directory, tmp_path / "out", format=format)
        assert fragments[-1] in str(caught.value)
        assert set(os.listdir(tmp_path)) <= {"m"}


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
