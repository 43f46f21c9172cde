"""GGUF files: exact for unquantized tensors, and damaged, crafted and unsupported files are refused by name."""

import dataclasses
import itertools
import json
import math
import os
import re
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import seeded
from checkpoint_files import (
    LFS,
    TEMPLATE,
    TINY,
    TOKENS,
    assert_same,
    edit_tensors,
    ggml_order,
    refused,
    shard,
    tiny_directory,
    write_gguf,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.models.config import Experts
from jshadow.weights.convert import convert
from jshadow.weights.convert.gguf import _ARCHITECTURES
from jshadow.weights.convert.gguf_tokenizer import _PRE_TYPES
from jshadow.weights.params import load

pytestmark = pytest.mark.timeout(120)

VARIANTS = [{}, {"tie_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 6, "kv_heads": 1}]


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


QWEN = {
    "qwen2": {"attention_bias": True, "output_bias": False},
    "qwen3": {"qk_norm": True},
    "qwen3moe": {"qk_norm": True, "experts": Experts(4, 2, 24, (0, 1))},
}


@pytest.mark.parametrize("arch", QWEN)
def test_a_gguf_of_qwen_gives_the_same_model(tmp_path: Path, arch: str) -> None:
    """Its rows are not permuted, and `<|endoftext|>` ends a text too. Words and digits are split as the model does."""
    model_type = arch.replace("moe", "_moe")
    directory, params = tiny_directory(tmp_path / "m", model_type=model_type, **QWEN[arch])
    tokens = [token.replace("<|bot|>", "<|endoftext|>") for token in TOKENS]
    metadata = {"tokenizer.ggml.tokens": tokens, PRE: "qwen2", "tokenizer.ggml.merges": ["h e", "1 2"]}
    convert(
        write_gguf(tmp_path / "x.gguf", directory, params.config, arch=arch, metadata=metadata),
        tmp_path / "out",
        "float32",
    )
    loaded = load(tmp_path / "out", "float32")
    assert loaded.config.eos_ids == (0, TOKENS.index("<|bot|>"))
    config = dataclasses.replace(loaded.config, eos_ids=params.config.eos_ids)
    assert_same(dataclasses.replace(loaded, config=config), load(directory, "float32"))
    ids = loaded.tokenizer("e\u0301 12!").input_ids
    assert loaded.tokenizer.decode(ids) == "\u00e9 12!"
    assert loaded.tokenizer.convert_ids_to_tokens(ids)[-3:] == ["1", "2", "!"]


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
WINDOW, ORIGINAL = "attention.sliding_window", "rope.scaling.original_context_length"
# Of each architecture: a case of the references, what its metadata say beyond the sizes, and tensors of divisors
FROM_REFERENCES: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", "llama_yarn", YARN, ()),
    "mistral": ("llama", "mistral", {}, ()),
    "ministral3": (
        "mistral3",
        "ministral3",
        YARN | {ORIGINAL: 32, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5},
        (),
    ),
    "qwen2": ("qwen2", "qwen2_yarn", YARN, ()),
    "gemma3": ("gemma3", "gemma3_linear", {WINDOW: 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, ()),
    "phi3": ("phi3", "phi3", {ORIGINAL: 4096}, ()),
    "phi3_long": (
        "phi3",
        "phi3_longrope",
        {WINDOW: 400, ORIGINAL: 64},
        ("rope_factors",),
    ),
    "glm4": ("glm4", "glm4", {}, ()),
    "glm4moe": (
        "glm4moe",
        "glm4_moe",
        {
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
        (),
    ),
    "gpt-oss": ("gpt-oss", "gpt_oss", YARN | {WINDOW: 16}, ()),
    "smollm3": ("smollm3", "smollm3", {}, ()),
    "granite": (
        "granite",
        "granite",
        {"embedding_scale": 6.0, "residual_scale": 0.25, "attention.scale": 0.1, "logit_scale": 4.0},
        (),
    ),
}


def coarse_norms(tensors: dict[str, np.ndarray]) -> None:
    """Round the scales of norms, so that 1 can be added to them and taken off again."""
    for name in tensors:
        if "norm" in name:
            tensors[name] = np.round(tensors[name] * 1024) / 1024


@pytest.mark.parametrize("case", FROM_REFERENCES)
def test_a_gguf_of_every_architecture_gives_the_model_of_its_directory(tmp_path: Path, case: str) -> None:
    arch, reference, written, divisors = FROM_REFERENCES[case]
    directory = seeded.write_checkpoint(reference, tmp_path / "m")
    edit_tensors(directory, coarse_norms)
    params = load(directory, "float32")
    rope = params.config.rope
    parts = {"long": rope.long_factors, "short": rope.short_factors}
    source = write_gguf(
        tmp_path / "x.gguf",
        directory,
        params.config,
        arch=arch,
        tokenizer=False,
        metadata={f"{arch}.{key}": value for key, value in written.items()},
        extra_tensors={f"{name}_{part}.weight": np.float32(parts[part]) for name in divisors for part in parts},
    )
    loaded = load(source, "float32")
    fields = {"eos_ids": (), "model_type": params.config.model_type}
    if arch == "gemma3":  # the file has neither the scale nor the layers of the windows
        fields |= {"query_scalar": 16, "sliding_layers": (0, 1, 2)}
    if arch == "gpt-oss":  # all files have this limit
        fields["swiglu_limit"] = 7.0
    if case == "mistral":
        fields["model_type"] = "llama"
    expected = dataclasses.replace(params.config, **fields)
    if arch == "mistral3":  # a file has one number for what this case has two
        expected = dataclasses.replace(expected, rope=dataclasses.replace(rope, attention_factor=1.0))
    if rope.long_factors:  # a tensor has them in float32
        long, short = (tuple(map(float, np.float32(part))) for part in (rope.long_factors, rope.short_factors))
        rope = dataclasses.replace(rope, long_factors=long, short_factors=short)
        expected = dataclasses.replace(expected, rope=rope)
    assert_same(loaded, dataclasses.replace(params, config=expected))


def test_a_split_model(tmp_path, directory):
    """It is opened by its first file. A missing, foreign or later file is refused by name."""
    write_gguf(tmp_path / "x.gguf", directory, TINY, split=8)
    first, *others = sorted(tmp_path.glob("x-*-of-*.gguf"))
    assert len(others) >= 2
    assert_same(load(first, "float32"), load(directory, "float32"))
    refused(others[0], tmp_path / "out", CheckpointError, (others[0].name, "split.no=0", "split.no=1"))
    content = others[0].read_bytes()
    others[0].write_bytes(others[1].read_bytes())
    refused(first, tmp_path / "out", CheckpointError, (others[0].name, "'split.no': 1", "'split.no': 2"))
    others[0].unlink()
    refused(first, tmp_path / "out", CheckpointError, ("lacks 1 of split.count=", others[0].name))
    others[0].write_bytes(content[: len(content) // 2])
    refused(first, tmp_path / "out", CheckpointError, (others[0].name,))
    others[0].write_bytes(content)
    first.rename(tmp_path / "renamed.gguf")
    refused(tmp_path / "renamed.gguf", tmp_path / "out", CheckpointError, ("NAME-00001-of-", "renamed.gguf"))


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|end|>", "\n\n"]
WORDS = ["\u2581", *"helo wrd", "he", "ll", "lo", "hell", "hello", "\u2581hello", "or", "\u2581w", "wor"]
SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": PIECES + WORDS,
    "tokenizer.ggml.scores": [0.0] * len(PIECES) + [-float(index) for index in range(len(WORDS))],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 3, 4] + [1] * len(WORDS),
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.merges": None,
    "tokenizer.chat_template": None,
}
TEXTS = ["hello", "hello world", "  hello", "hell\n\nor", "he <|end|> lo", "\u65e5 h", "wor  ld"]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_sentencepiece(tmp_path, prefix):
    """Of two neighbors, the pair whose token has the best score is joined first. What has no token is bytes."""
    tokens = SENTENCE_PIECE["tokenizer.ggml.tokens"]
    directory, params = tiny_directory(tmp_path / "m", vocab_size=len(tokens))
    metadata = SENTENCE_PIECE | {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = load(write_gguf(tmp_path / "x.gguf", directory, params.config, metadata=metadata)).tokenizer
    for text in TEXTS:
        expected = ["<s>"]
        for part in re.split(r"(\n\n|<\|end\|>)", text):
            plain = part if part in tokens[259:261] else None
            expected += [part] if plain else pieces(part, prefix) if part else []
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == expected, text
        if not prefix:
            assert tokenizer.decode(ids[1:]) == text
    if prefix:
        assert tokenizer.decode(tokenizer("hello world").input_ids[1:]) == "hello world"


def pieces(text: str, prefix: bool) -> list[str]:
    """The tokens of SentencePiece: the best pair of neighbors is joined, the leftmost of equal ones, and so on."""
    scores = dict(zip(WORDS, range(len(WORDS)), strict=True))
    parts = list(("\u2581" if prefix else "") + text.replace(" ", "\u2581"))
    while True:
        pairs = enumerate(itertools.pairwise(parts))
        joined = [(scores[a + b], at) for at, (a, b) in pairs if a + b in scores]
        if not joined:
            break
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [one for part in parts for one in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])]


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_quantized_tensors_equal_ggufs_own(tmp_path: Path, kind: str) -> None:
    directory, _ = tiny_directory(tmp_path / "m", head_dim=16)
    config = dataclasses.replace(TINY, head_dim=16)
    source = write_gguf(tmp_path / "x.gguf", directory, config, kind=gguf.GGMLQuantizationType[kind])
    convert(source, tmp_path / "out", dtype="float32")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    theirs = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(source).tensors}
    for name, ours in (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm")):
        np.testing.assert_array_equal(stored[f"{ours}.weight"], theirs[f"{name}.weight"])
    ours = ggml_order(stored["model.layers.1.self_attn.k_proj.weight"], config.kv_heads)
    np.testing.assert_array_equal(ours, theirs["blk.1.attn_k.weight"])


def test_the_default_dtype_and_the_tokenizer(tmp_path, directory, source):
    convert(source, tmp_path / "out")
    original, stored = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "out"))
    assert {value.dtype.name for value in stored.values()} == {"bfloat16"}
    for name, value in original.items():
        np.testing.assert_array_equal(stored[name], value.astype(stored[name].dtype))
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


PRE, BOS = "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token"
BOTH = {BOS: True, "tokenizer.ggml.add_eos_token": True}
ENDS = [
    ({PRE: "gpt-2"}, "12", ["12"]),
    ({PRE: "gpt2"}, "a b", ["a", "Ġ", "b"]),
    ({PRE: "llama-bpe"}, "12", ["<|user|>", "12"]),  # bos in front unless the file says no
    ({PRE: "llama-bpe", BOS: False}, "hell", ["hell"]),
    ({PRE: "smaug-bpe"}, "12", ["12"]),  # SmolLM3
    ({PRE: "refact"}, "12", ["1", "2"]),  # Granite 3
    ({PRE: "chatglm-bpe"}, "12", ["12"]),
    ({PRE: "deepseek-r1-qwen"}, "12", ["1", "2"]),
    ({BOS: True}, "h1", ["<|user|>", "h", "1"]),
    (BOTH, "h", ["<|user|>", "h", "<|end|>"]),
]


@pytest.mark.parametrize(("metadata", "text", "expected"), ENDS)
def test_pre_types_and_ends(tmp_path, directory, metadata, text, expected):
    convert(write_gguf(tmp_path / "x.gguf", directory, TINY, metadata=metadata), tmp_path / "out")
    tokenizer = load(tmp_path / "out").tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == expected
    alone = [token for token in expected if not token.startswith("<|")]
    assert tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids) == alone


