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


def test_weights_have_the_abstract_tree(tmp_path):
    directory, _ = tiny_directory(tmp_path / "m", attention_bias=True)
    weights, config = load(directory, "float32").weights, dataclasses.replace(TINY, attention_bias=True)
    of, wanted = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (weights, abstract_weights(config))
    )
    assert of == wanted
    stored = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(weights["layer_0"]["attention"]["q"]["kernel"], stored[Q0].T)
    np.testing.assert_array_equal(weights["head"]["kernel"], stored["lm_head.weight"].T)


def test_shards_and_harmless_extras_give_the_same_model(tmp_path):
    directory, params = tiny_directory(tmp_path / "m", tie_embeddings=True)
    inverse = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory, lambda held: held.update({inverse: np.ones(4, np.float32), "lm_head.weight": held[EMBED]}))
    assert_same(load(directory, "float32"), params)
    shard(directory)
    assert_same(load(directory, "float32"), params)


def test_two_loads_share_a_config_and_seeds_differ(directory):
    assert hash(load(directory).config) == hash(load(directory).config)
    a, same, b = (init_params(TINY, seed) for seed in (1, 1, 2))
    assert_same(a, same)
    a, b = (one.weights["layer_0"]["mlp"]["up"]["kernel"] for one in (a, b))
    assert not np.array_equal(a, b)


def test_generation_config_wins(directory):
    for eos, expected in ((5, (5,)), ([5, 6], (5, 6)), (None, (0,))):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert load(directory).config.eos_ids == expected


def test_other_sources(tmp_path, directory, params, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["allow_patterns"]))
        if name != "org/name":
            raise OSError("no network")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same(load("org/name", "float32"), params)
    assert asked[0][0] == "org/name"
    assert not any(pattern.endswith((".bin", "*")) for pattern in asked[0][1])
    write_gguf(tmp_path / "x.gguf", directory, TINY)
    monkeypatch.chdir(tmp_path)
    for source, message in {
        "org/other": r"org/other.*no network",
        tmp_path / "x.gguf": "jshadow convert",
        directory / "config.json": "must be a directory",
        "m/other": "does not exist",
        "a/b/c": "does not exist",
        "nothing": "does not exist",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load(source)
    with pytest.raises(ConfigError, match="path_or_hub_id"):
        load(None)
    assert len(asked) == 2


@pytest.mark.parametrize("format", ["huggingface", "orbax"])
def test_save_refuses_and_leaves_nothing(tmp_path, directory, params, format):
    bad = {
        kind: Params(jax.tree.map(lambda leaf, value=value: np.full(leaf.shape, *value), params.weights), params.config)
        for kind, value in {"NaN": (np.nan, "float32"), "integers": (1, "int32")}.items()
    }
    bad["Inf"] = dataclasses.replace(params, weights=jax.tree.map(np.asarray, params.weights))
    bad["Inf"].weights["norm"]["scale"] = np.where(np.arange(32) == 3, np.inf, 1).astype(np.float32)
    (tmp_path / "file").write_text("")
    for refused, place, error, message in (
        (params, "m", CheckpointError, "must not exist"),
        (params, "file/below", CheckpointError, "cannot be created"),
        (bad["NaN"], "bad", CheckpointError, "NaN"),
        (bad["Inf"], "bad", CheckpointError, "1 of 32 values are NaN or Inf"),
        (bad["integers"], "bad", ConfigError, "dtype"),
    ):
        with pytest.raises(error, match=message):
            save(refused, tmp_path / place, format=format)
    assert sorted(os.listdir(tmp_path)) == ["file", "m"]


@pytest.mark.process
def test_load_without_torch_is_silent(tmp_path, source):
    convert(source, tmp_path / "out")
    code = "import sys; sys.modules['torch'] = None; import jshadow.weights.params as p; print(p.load(sys.argv[1]).tokenizer('hell').input_ids)"  # noqa: E501
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() == str([TINY.vocab_size - 3])
