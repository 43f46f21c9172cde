"""Tiny checkpoints for the tests: Hugging Face directories and GGUF files, made by other code than they test."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from jshadow.errors import JshadowError
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.weights.convert import convert
from jshadow.weights.params import Params, init_params, save

ALPHABET = sorted(ByteLevel.alphabet())
SPECIAL = ["<|end|>", "<|user|>", "<|bot|>"]
MERGES = ["h e", "l l", "he ll", "1 2"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"  # noqa: E501
TINY = ModelConfig("llama", len(TOKENS), 2, 32, 64, 4, 2, 8, 1e-5, 128, RopeConfig(theta=1000.0), eos_ids=(0,))
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"

ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def assert_same(one: Params, other: Params) -> None:
    """The same config, tree, dtypes and bits."""
    assert one.config == other.config
    assert jax.tree.structure(one.weights) == jax.tree.structure(other.weights)
    for a, b in zip(jax.tree.leaves(one.weights), jax.tree.leaves(other.weights), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def tiny_directory(path: Path, dtype: str = "float32", **changes: Any) -> tuple[Path, Params]:
    """A tiny HF directory and the params that it holds."""
    params = init_params(dataclasses.replace(TINY, **changes), seed=3, dtype=dtype)
    save(params, path)
    return path, params


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value = {key: item for key, item in (value | changes).items() if item is not None}
    path.write_text(json.dumps(value))


def edit_tensors(directory: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change model.safetensors by a function on the dict of its tensors."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def bare(tensors: dict[str, np.ndarray]) -> None:
    """Rename tensors as transformers does when it saves a model without its head: without the prefix `model.`."""
    for name in [*tensors]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def shard(directory: Path, count: int = 3) -> list[str]:
    """Split model.safetensors into `count` shards with an index; returns the shards' names."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    keys = sorted(tensors)
    weight_map = {}
    for i, name in enumerate(names):
        part = {key: tensors[key] for key in keys[i::count]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def ggml_name(name: str, arch: str) -> str:
    """GGUF's name of a Hugging Face tensor. An architecture that does not exist has the names of llama."""
    kind = ARCHITECTURES.get(arch, ARCHITECTURES["llama"])
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return gguf.get_tensor_name_map(kind, 9).get_name(name, try_suffixes=(".weight", ".bias"))


def ggml_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as GGML wants them: row 2i is i of the first half, row 2i + 1 is i of the second."""
    width = rows.shape[0] // heads
    starts, pairs = range(0, rows.shape[0], width), range(width // 2)
    return rows[[start + half * (width // 2) + i for start in starts for i in pairs for half in (0, 1)]]


def write_gguf(path: Path, directory: Path, config: ModelConfig, **options: Any) -> Path:
    """A GGUF file with the weights of `directory`.

    Options: arch (the architecture), split (tensors of each file, if there are several), kind (a GGMLQuantizationType
    of matrices), metadata ({key: value}, None: drop), extra_tensors, tokenizer (bool).
    """
    arch = options.get("arch", "llama")
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=options.get("split", 0))
    fields: dict[str, Any] = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": json.loads((directory / "config.json").read_text())["max_position_embeddings"],
        f"{arch}.embedding_length": config.model_dim,
        f"{arch}.feed_forward_length": config.ffn_dim,
        f"{arch}.attention.head_count": config.q_heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.rope.freq_base": config.rope.theta,
        f"{arch}.rope.dimension_count": config.rope.rotary_dim(config.head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    if options.get("tokenizer", True):
        kinds = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4]
        fields |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.chat_template": TEMPLATE,
        }
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in (fields | options.get("metadata", {})).items():
        if value is not None:
            getattr(writer, f"add_{adders[type(value)]}")(key, value)
    tensors = load_file(directory / "model.safetensors")
    if config.experts is not None:
        fields = {"expert_count": config.experts.count, "expert_used_count": config.experts.chosen}
        for key, value in (fields | {"expert_feed_forward_length": config.experts.width}).items():
            writer.add_uint32(f"{arch}.{key}", value)
        for name in [name for name in tensors if ".experts.0." in name]:  # one tensor has all experts
            parts = [name.replace(".experts.0.", f".experts.{expert}.") for expert in range(config.experts.count)]
            tensors[name.replace(".experts.0.", ".experts.")] = np.stack([tensors.pop(part) for part in parts])
    if arch == "gpt-oss":
        tensors = dict(gpt_oss_tensors(tensors))
    for name, value in tensors.items():
        if arch in ("llama", "mistral3", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
            value = ggml_order(value, config.q_heads if "q_proj" in name else config.kv_heads)
        if arch == "gemma3" and "norm" in name:
            value = value + 1
        kind = options.get("kind") if value.ndim == 2 else None
        data = np.ascontiguousarray(value, np.float32)
        writer.add_tensor(ggml_name(name, arch), gguf.quants.quantize(data, kind) if kind else data, raw_dtype=kind)
    for name, value in options.get("extra_tensors", {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gpt_oss_tensors(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of gpt-oss under names that GGUF's have: gate and up apart, and kernels as [E, out, in]."""
    for name, value in tensors.items():
        stem, _, kind = name.partition("_proj") if ".experts." in name else (name, "", "")
        suffix = {"": ".weight", "_bias": ".bias"}[kind] if stem != name else ""
        if value.ndim == 3:
            value = value.swapaxes(1, 2)
        if stem.endswith("gate_up"):
            stem = stem.removesuffix("gate_up")
            yield f"{stem}gate_proj{suffix}", value[:, 0::2]
            yield f"{stem}up_proj{suffix}", value[:, 1::2]
        elif stem != name:
            yield f"{stem}_proj{suffix}", value
        else:
            yield name if name.endswith((".weight", ".bias")) else f"{name}.weight", value


def refused(source: Path, target: Path, error: type[JshadowError], fragments: tuple[str, ...]) -> None:
    """Assert that converting raises `error`, says every fragment, and leaves nothing beside the source."""
    before = sorted(os.listdir(target.parent))
    with pytest.raises(error) as caught:
        convert(source, target)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value
    assert sorted(os.listdir(target.parent)) == before
