"""ERNIE 4.5 (Baidu, "ERNIE 4.5 technical report"): RoPE in pairs of neighboring columns; some models have experts."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import Experts, ModelConfig, check_positive, experts_of
from jshadow.models.family import ModelFamily, of_layer, read_part, write_part
from jshadow.models.llama import DOWN, EMBEDDING, EXPERTS, GATE_AND_UP, INTERLEAVED, NORMS, OUTPUT, VALUES
from jshadow.models.sliding import layer_count

_RULES = EMBEDDING + NORMS + INTERLEAVED + VALUES + OUTPUT + GATE_AND_UP + DOWN
_CORRECTION = of_layer(r"mlp\.moe_statics\.e_score_correction_bias", "mlp/router/correction", "flatten")
_KEYS = {"count": "moe_num_experts", "chosen": "moe_k", "width": "moe_intermediate_size"}
_DEFAULTS = {
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": bool(hf.get("use_bias")), "mlp_bias": bool(hf.get("use_bias"))}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"use_bias": config.attention_bias}


def _read_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, first, last = layer_count(hf), hf["moe_layer_start_index"], hf["moe_layer_end_index"]
    check_positive("config.json", moe_layer_interval=hf["moe_layer_interval"], width=hf["moe_intermediate_size"])
    last = layers - 1 if last == -1 else last
    having = [
        layer for layer in range(layers) if (layer + 1) % hf["moe_layer_interval"] == 0 and first <= layer <= last
    ]
    shared = hf["moe_intermediate_size"] * hf["moe_num_shared_experts"]
    experts = read_part(Experts, _KEYS, hf, layers=tuple(having), corrected=True, shared_width=shared)
    return {**_read(hf), "experts": experts}


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        **_write(config),
        **write_part(experts, _KEYS),
        "moe_num_shared_experts": experts.shared_width // experts.width,
        "moe_layer_start_index": min(experts.layers, default=config.num_layers),
        "moe_layer_end_index": max(experts.layers, default=config.num_layers),
        "moe_layer_interval": 1,
    }


ERNIE45 = ModelFamily(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    models="ERNIE 4.5 0.3B",
    rules=_RULES,
    differs="interleaved RoPE; biases where the config says so",
    defaults={
        **_DEFAULTS,
        "num_hidden_layers": 18,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    read=_read,
    write=_write,
)
ERNIE45_MOE = ModelFamily(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    models="ERNIE 4.5 21B-A3B",
    rules=(*_RULES, *EXPERTS, _CORRECTION),
    differs="as `ernie4_5`, with experts and MLPs that all tokens share",
    defaults={
        **_DEFAULTS,
        "num_hidden_layers": 28,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    read=_read_moe,
    write=_write_moe,
)
