"""Reading a GGUF file of the architectures llama, qwen2 and qwen3 as a Hugging Face checkpoint.

The tables below map GGUF's tensor names and metadata keys to those of Hugging Face.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.models.family import ModelFamily, Rule
from jshadow.models.registry import family_of
from jshadow.ops.rope import inverse_frequencies
from jshadow.weights.convert.files import write_json
from jshadow.weights.convert.gguf_file import GGUFFile
from jshadow.weights.convert.gguf_tokenizer import write_tokenizer
from jshadow.weights.convert.huggingface import GENERATION, place
from jshadow.weights.convert.safetensors_file import raise_all
from jshadow.weights.convert.source import Source

ROPE_FACTORS = "rope_freqs.weight"  # not a weight, but the frequency divisors of llama3 scaling
STEMS = (
    (r"token_embd", "model.embed_tokens", "copy"),
    (r"output_norm", "model.norm", "copy"),
    (r"output", "lm_head", "copy"),
    (r"blk\.(\d+)\.attn_norm", "model.layers.{0}.input_layernorm", "copy"),
    (r"blk\.(\d+)\.attn_q", "model.layers.{0}.self_attn.q_proj", "unpermute_q"),
    (r"blk\.(\d+)\.attn_k", "model.layers.{0}.self_attn.k_proj", "unpermute_k"),
    (r"blk\.(\d+)\.attn_q_norm", "model.layers.{0}.self_attn.q_norm", "copy"),
    (r"blk\.(\d+)\.attn_k_norm", "model.layers.{0}.self_attn.k_norm", "copy"),
    (r"blk\.(\d+)\.attn_v", "model.layers.{0}.self_attn.v_proj", "copy"),
    (r"blk\.(\d+)\.attn_output", "model.layers.{0}.self_attn.o_proj", "copy"),
    (r"blk\.(\d+)\.ffn_norm", "model.layers.{0}.post_attention_layernorm", "copy"),
    (r"blk\.(\d+)\.ffn_gate", "model.layers.{0}.mlp.gate_proj", "copy"),
    (r"blk\.(\d+)\.ffn_up", "model.layers.{0}.mlp.up_proj", "copy"),
    (r"blk\.(\d+)\.ffn_down", "model.layers.{0}.mlp.down_proj", "copy"),
)
NAMES = tuple(
    Rule(rf"{stem}\.{part}", f"{name}.{part}", transform)
    for stem, name, transform in STEMS
    for part in ("weight", "bias")
)
"""Rules from GGUF names to Hugging Face names, for weights and biases."""

KEYS = (
    ("num_hidden_layers", "block_count", int),
    ("hidden_size", "embedding_length", int),
    ("intermediate_size", "feed_forward_length", int),
    ("num_attention_heads", "attention.head_count", int),
    ("max_position_embeddings", "context_length", int),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
"""Names of config.json, and keys of the metadata after the name of the architecture."""
LLAMA3_FACTORS = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
"""The settings of llama3 scaling in every published model. GGUF stores only the divisors that follow from them."""


class Architecture(NamedTuple):
    """How GGUF stores the models of a `general.architecture`, whose name is that of the model type of Hugging Face.

    Attributes:
        class_name: the class of the model in Hugging Face.
        permuted: whether the rows of q and k are in GGML's order.
        has_biases: whether config.json says which projections have biases.
        ends: tokens that end a text in every model, beside those that the file names.
    """

    class_name: str
    permuted: bool = False
    has_biases: bool = False
    ends: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", permuted=True, has_biases=True),
    "qwen2": Architecture("Qwen2ForCausalLM", ends=("<|im_end|>", "<|endoftext|>")),
    "qwen3": Architecture("Qwen3ForCausalLM", ends=("<|im_end|>", "<|endoftext|>")),
}


def open_gguf(path: Path) -> Source:
    """Open a GGUF file of one of the `ARCHITECTURES`, in any quantization that `gguf.quants` can decode.

    Raises:
        CheckpointError: the file is damaged, tensors do not match the metadata (all listed in one error), or the
            package `gguf` is not installed.
        ConfigError: the architecture, the tokenizer or the RoPE scaling is not supported.
    """
    file = GGUFFile(path)
    hf = config_of(file)
    family, config = _parsed(hf, path)
    rules, shapes, problems = _renamed(file)
    _, misfits = place(shapes, family, config)
    raise_all(str(path), problems + misfits)

    def read(name: str) -> np.ndarray:
        original, transform = rules[name]
        value = file.read(original)
        permuted = ARCHITECTURES[hf["model_type"]].permuted
        heads = {"unpermute_q": config.q_heads, "unpermute_k": config.kv_heads}.get(transform) if permuted else None
        return unpermute(value, heads) if heads else value

    def accompany(target: Path) -> None:
        ids = {key: hf[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if hf.get(key) is not None}
        write_json(target / GENERATION, ids)
        write_tokenizer(file.metadata, target, config.context)

    return Source(hf, family, config, shapes, read, accompany)


def unpermute(value: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGML's order of the rows of q and k. The shape [heads * d, ...] does not change.

    RoPE rotates rows 2i and 2i + 1 of a head together in GGML, and rows i and i + d / 2 in Hugging Face. The converter
    of llama.cpp reorders the rows of each head accordingly.
    """
    rows = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return rows.swapaxes(1, 2).reshape(value.shape)


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Build the config.json of a GGUF file from its metadata.

    Raises:
        ConfigError: the architecture is not supported, the model has experts, or config.json cannot express its RoPE
            scaling exactly.
        CheckpointError: a key is missing or has the wrong type, or the file is a part of a model.
    """
    metadata = file.metadata
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file.path} is a part of a GGUF model that is split into split.count={metadata['split.count']!r} files "
            f"(split.no={metadata.get('split.no')!r}); join them first, with llama-gguf-split --merge"
        )
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(f"general.architecture must be one of {list(ARCHITECTURES)}, got {name!r}")
    architecture = ARCHITECTURES[name]
    if metadata.get(f"{name}.expert_count"):
        raise ConfigError(f"{name}.expert_count must be 0 (no experts), got {metadata[f'{name}.expert_count']!r}")
    hf: dict[str, Any] = {field: _number(metadata, f"{name}.{key}", kind) for field, key, kind in KEYS}
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    if heads < 1:
        raise CheckpointError(f"{name}.attention.head_count must be at least 1, got {heads}")
    head_dim = _number(metadata, f"{name}.attention.key_length", int, width // heads)
    rotated = _number(metadata, f"{name}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise ConfigError(f"{name}.rope.dimension_count must be the head width {head_dim}, got {rotated}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: token_embd.weight: missing")
    if architecture.has_biases:
        hf["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        hf["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return hf | {
        "architectures": [architecture.class_name],
        "model_type": name,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": _number(metadata, f"{name}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _number(metadata, f"{name}.rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(metadata, architecture),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _eos(metadata: dict[str, Any], architecture: Architecture) -> int | list[int] | None:
    """Return the token ids that end a text: those that the file names, and those of the architecture."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids += [tokens.index(token) for token in architecture.ends if token in tokens]
    known = list(dict.fromkeys(i for i in ids if i is not None))
    return known[0] if len(known) == 1 else (known or None)


