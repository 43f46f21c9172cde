"""Loading and saving: matching weights load exactly, and tensors that do not match are named in the error."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import TINY, assert_same, edit_tensors, shard, tiny_directory, write_gguf
from safetensors.numpy import load_file

from jshadow.errors import CheckpointError, ConfigError
from jshadow.models.config import RopeConfig
from jshadow.models.transformer import abstract_weights
from jshadow.weights.convert import convert
from jshadow.weights.params import Params, init_params, load, save

Q0 = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"head_dim": 6, "kv_heads": 1, "eos_ids": ()},
    {"rope": RopeConfig(theta=500000.0, kind="llama3", factor=8.0), "eos_ids": (1, 7)},
    {"rope": RopeConfig(kind="linear", factor=2.5)},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "+".join(changes) or "plain")
def test_save_then_load_gives_the_same_model(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    directory, params = tiny_directory(tmp_path / "m", dtype, **changes)
    assert params.dtype.name == dtype
    assert_same(load(directory, dtype), params)
    assert load(directory).tokenizer is None
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_weights_have_the_abstract_tree(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m", attention_bias=True)
    weights = load(directory, "float32").weights
    config = dataclasses.replace(TINY, attention_bias=True)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weights) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_weights(config)
    )
    stored = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(weights["layer_0"]["attention"]["q"]["kernel"], stored[Q0].T)
    np.testing.assert_array_equal(weights["head"]["kernel"], stored["lm_head.weight"].T)


def test_dtype_is_cast_on_the_way(tmp_path: Path) -> None:
    directory, params = tiny_directory(tmp_path / "m")
    loaded = load(directory)
    assert loaded.dtype == np.dtype(ml_dtypes.bfloat16)
    expected = np.asarray(params.weights["norm"]["scale"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(loaded.weights["norm"]["scale"]), expected)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    directory, params = tiny_directory(tmp_path / "m")
    shard(directory)
    assert_same(load(directory, "float32"), params)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    directory, params = tiny_directory(tmp_path / "m", tie_embeddings=True)

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors[EMBED].copy()

    edit_tensors(directory, add)
    assert_same(load(directory, "float32"), params)


def test_two_loads_share_a_config_and_seeds_differ(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    assert hash(load(directory).config) == hash(load(directory).config)
    assert_same(init_params(TINY, seed=1), init_params(TINY, seed=1))
    a, b = (init_params(TINY, seed).weights["layer_0"]["mlp"]["up"]["kernel"] for seed in (1, 2))
    assert not np.array_equal(a, b)


@pytest.mark.parametrize(("eos", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, (0,))])
def test_generation_config_wins(tmp_path: Path, eos: Any, expected: tuple[int, ...]) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load(directory).config.eos_ids == expected


@pytest.mark.parametrize("dtype", ["float64", "int8", None, 3, np.float32, []])
def test_dtype_is_checked(tmp_path: Path, dtype: Any) -> None:
    for call in (lambda: load(tmp_path, dtype), lambda: init_params(TINY, dtype=dtype)):
        with pytest.raises(ConfigError, match="dtype"):
            call()


@pytest.mark.parametrize("seed", [-1, 1.5, None, True])
def test_seed_is_checked(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        init_params(TINY, seed)


def test_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, params = tiny_directory(tmp_path / "m")
    asked: list[tuple[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        if name != "org/name":
            raise OSError("no network")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same(load("org/name", "float32"), params)
    assert asked[0][0] == "org/name"
    assert not any(pattern.endswith((".bin", "*")) for pattern in asked[0][1])
    with pytest.raises(CheckpointError, match=r"org/other.*no network"):
        load("org/other")
    write_gguf(tmp_path / "x.gguf", directory, TINY)
    monkeypatch.chdir(tmp_path)
    for source, message in {
        tmp_path / "x.gguf": "jshadow convert",
        directory / "config.json": "must be a directory",
        "m/other": "does not exist",
        "a/b/c": "does not exist",
        "nothing": "does not exist",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load(source)
    with pytest.raises(ConfigError, match="path_or_hub_id"):
        load(None)  # type: ignore[arg-type]
    assert len(asked) == 2


def test_save_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    directory, params = tiny_directory(tmp_path / "m")
    with pytest.raises(CheckpointError, match="must not exist"):
        save(params, directory)
    bad = dataclasses.replace(params, weights=jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params.weights))
    with pytest.raises(CheckpointError, match="NaN"):
        save(bad, tmp_path / "bad")
    with pytest.raises(ConfigError, match="dtype"):
        save(
            Params(jax.tree.map(lambda leaf: np.asarray(leaf, "int32"), params.weights), params.config),
            tmp_path / "bad",
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created"):
        save(params, tmp_path / "file" / "below")
    assert sorted(os.listdir(tmp_path)) == ["file", "m"]


@pytest.mark.process
def test_load_without_torch_is_silent(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY), tmp_path / "out")
    code = "import sys; sys.modules['torch'] = None; import jshadow.weights.params as p; print(p.load(sys.argv[1]).tokenizer('hell').input_ids)"  # noqa: E501
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() == str([TINY.vocab_size - 3])
