"""Checkpoints both ways: Hugging Face -> orbax -> Hugging Face, bit by bit, and what goes wrong on the way."""

import dataclasses
import json
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
import orbax.checkpoint as ocp
import pytest
from cases import ALL
from checkpoint_files import TINY, assert_same, edit_json, edit_tensors, refused, tiny_directory
from family_cases import BASE, FAMILY_CASES
from safetensors.numpy import load_file
from small_state import file_size_limit

from jshadow.cli.main import main
from jshadow.errors import CheckpointError, ConfigError
from jshadow.models.registry import family_of
from jshadow.weights.convert import convert
from jshadow.weights.convert.files import workspace
from jshadow.weights.convert.huggingface import flat_abstract
from jshadow.weights.params import init_params, load, save

ROOT = Path(__file__).resolve().parents[2]


def family_directory(name: str, path: Path, dtype: str) -> Path:
    """A checkpoint of a family with random weights, norms and biases included, and a tokenizer file."""
    model_type, settings = FAMILY_CASES[name]
    hf = {"model_type": model_type, "rms_norm_eps": 1e-6} | BASE | settings
    params = init_params(family_of(hf).config_from_hf(hf), seed=5, dtype=dtype)
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    noisy = jax.tree.map(lambda leaf: leaf + jax.random.normal(next(keys), leaf.shape, leaf.dtype), params.weights)
    save(dataclasses.replace(params, weights=noisy), path)
    edit_json(path / "config.json", mark=name)  # a key that no reader knows
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def tensors(directory: Path) -> dict[str, tuple[Any, bytes]]:
    """Tensor name -> dtype, shape and bytes, of all safetensors of a directory."""
    return {
        name: ((value.dtype.name, value.shape), value.tobytes())
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def files(directory: Path) -> list[str]:
    """Names of all files below a directory."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


# There and back


@pytest.mark.parametrize(
    ("dtype", "name", "shard_bytes"),
    [
        (("float32", "bfloat16", "float16")[index % 3], name, (20_000, 10**9)[index % 2])
        for index, name in enumerate(FAMILY_CASES)
    ],
)
def test_huggingface_to_orbax_and_back_is_bit_equal(tmp_path, name, dtype, shard_bytes):
    family_directory(name, tmp_path / "plain", dtype)
    convert(tmp_path / "plain", tmp_path / "source", dtype, shard_bytes=shard_bytes)
    shards = list((tmp_path / "source").glob("*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 20_000)
    convert(tmp_path / "source", tmp_path / "orbax", dtype, format="orbax")
    assert not list((tmp_path / "orbax").glob("*.safetensors"))
    convert(tmp_path / "orbax", tmp_path / "back", dtype, shard_bytes=shard_bytes)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "source") == tensors(tmp_path / "plain")
    for file in ("config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "source" / file).read_bytes()
    if len(shards) > 1:
        told = [json.loads((tmp_path / one / "model.safetensors.index.json").read_text()) for one in ("source", "back")]
        assert set(told[0]["weight_map"]) == set(told[1]["weight_map"]) == set(tensors(tmp_path / "plain"))
    assert_same(load(tmp_path / "orbax", dtype), load(tmp_path / "plain", dtype))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes_are_cast_on_the_way(tmp_path, stored, wanted):
    directory, params = tiny_directory(tmp_path / "m", stored)
    convert(directory, tmp_path / "cast", wanted, format="orbax")
    assert_same(load(tmp_path / "cast", wanted), load(directory, wanted))
    convert(directory, tmp_path / "kept", stored, format="orbax")
    assert_same(load(tmp_path / "kept", wanted), load(directory, wanted))
    assert load(tmp_path / "kept", stored).config == params.config


def test_save_to_orbax_is_the_same_model(tmp_path):
    _, params = tiny_directory(tmp_path / "m", "bfloat16")
    save(params, tmp_path / "orbax", format="orbax")
    assert_same(load(tmp_path / "orbax"), params)
    convert(tmp_path / "orbax", tmp_path / "hf")
    assert tensors(tmp_path / "hf") == tensors(tmp_path / "m")


def test_any_orbax_user_reads_it(tmp_path):
    directory, params = tiny_directory(tmp_path / "m")
    convert(directory, tmp_path / "out", "float32", format="orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((tmp_path / "out" / "weights").absolute(), params.weights)
    jax.tree.map(np.testing.assert_array_equal, tree, params.weights)


def test_the_command(tmp_path, capsys):
    directory, params = tiny_directory(tmp_path / "m")
    assert main(["convert", str(directory), str(tmp_path / "o"), "--dtype", "float32", "--format", "orbax"]) == 0
    assert main(["convert", str(tmp_path / "o"), str(tmp_path / "h"), "--dtype", "float32", "--shard-gb", "1e-5"]) == 0
    assert len(list((tmp_path / "h").glob("model-*.safetensors"))) > 1
    assert_same(load(tmp_path / "h", "float32"), params)
    capsys.readouterr()
    assert main(["convert", str(directory), str(tmp_path / "p"), "--format", "pickle"]) == 2
    assert "format must be one of" in capsys.readouterr().err


MESH = """
import jax, numpy as np, sys
from jax.sharding import Mesh
from jshadow import Full, ShadowKV, errors, generate, load, prefill, save
mesh = Mesh(np.array(jax.devices()).reshape(1, 4), ("data", "model"))
params = load(sys.argv[1], "float32", mesh=mesh)
flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params.weights)[0]}
for path, leaf in flat.items():
    held = {shard.device: shard.data.nbytes for shard in leaf.addressable_shards}
    assert len(held) == 4, path
    parts = 1 if "norm" in path else 4
    assert set(held.values()) == {leaf.nbytes // parts}, (path, held)
alone = load(sys.argv[1], "float32")
tokens = np.arange(40)[None] % 90
want, _ = prefill(alone, tokens, np.array([40]), Full(), capacity=48, logits="all")
got, _ = prefill(params, tokens, np.array([40]), Full(), capacity=48, logits="all")
np.testing.assert_allclose(got, want, atol=1e-4)
for policy in (Full(), ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=1)):
    asked = dict(max_new_tokens=4, fetch="resident")
    outs = [generate(one, list(range(3, 43)), policy, **asked).tokens for one in (params, alone)]
    assert outs[0] == outs[1], outs
