"""Gemma 4, the text models whose layers share no keys and values (Google DeepMind, "Gemma 4 model card").

The sliding layers and the others have different heads. In the larger models, the layers that see all tokens have no
projection of the values: these are the keys before the norm and RoPE.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import Experts, ModelConfig, activation_of
from jshadow.models.family import ModelFamily, linear, of_layer, read_part, write_part
from jshadow.models.gemma import AROUND
from jshadow.models.llama import ATTENTION, DOWN, EMBEDDING, GATE_AND_UP, GATED, OUTPUT, QK_NORMS, VALUES
from jshadow.models.sliding import (
    FULL,
    SLIDING,
    by_pattern,
    layer_count,
    layer_types,
    others,
    rope_of_kind,
    ropes_to_hf,
    sliding_fields,
)

# Key of config.json -> what the models with it have
_NOT_BUILT = {
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that share keys and values",
}
_HEADS = ("num_key_value_heads", "head_dim")
_EXPERTS = (
    *(linear(rf"mlp\.{name}_proj", f"mlp/shared/{name}") for name in GATED),
    of_layer(r"experts\.gate_up_proj", "mlp/experts/{1}/kernel", "transpose", "gate", "up"),
    of_layer(r"experts\.down_proj", "mlp/experts/down/kernel", "transpose"),
    linear(r"router\.proj", "mlp/router"),
    of_layer(r"router\.scale", "mlp/router/scale"),
    of_layer(r"router\.per_expert_scale", "mlp/router/expert_scale"),
    of_layer(r"pre_feedforward_layernorm_2\.weight", "mlp/experts_norm/scale"),
    of_layer(r"post_feedforward_layernorm_2\.weight", "mlp/experts_post_norm/scale"),
    of_layer(r"post_feedforward_layernorm_1\.weight", "mlp/shared_post_norm/scale"),
)
_KEYS = {"count": "num_experts", "chosen": "top_k_experts", "width": "moe_intermediate_size"}


def _full_heads(hf: Mapping[str, Any], full: tuple[int, ...]) -> tuple[int, int]:
    """Return the number and the width of the KV heads of the layers `full`, which see all tokens.

    Newer files have `per_layer_config`, with what is other in single layers.
    """
    single = hf.get("per_layer_config")
    if not isinstance(single, Mapping):
        heads = hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None
        return heads or hf["num_key_value_heads"], hf["global_head_dim"]
    usual = {key: hf[key] for key in _HEADS}
    single = {int(layer): value for layer, value in single.items()}  # "05"
    found = [usual | single.get(layer, {}) for layer in full]
    if set(single) - {*full} or any(one != found[0] or set(one) != {*_HEADS} for one in found):
        raise ConfigError(
            f"config.json per_layer_config must have the layers that see all tokens alone, with the same {_HEADS}, "
            f"got {single!r:.200}"
        )
    heads = found[0] if found else usual
    return heads["num_key_value_heads"], heads["head_dim"]


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, told in _NOT_BUILT.items():
        if hf.get(key):
            raise ConfigError(f"config.json {key} must be 0 or false ({told} are not supported), got {hf[key]!r}")
    both_ways = hf.get("use_bidirectional_attention")
    if both_ways not in (None, False, "vision"):  # "vision": only inside of images
        raise ConfigError(f"config.json use_bidirectional_attention must be null or 'vision', got {both_ways!r}")
    fields = sliding_fields(hf, by_pattern(hf, 6))
    # The last layer sees all tokens, whatever the file says.
    near = tuple(layer for layer in fields.get("sliding_layers", ()) if layer != hf["num_hidden_layers"] - 1)
    heads, width = _full_heads(hf, others(hf, near))
    experts = None
    if hf.get("enable_moe_block"):
        layers, shared = tuple(range(layer_count(hf))), hf["intermediate_size"]
        experts = read_part(Experts, _KEYS, hf, layers=layers, shared_width=shared, own_norms=True)
    return {
        "experts": experts,
        "sliding_window": hf["sliding_window"] if near else None,
        "sliding_layers": near,
        "sliding_heads": (hf["num_key_value_heads"], hf["head_dim"]) if near else None,
        "kv_heads": heads,
        "head_dim": width,
        "rope": rope_of_kind(hf, FULL, 1e6),
        "sliding_rope": rope_of_kind(hf, SLIDING, 1e4),
        "activation": activation_of(hf, "hidden_activation"),
        "norm": "wide",
        "qk_norm": True,
        "value_norm": True,
        "values_from_keys": bool(hf.get("attention_k_eq_v")),
        "post_norms": True,
        "layer_scale": True,
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "query_scalar": 1.0,
        "logit_cap": hf.get("final_logit_softcapping"),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    far = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim}
    heads, width = config.sliding_heads or (config.kv_heads, config.head_dim)
    return {
        "hidden_activation": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        "num_key_value_heads": heads,
        "head_dim": width,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.kv_heads,
        "per_layer_config": {
            str(layer): far for layer in range(config.num_layers) if layer not in config.sliding_layers
        },
        "attention_k_eq_v": config.values_from_keys,
        "final_logit_softcapping": config.logit_cap,
        **dict.fromkeys(_NOT_BUILT, 0),
        "enable_moe_block": config.experts is not None,
        **({} if config.experts is None else write_part(config.experts, _KEYS)),
        **ropes_to_hf(config),
    }


GEMMA4_TEXT = ModelFamily(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    models="Gemma 4, text (31B; 26B-A4B with experts)",
    rules=(
        *(EMBEDDING + AROUND + ATTENTION + VALUES + OUTPUT + QK_NORMS + GATE_AND_UP + DOWN),
        of_layer("layer_scalar", "scale"),
        *_EXPERTS,
    ),
    differs="as `gemma3_text`; global layers have other heads, and their values may be the keys before the norm",
    defaults={
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    read=_read,
    write=_write,
    attention_keys=("attention_k_eq_v",),
    partial_rotary=True,
)
GEMMA4_UNIFIED_TEXT = dataclasses.replace(
    GEMMA4_TEXT,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    models="Gemma 4, text (12B)",
    differs="as `gemma4_text`",
    defaults={
        **GEMMA4_TEXT.defaults,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
)
