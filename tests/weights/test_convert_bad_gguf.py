"""Damaged, crafted and unsupported GGUF files: each is refused quickly with its name, and leaves no files behind."""

import builtins
import dataclasses
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_files import (
    LFS,
    TINY,
    refused,
    tiny_directory,
    write_gguf,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.weights.convert import convert
from jshadow.weights.params import load

pytestmark = pytest.mark.timeout(120)

BAD_METADATA: dict[str, tuple[dict[str, Any], type[JshadowError], tuple[str, ...]]] = {
    "architecture": ({"arch": "qwen9"}, ConfigError, ("general.architecture", "qwen9")),
    "pre": ({"metadata": {"tokenizer.ggml.pre": "martian"}}, ConfigError, ("tokenizer.ggml.pre", "martian", "smollm")),
    "tokenizer model": ({"metadata": {"tokenizer.ggml.model": "spm"}}, ConfigError, ("tokenizer.ggml.model", "spm")),
    "bos": ({"metadata": {"tokenizer.ggml.bos_token_id": 999}}, CheckpointError, ("bos_token_id", "999")),
    "eos": ({"metadata": {"tokenizer.ggml.eos_token_id": 999}}, ConfigError, ("eos_ids", "999")),
    "merge": ({"metadata": {"tokenizer.ggml.merges": ["he"]}}, CheckpointError, ("merges", "'he'")),
    "foreign merge": ({"metadata": {"tokenizer.ggml.merges": ["日 本"]}}, CheckpointError, ("merges do not fit",)),
    "double token": ({"metadata": {"tokenizer.ggml.tokens": ["a", "a"]}}, CheckpointError, ("tokens", "distinct")),
    "token types": ({"metadata": {"tokenizer.ggml.token_type": [1]}}, CheckpointError, ("token_type", "[1]")),
    "template": ({"metadata": {"tokenizer.chat_template": 3}}, CheckpointError, ("chat_template", "int")),
    "lacks": ({"metadata": {"llama.block_count": None}}, CheckpointError, ("lacks llama.block_count",)),
    "kind": ({"metadata": {"llama.embedding_length": "x"}}, CheckpointError, ("llama.embedding_length", "'x'")),
    "no heads": ({"metadata": {"llama.attention.head_count": 0}}, CheckpointError, ("head_count", "0")),
    "depth": ({"metadata": {"llama.block_count": 10**9}}, CheckpointError, ("num_hidden_layers", "1000000000")),
    "too shallow": ({"metadata": {"llama.block_count": 1}}, CheckpointError, ("model.layers.1", "extra")),
    "experts": ({"metadata": {"llama.expert_count": 8}}, ConfigError, ("expert_count", "8")),
    "partial rope": ({"metadata": {"llama.rope.dimension_count": 4}}, ConfigError, ("dimension_count", "8", "4")),
    "yarn": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, ConfigError, ("scaling.type", "yarn")),
    "divisors": (
        {"extra_tensors": {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}},
        ConfigError,
        ("rope_freqs",),
    ),
    "extra": ({"extra_tensors": {"stranger": np.ones(3, np.float32)}}, CheckpointError, ("stranger", "extra")),
    "misshaped": ({"metadata": {"llama.feed_forward_length": 48}}, CheckpointError, ("up_proj", "[48, 32]")),
    "alignment": ({"metadata": {"general.alignment": 24}}, CheckpointError, ("general.alignment", "24")),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata_is_refused_by_name(tmp_path: Path, case: str) -> None:
    options, error, fragments = BAD_METADATA[case]
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY, **options)
    refused(source, tmp_path / "out", error, fragments)


