"""Conversions and saves that fail: they raise typed errors and leave nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_files import TINY, assert_same, edit_json, edit_tensors, tiny_directory
from small_state import file_size_limit

from jshadow.cli.main import main
from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert import convert
from jshadow.weights.convert.files import workspace
from jshadow.weights.params import init_params, load, save

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
def test_nan_is_refused_and_leaves_nothing(tmp_path, format):
    directory, _ = tiny_directory(tmp_path / "m")
    edit_tensors(directory, lambda held: held["model.norm.weight"].__setitem__(3, np.nan))
    with pytest.raises(CheckpointError, match=r"norm[./](weight|scale): 1 of 32 values are NaN or Inf"):
        convert(directory, tmp_path / "out", "float32", format=format)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_nan_is_not_saved(tmp_path, format):
    params = init_params(TINY)
    params.weights["norm"]["scale"] = jax.device_put(np.where(np.arange(32) == 3, np.inf, 1).astype(np.float32))
    with pytest.raises(CheckpointError, match="1 of 32 values are NaN or Inf"):
        save(params, tmp_path / "out", format=format)
    assert os.listdir(tmp_path) == []


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_a_failed_conversion_to_orbax_leaves_nothing(tmp_path, error):
    directory, _ = tiny_directory(tmp_path / "m")

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise error("stop")

    with pytest.raises((error, CheckpointError)):
        convert(directory, tmp_path / "out", progress=stop, format="orbax")
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_conversion_to_orbax_restarts_cleanly(tmp_path, kind):
    directory, params = tiny_directory(tmp_path / "m")
    code = (
        "import signal, sys, time; from jshadow.weights.convert import convert; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "convert(*sys.argv[1:], format='orbax', "
        "progress=lambda done, _: done == 6 and (print('go', flush=True), time.sleep(3)))"
    )
    command = [sys.executable, "-c", code, str(directory), str(tmp_path / "out"), "float32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(0.2)
        process.send_signal(kind)
        assert process.wait(60) != 0
    assert not (tmp_path / "out").exists()
    convert(directory, tmp_path / "out", "float32", format="orbax")
    assert sorted(os.listdir(tmp_path)) == ["m", "out"]
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
    ("settings", "told"),
    [
        ({"format": "pickle"}, "format must be one of"),
        ({"shard_bytes": 0}, "shard_bytes must be"),
        ({"shard_bytes": True}, "shard_bytes must be"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_bad_settings(tmp_path, settings, told):
    directory, _ = tiny_directory(tmp_path / "m")
    with pytest.raises(ConfigError, match=told):
        convert(directory, tmp_path / "out", **settings)
    assert os.listdir(tmp_path) == ["m"]