def _number(metadata: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = metadata.get(key, default)
    if value is None:
        raise CheckpointError(f"GGUF metadata lacks {key}")
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise CheckpointError(f"{key} must be one number ({kind.__name__}), got {value!r:.80}")
    # Take the shortest decimal that rounds to the float32: 1e-05, not 9.999999747378752e-06.
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if kind is float and np.float32(value) == value else value


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """Build rope_scaling of config.json. Raises ConfigError if no llama3 settings reproduce the divisors."""
    rope = f"{file.metadata['general.architecture']}.rope"
    kind = file.metadata.get(f"{rope}.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _number(file.metadata, f"{rope}.scaling.factor", float)}
    if kind != "none":
        raise ConfigError(f"{rope}.scaling.type must be 'none' or 'linear', got {kind!r}")
    if ROPE_FACTORS not in file.tensors:
        return None
    divisors = file.read(ROPE_FACTORS).reshape(-1)
    theta = _number(file.metadata, f"{rope}.freq_base", float, 10000.0)
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_FACTORS}
    sound = divisors.shape == (head_dim // 2,) and bool(np.isfinite(divisors).all()) and divisors.min() >= 1
    if sound:
        plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
        scaled = inverse_frequencies(RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": scaling}), head_dim)
        if np.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):
            return scaling
    raise ConfigError(
        f"{ROPE_FACTORS} must be the divisors of llama3 scaling with {LLAMA3_FACTORS}, got {divisors[:4].tolist()}..."
    )


def _parsed(hf: dict[str, Any], source: Path) -> tuple[ModelFamily, ModelConfig]:
    try:
        family = family_of(hf)
        return family, family.config_from_hf(hf)
    except JshadowError as error:
        raise type(error)(f"{source}, metadata read as a config: {error}") from error


def _renamed(file: GGUFFile) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[int, ...]], list[str]]:
    """Rename the tensors of a GGUF file.

    Returns:
        Hugging Face name -> (GGUF name, transform); Hugging Face name -> shape; one line for each unknown tensor.
    """
    rules: dict[str, tuple[str, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for original, info in file.tensors.items():
        if original == ROPE_FACTORS:
            continue  # already read for the config
        matches = [(name, rule.transform) for rule in NAMES for name in rule.match(original)]
        if len(matches) != 1 or matches[0][0] in rules:
            problems.append(f"{original}: extra, no supported model has such a weight")
            continue
        rules[matches[0][0]] = (original, matches[0][1])
        shapes[matches[0][0]] = info.shape
    return rules, shapes, problems