def header(tensors: int = 0, fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


KEY = string(b"k")
PAD = bytes(64)
CRAFTED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    # 49 bytes that make the reader of gguf 0.19 run forever
    "array of 2^63": (header(0, 1, KEY + struct.pack("<IIQ", 9, 0, 2**63)), ("array length of metadata 'k'",)),
    "strings 2^63": (header(0, 1, KEY + struct.pack("<IIQ", 9, 8, 2**63) + PAD), ("array length", str(2**63))),
    "huge kv count": (header(0, 2**62, PAD), ("metadata count", str(2**62))),
    "huge tensor count": (header(2**64 - 1, 0, PAD), ("tensor count", str(2**64 - 1))),
    "huge key": (header(0, 1, struct.pack("<Q", 2**40) + PAD), ("length of metadata key", str(2**40))),
    "huge string": (header(0, 1, KEY + struct.pack("<IQ", 8, 2**50) + PAD), ("length of metadata 'k'", str(2**50))),
    "nested array": (header(0, 1, KEY + struct.pack("<IIQ", 9, 9, 1) + PAD), ("metadata 'k'", "nested", "9")),
    "unknown type": (header(0, 1, KEY + struct.pack("<I", 77) + PAD), ("metadata 'k'", "77")),
    "key not UTF-8": (header(0, 1, string(b"\xff") + PAD), ("metadata key", "UTF-8")),
    "key twice": (header(0, 2, 2 * (KEY + struct.pack("<IB", 0, 1)) + PAD), ("'k'", "twice")),
    "rank": (header(1, 0, string(b"t") + struct.pack("<I", 9) + PAD), ("rank of tensor 't'", "9")),
    "empty shape": (header(1, 0, string(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0) + PAD), ("'t'", "(0,)")),
    "tensor type": (header(1, 0, string(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0) + PAD), ("'t'", "999")),
    "block": (header(1, 0, string(b"t") + struct.pack("<IQIQ", 1, 4, 3, 0) + PAD), ("'t'", "(4,)")),
    "huge shape": (header(1, 0, string(b"t") + struct.pack("<IQQIQ", 2, 2**62, 4, 0, 0) + PAD), ("'t'", "beyond")),
    "huge offset": (header(1, 0, string(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**62) + PAD), ("'t'", "beyond")),
    "version": (header(version=9), ("version", "(2, 3)", "9")),
    "big-endian": (header(version=3 << 24), ("version", "big-endian")),
    "no tensors": (header(rest=PAD), ("general.architecture",)),
    "short": (b"GGUF\x03", ("version", "bytes are left")),
    "garbage": (b"PK\x03\x04 not a model" * 9, ("GGUF", "PK")),
    "empty": (b"", ("empty file",)),
    "LFS pointer": (LFS, ("Git LFS pointer",)),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_gguf_is_refused(tmp_path: Path, case: str) -> None:
    content, fragments = CRAFTED[case]
    (tmp_path / "x.gguf").write_bytes(content)
    refused(tmp_path / "x.gguf", tmp_path / "out", JshadowError, fragments)  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_every_truncation_is_refused(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m", num_layers=1)
    source = write_gguf(tmp_path / "x.gguf", directory, dataclasses.replace(TINY, num_layers=1))
    content = source.read_bytes()
    for keep in (*range(0, 400, 7), *np.linspace(400, len(content) - 1, 60).astype(int)):
        source.write_bytes(content[:keep])
        refused(source, tmp_path / "out", CheckpointError, ("x.gguf",))


def test_missing_and_wrong_sources(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", tmp_path / "out", CheckpointError, ("none.gguf", "no such file"))
    (tmp_path / "dir.gguf").mkdir()
    refused(tmp_path / "dir.gguf", tmp_path / "out", CheckpointError, ("dir.gguf", "not a regular file"))
    refused(tmp_path / "none" / "at" / "all", tmp_path / "out", CheckpointError, ("does not exist",))


def test_nan_in_gguf_is_refused(tmp_path: Path) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY)
    content = bytearray(source.read_bytes())
    content[-4:] = struct.pack("<f", np.nan)
    data = gguf.GGUFReader(source).tensors[-1]
    content[data.data_offset : data.data_offset + 4] = struct.pack("<f", np.inf)
    source.write_bytes(content)
    refused(source, tmp_path / "out", CheckpointError, ("NaN or Inf",))


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = tiny_directory(tmp_path / "m")
    source = write_gguf(tmp_path / "x.gguf", directory, TINY)
    real = builtins.__import__

    def no_gguf(name: str, *rest: Any) -> Any:
        if name.startswith("gguf"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_gguf)
    refused(source, tmp_path / "out", CheckpointError, ("pip install 'jshadow[gguf]'",))


@pytest.mark.timeout(300)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_gguf_converts_or_raises_ours(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory, _ = tiny_directory(Path(folder) / "m", num_layers=1)
        source = write_gguf(Path(folder) / "x.gguf", directory, dataclasses.replace(TINY, num_layers=1))
        content = bytearray(source.read_bytes())
        start = content.index(b"token_type") if data.draw(st.booleans()) else 0  # skip the long list of tokens or not
        end = int(gguf.GGUFReader(source).tensors[0].data_offset)
        for at in data.draw(st.lists(st.integers(start, end), min_size=1, max_size=5)):
            content[at] = data.draw(st.integers(0, 255))
        source.write_bytes(content)
        try:
            convert(source, Path(folder) / "out")
            load(Path(folder) / "out")
        except JshadowError:
            assert not (Path(folder) / "out").exists() or (Path(folder) / "out" / "model.safetensors").exists()
        assert not [name for name in os.listdir(folder) if "partial" in name]
