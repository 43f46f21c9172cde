"""gpt-oss (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2): attention sinks, experts with biases."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig, experts_of
from jshadow.models.family import ModelFamily, linear, of_layer, write_part
from jshadow.models.llama import ATTENTION, EMBEDDING, NORMS, OUTPUT, VALUES
from jshadow.models.mixtral import LOCAL, local_experts
from jshadow.models.sliding import layer_count, layer_types, sliding_fields

_SINKS = of_layer(r"self_attn\.sinks", "attention/sinks")
_EXPERTS = (
    linear(r"mlp\.router", "mlp/router"),
    of_layer(r"mlp\.router\.bias", "mlp/router/bias"),
    of_layer(r"mlp\.experts\.gate_up_proj", "mlp/experts/{1}/kernel", "alternate", "gate", "up"),
    of_layer(r"mlp\.experts\.gate_up_proj_bias", "mlp/experts/{1}/bias", "alternate", "gate", "up"),
    of_layer(r"mlp\.experts\.down_proj", "mlp/experts/down/kernel"),
    of_layer(r"mlp\.experts\.down_proj_bias", "mlp/experts/down/bias"),
)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers = layer_count(hf)
    return {
        **sliding_fields(hf, [layer % 2 == 0 for layer in range(layers)]),
        "norm": "wide",
        "activation": "swiglu_clamped",
        "swiglu_alpha": float(hf["swiglu_alpha"]),
        "swiglu_limit": float(hf["swiglu_limit"]),
        "experts": local_experts(hf, router="softmax_of_chosen", biases=True),
        "sinks": True,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        **write_part(experts_of(config), LOCAL),
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


GPT_OSS = ModelFamily(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss-20b, gpt-oss-120b",
    rules=(*EMBEDDING, *NORMS, *ATTENTION, *VALUES, *OUTPUT, _SINKS, *_EXPERTS),
    differs="attention sinks; every other layer slides; experts with biases and a clamped SwiGLU",
    defaults={
        "vocab_size": 201088,
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    read=_read,
    write=_write,
)
