"""Conversion of GGUF files and of dtypes: exact for unquantized tensors, with errors that name the cause."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_files import (
    MERGES,
    TEMPLATE,
    TINY,
    TOKENS,
    assert_same,
    ggml_order,
    refused,
    shard,
    tiny_directory,
    write_gguf,
)
from safetensors.numpy import load_file

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert import convert
from jshadow.weights.convert.gguf import unpermute
from jshadow.weights.params import load

pytestmark = pytest.mark.timeout(120)

Q4 = gguf.GGMLQuantizationType.Q4_1
VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"head_dim": 6, "kv_heads": 1},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "+".join(changes) or "plain")
def test_gguf_gives_the_same_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory, params = tiny_directory(tmp_path / "m", **changes)
    source = write_gguf(tmp_path / "x.gguf", directory, params.config)
    calls: list[tuple[int, int]] = []
    convert(source, tmp_path / "out", dtype="float32", progress=lambda done, total: calls.append((done, total)))
    loaded = load(tmp_path / "out", "float32")
    assert_same(loaded, params)
    count = len(load_file(directory / "model.safetensors"))
    assert calls == [(i, count) for i in range(1, count + 1)]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == TINY.norm_eps


def test_default_dtype_halves_the_file(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY), tmp_path / "out")
    original, stored = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "out"))
    assert {value.dtype.name for value in stored.values()} == {"bfloat16"}
    for name, value in original.items():
        np.testing.assert_array_equal(stored[name], value.astype(stored[name].dtype))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_quantized_tensors_equal_ggufs_own(tmp_path: Path, kind: str) -> None:
    directory, _ = tiny_directory(tmp_path / "m", head_dim=16)
    config = dataclasses.replace(TINY, head_dim=16)
    source = write_gguf(tmp_path / "x.gguf", directory, config, kind=gguf.GGMLQuantizationType[kind])
    convert(source, tmp_path / "out", dtype="float32")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for tensor in gguf.GGUFReader(source).tensors:
        if tensor.name in ("token_embd.weight", "output_norm.weight"):
            name = {"token_embd.weight": "model.embed_tokens.weight"}.get(tensor.name, "model.norm.weight")
            np.testing.assert_array_equal(stored[name], gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name == "blk.1.attn_k.weight":
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            ours = stored["model.layers.1.self_attn.k_proj.weight"]
            np.testing.assert_array_equal(ggml_order(ours, config.kv_heads), theirs)


def test_unpermute_undoes_the_order_of_ggml() -> None:
    rows = np.arange(3 * 8 * 2).reshape(24, 2)
    np.testing.assert_array_equal(unpermute(ggml_order(rows, 3), 3), rows)
    np.testing.assert_array_equal(unpermute(np.array([0, 2, 1, 3]), 1), [0, 1, 2, 3])


def test_tokenizer_and_template(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY), tmp_path / "out")
    tokenizer = load(tmp_path / "out").tokenizer
    for text in ("hello 12 héllo\n\t 日本 🎉  ", "<|user|>hell<|end|>", "<tool>x"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    ids = {token: index for index, token in enumerate(TOKENS)}
    assert tokenizer("<|user|>hell<|end|>").input_ids == [1, ids["hell"], 0]
    assert tokenizer("12").input_ids == [ids["1"], ids["2"]]  # "1 2" is a merge, but digits are split first
    assert tokenizer.decode([1, ids["hell"], ids["<tool>"]], skip_special_tokens=True) == "hell<tool>"
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>hi<|end|><|bot|>"
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|user|>", "<|end|>")


@pytest.mark.parametrize(
    ("metadata", "text", "expected"),
    [
        ({"tokenizer.ggml.pre": "gpt-2"}, "12", ["12"]),
        ({"tokenizer.ggml.pre": "gpt2"}, "a b", ["a", "Ġ", "b"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "12", ["<|user|>", "12"]),  # bos in front unless the file says no
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, "hell", ["hell"]),
        ({"tokenizer.ggml.add_bos_token": True}, "h1", ["<|user|>", "h", "1"]),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
            "h",
            ["<|user|>", "h", "<|end|>"],
        ),
    ],
)
def test_pre_types_and_ends(tmp_path: Path, metadata: dict[str, Any], text: str, expected: list[str]) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY, metadata=metadata), tmp_path / "out")
    tokenizer = load(tmp_path / "out").tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == expected
    assert tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids) == [
        token for token in expected if not token.startswith("<|")
    ]


def test_no_tokenizer_is_no_error(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY, tokenizer=False), tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.tokenizer is None
    assert loaded.config.eos_ids == ()


def test_end_of_turn_is_an_end(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY, metadata={"tokenizer.ggml.eot_token_id": 2})
    convert(source, tmp_path / "out")
    assert load(tmp_path / "out").config.eos_ids == (0, 2)


def llama3_divisors(theta: float, width: int, factor: float) -> np.ndarray:
    """The divisors that llama.cpp stores, computed from the definition of the scaling, one pair at a time."""
    out = []
    for i in range(width // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / width)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192 / 1:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_rope_divisors_become_llama3_scaling(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    theta = {"llama.rope.freq_base": 500000.0}
    extra = {"rope_freqs.weight": llama3_divisors(500000.0, 8, 32.0)}
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY, metadata=theta, extra_tensors=extra), tmp_path / "out")
    rope = load(tmp_path / "out").config.rope
    assert (rope.kind, rope.factor, rope.theta, rope.original_context) == ("llama3", 32.0, 500000.0, 8192)


def test_linear_scaling(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY, metadata=metadata), tmp_path / "out")
    rope = load(tmp_path / "out").config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_directory_to_directory(tmp_path: Path, dtype: str) -> None:
    directory, params = tiny_directory(tmp_path / "m", dtype, attention_bias=True)
    shard(directory)
    (directory / "modeling.py").write_text("raise SystemExit")
    convert(directory, tmp_path / "out", dtype="float32")
    assert_same(load(tmp_path / "out", dtype), params)
    names = ["config.json", "generation_config.json", "manifest.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "out")) == names


def test_existing_target_is_left_alone(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY)
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target in (tmp_path / "out", tmp_path / "link", directory):
        for origin in (source, directory):
            refused(origin, target, CheckpointError, (str(target), "must not exist"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("dtype", ["int4", None])
def test_dtype_is_checked(tmp_path: Path, dtype: Any) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY)
    for origin in (source, directory):
        with pytest.raises(ConfigError, match="dtype"):
            convert(origin, tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, error: type[BaseException], kind: str) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY) if kind == "gguf" else directory
    before = sorted(os.listdir(tmp_path))

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise error("stop")

    with pytest.raises(CheckpointError if error is OSError else error):
        convert(source, tmp_path / "out", progress=stop)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.process
@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_killed_conversion_leaves_no_target(tmp_path: Path, kind: signal.Signals) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY)
    before = sorted(os.listdir(tmp_path))
    code = (
        "import signal, sys, time; from jshadow.weights.convert import convert; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a job in the background inherits a deaf one
        "convert(*sys.argv[1:], progress=lambda *_: (print('go', flush=True), time.sleep(30)))"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(0.2)
        with pytest.raises(RuntimeError):  # a second conversion at the same time leaves the first one's files alone
            convert(source, tmp_path / "out", progress=fail)
        assert len([name for name in os.listdir(tmp_path) if "partial" in name]) == 1
        process.send_signal(kind)
        assert process.wait(20) != 0
    assert not (tmp_path / "out").exists()
    if kind is signal.SIGINT:
        assert sorted(os.listdir(tmp_path)) == before
    convert(source, tmp_path / "out")  # and sweeps what the killed one could not
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out"])


def fail(done: int, total: int) -> None:
    raise RuntimeError("stop")


def test_merges_of_the_tiny_tokenizer_are_in_use() -> None:
    assert {merge.replace(" ", "") for merge in MERGES} <= set(TOKENS)
