"""Damaged, unsafe and mismatched checkpoint directories: errors name the file, and convert leaves nothing behind."""

import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import LFS, TINY, edit_json, edit_tensors, shard, tiny_directory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.weights.convert import convert
from jshadow.weights.params import load

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