def llama3_divisors(theta: float, width: int, factor: float) -> np.ndarray:
    """The divisors that llama.cpp stores, by the definition: 1 for short wavelengths, `factor` for long ones."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    smooth = np.clip((8192 / wavelengths - 1) / (4 - 1), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def test_what_metadata_become(tmp_path, directory):
    """Divisors become the scaling of Llama 3, a linear scaling itself, and an end of turn an end."""
    divisors = {"rope_freqs.weight": llama3_divisors(500000.0, 8, 32.0)}
    written = {
        "llama3": {"metadata": {"llama.rope.freq_base": 500000.0}, "extra_tensors": divisors},
        "factor 1": {
            "metadata": {"llama.rope.scaling.factor": 1.0, "llama.rope.freq_base": 5e5},
            "extra_tensors": divisors,
        },
        "linear": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
        "no type": {"metadata": {"llama.rope.scaling.factor": 4.0}},
        "of 2023": {"metadata": {"llama.rope.scale_linear": 4.0}},
        "ends": {"metadata": {"tokenizer.ggml.eot_token_id": 2}},
        "no tokenizer": {"tokenizer": False},
        "one file": {"metadata": {"split.count": 1, "split.no": 0}},
    }
    found = {}
    for name, options in written.items():
        convert(write_gguf(tmp_path / f"{name}.gguf", directory, TINY, **options), tmp_path / name)
        loaded = load(tmp_path / name)
        found[name] = loaded.config
        assert (loaded.tokenizer is None) == (name == "no tokenizer")
    rope = found["llama3"].rope
    assert found["factor 1"].rope == rope
    assert (rope.kind, rope.factor, rope.theta, rope.original_context) == ("llama3", 32.0, 500000.0, 8192)
    for name in ("linear", "no type", "of 2023"):
        assert (found[name].rope.kind, found[name].rope.factor) == ("linear", 4.0)
    assert found["ends"].eos_ids == (0, 2)
    assert found["no tokenizer"].eos_ids == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_directory_to_directory(tmp_path: Path, dtype: str) -> None:
    directory, params = tiny_directory(tmp_path / "m", dtype, attention_bias=True)
    shard(directory)
    (directory / "modeling.py").write_text("raise SystemExit")
    convert(directory, tmp_path / "out", dtype="float32")
    assert_same(load(tmp_path / "out", dtype), params)
    names = ["config.json", "generation_config.json", "manifest.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "out")) == names


def test_existing_target_is_left_alone(tmp_path, directory, source):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target in (tmp_path / "out", tmp_path / "link", directory):
        for origin in (source, directory):
            refused(origin, target, CheckpointError, (str(target), "must not exist"))
    assert list((tmp_path / "out").iterdir()) == []


BAD_METADATA: dict[str, tuple[dict[str, Any], type[JshadowError], tuple[str, ...]]] = {
    "architecture": ({"arch": "qwen9"}, ConfigError, ("general.architecture", "qwen9")),
    "kind of pre": ({"metadata": {"tokenizer.ggml.pre": [1]}}, ConfigError, ("tokenizer.ggml.pre", "[1]")),
    "kind of eos": ({"metadata": {"tokenizer.ggml.eot_token_id": [1]}}, CheckpointError, ("eot_token_id", "[1]")),
    "infinite": ({"metadata": {"llama.rope.freq_base": math.inf}}, CheckpointError, ("freq_base", "finite")),
    "no width": ({"metadata": {"llama.attention.key_length": 0}}, CheckpointError, ("attention.key_length", "0")),
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
    "too shallow": ({"metadata": {"llama.block_count": 1}}, CheckpointError, ("blk.1.attn_q", "extra")),
    "experts": ({"metadata": {"llama.expert_count": 8}}, ConfigError, ("expert_count", "8")),
    "partial rope": ({"metadata": {"llama.rope.dimension_count": 4}}, ConfigError, ("dimension_count", "8", "4")),
    "scaling": ({"metadata": {"llama.rope.scaling.type": "odd"}}, ConfigError, ("scaling.type", "'odd'")),
    "yarn": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, CheckpointError, ("lacks llama.rope.scaling.factor",)),
    "images": ({"metadata": {"llama.rope.dimension_sections": [8, 12, 12, 0]}}, ConfigError, ("dimension_sections",)),
    "yarn factor": (
        {"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}},
        ConfigError,
        ("scaling.attn_factor", "2.0"),
    ),
    "one LongRoPE": (
        {"extra_tensors": {"rope_factors_long.weight": np.ones(4, np.float32)}},
        CheckpointError,
        ("rope_factors_short.weight", "missing"),
    ),
    "soft cap": ({"metadata": {"llama.attn_logit_softcapping": 50.0}}, ConfigError, ("attn_logit_softcapping", "50")),
    "scores": (
        {"metadata": {"tokenizer.ggml.model": "llama", PRE: "default", "tokenizer.ggml.scores": [1.0]}},
        CheckpointError,
        ("tokenizer.ggml.scores", "[1.0]"),
    ),
    "pre of pieces": ({"metadata": {"tokenizer.ggml.model": "llama"}}, ConfigError, ("'default'", "'smollm'")),
    "two scalings": (
        {
            "metadata": {"llama.rope.scaling.factor": 2.0},
            "extra_tensors": {"rope_freqs.weight": np.ones(4, np.float32)},
        },
        ConfigError,
        ("rope_freqs.weight", "'linear'"),
    ),
    "divisors": ({"extra_tensors": {"rope_freqs.weight": np.float32([1, 2, 3, 4])}}, ConfigError, ("rope_freqs",)),
    "extra": ({"extra_tensors": {"stranger": np.ones(3, np.float32)}}, CheckpointError, ("stranger", "extra")),
    "misshaped": ({"metadata": {"llama.feed_forward_length": 48}}, CheckpointError, ("blk.0.ffn_up", "[48, 32]")),
    "first of two files": ({"metadata": {"split.count": 2, "split.no": 0}}, CheckpointError, ("count=2", "x.gguf")),
    "a later file": ({"arch": "x", "metadata": {"split.count": 9}}, CheckpointError, ("split.count=9", "no=None")),
    "kind of a split": ({"metadata": {"split.count": "two"}}, CheckpointError, ("split.count='two'",)),
    "alignment": ({"metadata": {"general.alignment": 24}}, CheckpointError, ("general.alignment", "24")),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata_is_refused_by_name(tmp_path, directory, case):
    options, error, fragments = BAD_METADATA[case]
    refused(write_gguf(tmp_path / "x.gguf", directory, TINY, **options), tmp_path / "out", error, fragments)


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


def test_missing_and_wrong_sources(tmp_path, source):
    out = tmp_path / "out"
    (tmp_path / "dir.gguf").mkdir()
    refused(tmp_path / "none.gguf", out, CheckpointError, ("none.gguf", "no such file"))
    refused(tmp_path / "dir.gguf", out, CheckpointError, ("dir.gguf", "not a regular file"))
    refused(tmp_path / "none" / "at" / "all", out, CheckpointError, ("does not exist",))
    content, data = bytearray(source.read_bytes()), gguf.GGUFReader(source).tensors[-1]
    content[data.data_offset : data.data_offset + 4] = struct.pack("<f", np.inf)
    source.write_bytes(content)
    refused(source, out, CheckpointError, ("NaN or Inf",))


def test_without_the_gguf_package(tmp_path, source, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(source, tmp_path / "out", CheckpointError, ("pip install 'jshadow[gguf]'",))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
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


def test_pieces_of_text_are_those_of_transformers():
    """Of every "pre" type that transformers knows too. It does not know glm4, smollm and GPT-2."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    known = {name: pre.pattern for name, pre in _PRE_TYPES.items() if name in theirs.GGUF_PRE_TOKENIZER_SPLITS}
    assert known.keys() >= {"llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx"}
    assert known == {name: theirs.GGUF_PRE_TOKENIZER_SPLITS[name] for name in known}


def test_the_page_of_models_lists_what_is_read():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text().split("\n## GGUF\n")[1].split("\n## ")[0]
    assert {name for name in re.findall(r"`([^`]+)`", page)} >= {*_ARCHITECTURES, *_PRE_TYPES}
