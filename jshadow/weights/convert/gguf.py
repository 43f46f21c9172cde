"""Reading a GGUF file as a Hugging Face checkpoint.

A row of `_ARCHITECTURES` says how a `general.architecture` is stored. The package `gguf` has the names of the tensors.
"""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.models.family import ModelFamily
from jshadow.models.registry import FAMILIES, family_of
from jshadow.ops.rope import TEMPERATURE, inverse_frequencies
from jshadow.weights.convert.files import write_json
from jshadow.weights.convert.gguf_file import GGUFFile, gguf_package
from jshadow.weights.convert.gguf_tokenizer import write_tokenizer
from jshadow.weights.convert.huggingface import GENERATION, flat_abstract
from jshadow.weights.convert.safetensors_file import raise_all
from jshadow.weights.convert.source import Placement, Shape, Source, placements


def open_gguf(path: Path) -> Source:
    """Open a GGUF file of one of the `_ARCHITECTURES`, in any quantization that `gguf.quants` can decode.

    Raises:
        CheckpointError: the file is damaged, tensors do not match the metadata (all listed in one error), or the
            package `gguf` is not installed.
        ConfigError: the architecture, the tokenizer or the RoPE scaling is not supported.
    """
    file = GGUFFile(path)
    metadata = _Metadata(file)
    hf = _config_of(metadata)
    family, config = _parsed(hf, path)
    stored, shapes, problems = _matched(metadata, family, config)
    raise_all(str(path), problems)
    decoded = functools.lru_cache(maxsize=1)(file.read)  # experts share a tensor
    architecture = metadata.architecture

    def read(name: str) -> np.ndarray:
        (original, *others), expert = stored[name]
        if expert is not None:
            return decoded(original)[expert]
        value = file.read(original)
        if others:
            value = np.stack([value, *map(file.read, others)], axis=2).reshape(len(value), -1, *value.shape[2:])
        if architecture.swapped and value.ndim == 3:
            return value.swapaxes(1, 2)
        heads = {"q": config.q_heads, "k": config.kv_heads}
        if architecture.permuted and (matched := re.fullmatch(r"blk\.\d+\.attn_(q|k)\.\w+", original)):
            return _unpermute(value, heads[matched[1]])
        return value - 1 if architecture.unit_norms and "norm" in original else value

    def accompany(target: Path) -> None:
        ids = {key: hf[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if hf.get(key) is not None}
        write_json(target / GENERATION, ids)
        write_tokenizer(file.metadata, target, config.context)

    return Source(hf, family, config, shapes, read, accompany)


def _unpermute(value: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGML's order of the rows of q and k. The shape [heads * d, ...] does not change.

    RoPE rotates rows 2i and 2i + 1 of a head together in GGML, and rows i and i + d / 2 in Hugging Face. The converter
    of llama.cpp reorders the rows of each head accordingly.
    """
    rows = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return rows.swapaxes(1, 2).reshape(value.shape)


class _Metadata:
    """The metadata of a file, under the name of its architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.name = file, file.metadata.get("general.architecture")
        if not isinstance(self.name, str) or self.name not in _ARCHITECTURES:
            raise ConfigError(f"general.architecture must be one of {list(_ARCHITECTURES)}, got {self.name!r:.80}")
        self.architecture = _ARCHITECTURES[self.name]

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a number by the rest of its key. Without a default it must be there."""
        key = f"{self.name}.{key}"
        value = self.file.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"GGUF metadata lacks {key}")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise CheckpointError(f"{key} must be one number ({kind.__name__}), got {value!r:.80}")
        if not math.isfinite(value):
            raise CheckpointError(f"{key} must be finite, got {value!r}")
        # Take the shortest decimal that rounds to the float32: 1e-05, not 9.999999747378752e-06.
        with np.errstate(over="ignore"):
            return float(str(np.float32(value))) if kind is float and np.float32(value) == value else value

    def theta(self) -> float:
        return float(self.number("rope.freq_base", float, 10000.0))


_SIZES = (
    ("hidden_size", "embedding_length", int),
    ("intermediate_size", "feed_forward_length", int),
    ("num_attention_heads", "attention.head_count", int),
    ("max_position_embeddings", "context_length", int),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
"""Names of config.json, and keys of the metadata after the name of the architecture."""
# Keys that change what a model computes. They must be absent or 0, unless the architecture reads them.
_MEANINGFUL = (
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.scale", "attention.temperature_scale"),
    *("logit_scale", "residual_scale", "embedding_scale", "expert_count", "rope.dimension_sections"),
)
_LLAMA3_FACTORS = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
"""The settings of llama3 scaling in every published model. GGUF stores only the divisors that follow from them."""
# Tensors that are not weights: the divisors of the frequencies with llama3 scaling, and with LongRoPE.
_LLAMA3_DIVISORS = "rope_freqs.weight"
_LONG_DIVISORS, _SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"


def _config_of(metadata: _Metadata) -> dict[str, Any]:
    """Build the config.json of a GGUF file from its metadata."""
    name, architecture, file = metadata.name, metadata.architecture, metadata.file
    for key in _MEANINGFUL:
        if key not in architecture.keys and (value := file.metadata.get(f"{name}.{key}")):
            raise ConfigError(f"{name}.{key} must be absent or 0 in this architecture, got {value!r:.80}")
    hf: dict[str, Any] = {field: metadata.number(key, kind) for field, key, kind in _SIZES}
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    if heads < 1:
        raise CheckpointError(f"{name}.attention.head_count must be at least 1, got {heads}")
    head_dim = metadata.number("attention.key_length", int, width // heads)
    if head_dim < 1:
        raise CheckpointError(f"{name}.attention.key_length must be at least 1, got {head_dim}")
    rotated = metadata.number("rope.dimension_count", int, head_dim)
    if rotated != head_dim and not FAMILIES[architecture.model_type].partial_rotary:
        raise ConfigError(f"{name}.rope.dimension_count must be the head width {head_dim}, got {rotated}")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight: missing")
    hf |= {
        "architectures": [FAMILIES[architecture.model_type].architecture],
        "model_type": architecture.model_type,
        "num_hidden_layers": metadata.number("block_count", int) - metadata.number("nextn_predict_layers", int, 0),
        "vocab_size": file.tensors["token_embd.weight"][0],
        "num_key_value_heads": metadata.number("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": metadata.theta(),
        "rope_scaling": _rope_scaling(metadata, head_dim),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(file.metadata, architecture),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if rotated != head_dim:
        hf["partial_rotary_factor"] = rotated / head_dim
    return hf | architecture.read(metadata, hf)


def _eos(metadata: dict[str, Any], architecture: "_Architecture") -> int | list[int] | None:
    """Return the token ids that end a text: those that the file names, and those of the architecture."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot")]
    ids = [metadata.get(key) for key in keys]
    for key, token in zip(keys, ids, strict=True):
        if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
            raise CheckpointError(f"{key} must be an integer, got {token!r:.80}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids += [tokens.index(token) for token in architecture.ends if token in tokens]
    known = list(dict.fromkeys(i for i in ids if i is not None))
    return known[0] if len(known) == 1 else (known or None)


# RoPE


def _rope_scaling(metadata: _Metadata, head_dim: int) -> dict[str, Any] | None:
    """Build rope_scaling of config.json."""
    if metadata.has(_LONG_DIVISORS) or metadata.has(_SHORT_DIVISORS):
        return _longrope(metadata)
    older = metadata.number("rope.scale_linear", float, 0.0)  # the key of files from 2023
    factor = metadata.number("rope.scaling.factor", float, older)
    # A factor without a type is one of linear scaling, as llama.cpp reads it.
    kind = metadata.file.metadata.get(f"{metadata.name}.rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if kind != "none" and metadata.has(_LLAMA3_DIVISORS):
        raise ConfigError(f"{metadata.name}.rope.scaling must be absent beside {_LLAMA3_DIVISORS}, got {kind!r}")
    if kind == "linear":
        if factor == 0:
            raise CheckpointError(f"GGUF metadata lacks {metadata.name}.rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(metadata)
    if kind != "none":
        raise ConfigError(f"{metadata.name}.rope.scaling.type must be 'none', 'linear' or 'yarn', got {kind!r}")
    return _llama3(metadata, head_dim) if metadata.has(_LLAMA3_DIVISORS) else None


def _yarn(metadata: _Metadata) -> dict[str, Any]:
    for key in ("yarn_log_multiplier", "yarn_ext_factor", "attn_factor"):
        if (value := metadata.number(f"rope.scaling.{key}", float, 0.0)) not in (0.0, 1.0):
            raise ConfigError(f"{metadata.name}.rope.scaling.{key} must be absent, 0 or 1, got {value}")
    scaling = {"rope_type": "yarn", "factor": metadata.number("rope.scaling.factor", float)}
    original = metadata.number("rope.scaling.original_context_length", int)
    keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    keys |= dict.fromkeys(("mscale", "mscale_all_dim"), "yarn_log_multiplier")  # all files have one number for both
    found = {name: metadata.number(f"rope.scaling.{key}", float, 0.0) for name, key in keys.items()}
    return scaling | {"original_max_position_embeddings": original} | {name: one for name, one in found.items() if one}


def _longrope(metadata: _Metadata) -> dict[str, Any]:
    for name in (_LONG_DIVISORS, _SHORT_DIVISORS):
        if not metadata.has(name):
            raise CheckpointError(f"{metadata.file.path}: {name}: missing")
    long, short = (metadata.file.read(name).reshape(-1).tolist() for name in (_LONG_DIVISORS, _SHORT_DIVISORS))
    scaling = {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": metadata.number("rope.scaling.original_context_length", int),
    }
    factor = metadata.number("rope.scaling.attn_factor", float, 0.0)
    return scaling | ({"attention_factor": factor} if factor else {})


def _llama3(metadata: _Metadata, head_dim: int) -> dict[str, Any]:
    """Build the scaling of Llama 3. Raises ConfigError if no settings of it reproduce the divisors."""
    divisors, theta = metadata.file.read(_LLAMA3_DIVISORS).reshape(-1), metadata.theta()
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3_FACTORS}
    sound = divisors.shape == (head_dim // 2,) and bool(np.isfinite(divisors).all()) and divisors.min() >= 1
    if sound:
        plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
        scaled = inverse_frequencies(RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": scaling}), head_dim)
        if np.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):
            return scaling
    raise ConfigError(
        f"{_LLAMA3_DIVISORS} must be the divisors of llama3 scaling with {_LLAMA3_FACTORS}, got "
        f"{divisors[:4].tolist()}..."
    )


# Architectures: what their config.json has beyond the keys of all

_Fields = dict[str, Any]


def _biases(metadata: _Metadata, hf: _Fields) -> _Fields:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias"), "mlp_bias": metadata.has("blk.0.ffn_up.bias")}


def _nothing(metadata: _Metadata, hf: _Fields) -> _Fields:
    return {}


def _qwen3_moe(metadata: _Metadata, hf: _Fields) -> _Fields:
    keys = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    keys["moe_intermediate_size"] = "expert_feed_forward_length"
    sizes = {field: metadata.number(key, int) for field, key in keys.items()}
    return sizes | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _ministral3(metadata: _Metadata, hf: _Fields) -> _Fields:
    if hf["rope_scaling"] is None or hf["rope_scaling"]["rope_type"] != "yarn":
        raise ConfigError(f"{metadata.name}.rope.scaling.type must be 'yarn' in this architecture")
    temperature = metadata.number("attention.temperature_scale", float)
    return {"rope_scaling": {**hf["rope_scaling"], TEMPERATURE: temperature}, "sliding_window": None}


def _gemma3(metadata: _Metadata, hf: _Fields) -> _Fields:
    """The file lacks what all published models have in common, and the scale that only the 27B has."""
    largest = hf["num_hidden_layers"] == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hf["hidden_size"] // hf["num_attention_heads"] if largest else hf["head_dim"],
        "sliding_window": metadata.number("attention.sliding_window", int),
        "sliding_window_pattern": metadata.number("attention.sliding_window_pattern", int, 6),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", float, 10000.0),
    }


def _phi3(metadata: _Metadata, hf: _Fields) -> _Fields:
    original = metadata.number("rope.scaling.original_context_length", int, hf["max_position_embeddings"])
    window = metadata.number("attention.sliding_window", int, 0)
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _glm4(metadata: _Metadata, hf: _Fields) -> _Fields:
    share = {"partial_rotary_factor": hf.get("partial_rotary_factor", 1.0)}
    return {"attention_bias": metadata.has("blk.0.attn_q.bias"), **share}


def _glm4_moe(metadata: _Metadata, hf: _Fields) -> _Fields:
    gating = metadata.number("expert_gating_func", int, 2)
    if gating != 2:
        raise ConfigError(f"{metadata.name}.expert_gating_func must be 2 (sigmoid), got {gating}")
    keys = {
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
    }
    sizes = {field: metadata.number(key, int) for field, key in keys.items()}
    groups = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    return {
        **_glm4(metadata, hf),
        **sizes,
        **{field: metadata.number(key, int, 1) for field, key in groups.items()},
        "routed_scaling_factor": metadata.number("expert_weights_scale", float, 1.0),
        "norm_topk_prob": bool(metadata.file.metadata.get(f"{metadata.name}.expert_weights_norm", True)),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
    }


def _gpt_oss(metadata: _Metadata, hf: _Fields) -> _Fields:
    if hf["rope_scaling"] is None or hf["rope_scaling"]["rope_type"] != "yarn":
        raise ConfigError(f"{metadata.name}.rope.scaling.type must be 'yarn' in this architecture")
    return {
        "rope_scaling": {**hf["rope_scaling"], "truncate": False},
        "attention_bias": True,
        "num_local_experts": metadata.number("expert_count", int),
        "num_experts_per_tok": metadata.number("expert_used_count", int),
        "intermediate_size": metadata.number("expert_feed_forward_length", int, hf["intermediate_size"]),
        "sliding_window": metadata.number("attention.sliding_window", int),
    }


def _granite(metadata: _Metadata, hf: _Fields) -> _Fields:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return _biases(metadata, hf) | {field: metadata.number(key, float) for field, key in keys.items()}


class _Architecture(NamedTuple):
    """How GGUF stores the models of a `general.architecture`.

    Attributes:
        model_type: the model type of Hugging Face.
        read: returns what config.json has beyond the keys of all architectures.
        keys: those of the keys in `_MEANINGFUL` that `read` reads.
        permuted: whether the rows of q and k are in GGML's order.
        unit_norms: whether the norms' scales are stored with 1 added.
        swapped: whether the inputs and outputs of all experts' kernels change places.
        ends: tokens that end a text in every model, beside those that the file names.
    """

    model_type: str
    read: Callable[[_Metadata, _Fields], _Fields] = _nothing
    keys: tuple[str, ...] = ()
    permuted: bool = False
    unit_norms: bool = False
    swapped: bool = False
    ends: tuple[str, ...] = ()


_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_HARMONY_ENDS = ("<|return|>", "<|endoftext|>", "<|call|>")
_SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
_ARCHITECTURES = {
    "llama": _Architecture("llama", _biases, permuted=True),  # Mistral too
    "mistral3": _Architecture("ministral3", _ministral3, ("attention.temperature_scale",), permuted=True),
    "qwen2": _Architecture("qwen2", ends=_QWEN_ENDS),
    "qwen3": _Architecture("qwen3", ends=_QWEN_ENDS),
    "qwen3moe": _Architecture("qwen3_moe", _qwen3_moe, ("expert_count",), ends=_QWEN_ENDS),
    "gemma3": _Architecture("gemma3_text", _gemma3, unit_norms=True, ends=("<end_of_turn>",)),
    "phi3": _Architecture("phi3", _phi3, ends=("<|end|>", "<|endoftext|>")),
    "glm4": _Architecture("glm4", _glm4, ends=_GLM_ENDS),
    "glm4moe": _Architecture("glm4_moe", _glm4_moe, ("expert_count",), ends=_GLM_ENDS),
    "smollm3": _Architecture("smollm3", _biases, permuted=True),
    "gpt-oss": _Architecture("gpt_oss", _gpt_oss, ("expert_count",), swapped=True, ends=_HARMONY_ENDS),
    "granite": _Architecture("granite", _granite, _SCALES, permuted=True),
}


def _parsed(hf: dict[str, Any], source: Path) -> tuple[ModelFamily, ModelConfig]:
    try:
        family = family_of(hf)
        return family, family.config_from_hf(hf)
    except JshadowError as error:
        raise type(error)(f"{source}, metadata read as a config: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{source}, metadata read as a config: a value is out of range: {error}") from error


# Tensors

_Stored = tuple[list[str], int | None]  # tensors of the file whose rows alternate, and which of their experts


def _matched(
    metadata: _Metadata, family: ModelFamily, config: ModelConfig
) -> tuple[dict[str, _Stored], dict[str, Shape], list[str]]:
    """Match the tensors that the config defines with those of the file.

    Returns:
        Hugging Face's name -> the tensor of the file, Hugging Face's name -> shape, and one line for every tensor that
        is missing, extra or misshaped.
    """
    tensors = metadata.file.tensors
    if config.num_layers > len(tensors):  # checked first, because tracing a billion layers would never end
        return {}, {}, [f"num_hidden_layers is {config.num_layers}, but there are {len(tensors)} tensors"]
    weight_shapes = flat_abstract(config)
    rename = _names(metadata, config.num_layers)
    stored: dict[str, _Stored] = {}
    shapes: dict[str, Shape] = {}
    problems: list[str] = []
    for name, placement in placements(family, weight_shapes).items():
        originals, becomes = rename(placement), f"(it becomes {', '.join(placement.paths)})"
        right = placement.tensor_shape(weight_shapes)
        whole = right if placement.expert is None else (weight_shapes[placement.paths[0]][0], *right)
        if metadata.architecture.swapped and len(whole) == 3:
            whole = (whole[0], whole[2], whole[1])
        whole = (whole[0], whole[1] // 2, *whole[2:]) if len(originals) == 2 else whole
        lines = [f"{original or name}: missing {becomes}" for original in originals if original not in tensors]
        lines += [
            f"{original}: misshaped, expected {list(whole)}, got {list(tensors[original])} {becomes}"
            for original in originals
            if tensors.get(original, whole) != whole
        ]
        problems += lines
        if not lines:
            stored[name], shapes[name] = (originals, placement.expert), right
    used = {original for originals, _ in stored.values() for original in originals}
    used |= {_LLAMA3_DIVISORS, _LONG_DIVISORS, _SHORT_DIVISORS}
    wrong = {problem.split(":", 1)[0] for problem in problems}
    drafts = tuple(f"blk.{layer}." for layer in range(config.num_layers, metadata.number("block_count", int)))
    for original in tensors.keys() - used - wrong:
        if not original.startswith(drafts):
            problems.append(f"{original}: extra, this {config.model_type} config has no such weight")
    return stored, shapes, list(dict.fromkeys(sorted(problems)))


def _names(metadata: _Metadata, layers: int) -> Callable[[Placement], list[str]]:
    """Return a function from a placement to the names of its tensors in GGUF, or [""] if GGUF has no name for it."""
    gguf = gguf_package()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[metadata.name], layers)

    def rename(placement: Placement) -> list[str]:
        name = placement.name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = re.sub(r"\.experts\.\d+\.", ".experts.", name)  # one tensor has all experts of a layer
        name = re.sub(r"(?<=_proj)_bias$", ".bias", name)
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        parts = ("gate", "up") if metadata.architecture.swapped and "gate_up" in name else ("gate_up",)
        names = [name.replace("gate_up", part) for part in parts]
        return [table.get_name(one, try_suffixes=(".weight", ".bias")) or "" for one in names]

    return rename