try:
    prefill(params, tokens, np.array([40]), ShadowKV(rank=8, budget=16), capacity=48, fetch="device_put")
except errors.ConfigError as error:
    assert "fetch must be 'resident' with weights on several devices" in str(error)
else:
    raise SystemExit("offloaded from a mesh")
explicit = load(sys.argv[1], "float32", mesh=jax.make_mesh((2,), ("model",)))
got, _ = prefill(explicit, tokens, np.array([40]), Full(), capacity=48, logits="all")
np.testing.assert_allclose(got, want, atol=1e-4)
save(params, sys.argv[2], format="orbax")
again = load(sys.argv[2], "float32")
jax.tree.map(np.testing.assert_array_equal, again.weights, alone.weights)
int8 = load(sys.argv[1], "float32", quantize="int8", mesh=mesh)
assert len(int8.weights["layer_0"]["mlp"]["up"]["kernel"].addressable_shards) == 4
print("spread")
"""


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_weights_go_straight_to_a_mesh(tmp_path, format):
    """In a process of four CPU devices: each holds its part, the model is the same, and saving gathers it again."""
    save(init_params(dataclasses.replace(TINY, kv_heads=4, vocab_size=96, eos_ids=()), seed=1), tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "c", "float32", format=format)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MESH, tmp_path / "c", tmp_path / "again"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "spread", done.stderr[-3000:]


# Memory

MEMORY = """
import sys
import jshadow.weights.convert as c
import numpy as np, jax, orbax.checkpoint, safetensors
jax.devices()
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")  # the highest mark so far was that of the imports
before = status("VmRSS")
c.convert(sys.argv[1], sys.argv[2], sys.argv[3], format=sys.argv[4], shard_bytes=int(sys.argv[5]))
print(status("VmHWM") - before)
"""
SHARD = 128 * 2**20


def large_directory(path: Path, layers: int) -> int:
    """A checkpoint of `layers` times 32 MiB in bfloat16, in shards of 128 MiB; returns the largest file's bytes."""
    from jshadow.weights.convert.huggingface_write import config_to_hf, write_shards
    from jshadow.weights.convert.tensors import placements

    config = dataclasses.replace(
        TINY,
        num_layers=layers,
        model_dim=1024,
        ffn_dim=4096,
        q_heads=16,
        kv_heads=8,
        head_dim=64,
        vocab_size=8192,
    )
    wanted = flat_abstract(config)
    family = family_of({"model_type": "llama"})
    shapes = {name: placed.tensor_shape(wanted) for name, placed in placements(family, wanted).items()}
    rng = np.random.default_rng(0)
    path.mkdir()
    edit_json(path / "config.json", **config_to_hf(config, "bfloat16"))
    write_shards(path, shapes, "bfloat16", lambda name: rng.standard_normal(shapes[name], np.float32), SHARD)
    return max(file.stat().st_size for file in path.glob("*.safetensors"))


def peak_of(source: Path, target: Path, dtype: str, format: str) -> int:
    """Bytes by which a conversion raises the maximum resident size of a process that has imported everything."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, source, target, dtype, format, str(SHARD)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout)


@pytest.mark.parametrize("layers", [12, pytest.param(128 if ALL else 48, marks=pytest.mark.slow)])
def test_memory_of_a_conversion_does_not_grow_with_it(tmp_path, layers, record_property):
    """Layers of 32 MiB: 0.4 GiB, 1.5 and 4."""
    largest = large_directory(tmp_path / "m", layers)
    assert largest <= SHARD + 10_000
    bound = 2 * largest + 64 * 10**6
    peaks = {
        "to orbax": peak_of(tmp_path / "m", tmp_path / "orbax", "bfloat16", "orbax"),
        "to huggingface": peak_of(tmp_path / "orbax", tmp_path / "back", "bfloat16", "huggingface"),
        "cast": peak_of(tmp_path / "m", tmp_path / "cast", "float16", "huggingface"),
    }
    record_property("peaks", str(peaks))
    print(layers, peaks, bound)
    assert max(peaks.values()) <= bound


# What goes wrong


def flip(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest_file(directory: Path) -> Path:
    """The file that holds most."""
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def grow(path: Path) -> None:
    """A byte more at the end of a file."""
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
    params.weights["norm"]["scale"] = params.weights["norm"]["scale"].at[3].set(np.inf)
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
    """A thread of a writer that failed makes the directory anew after it was removed."""

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
    """As the system says it of a file that belongs to somebody else (root reads everything, so it is made up here)."""
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


def test_weights_that_the_manifest_does_not_name(converted):
    told = json.loads((converted / "manifest.json").read_text())
    kept = {name: entry for name, entry in told["files"].items() if name == "config.json"}
    edit_json(converted / "manifest.json", files=kept)
    with pytest.raises(CheckpointError, match="not in the manifest"):
        load(converted)
    edit_json(converted / "manifest.json", files=told["files"] | {"x" * 300: {"bytes": 1, "sha256": ""}})
    with pytest.raises(CheckpointError, match="xxx: missing"):
        load(converted)


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
