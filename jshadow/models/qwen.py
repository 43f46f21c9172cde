"""Qwen2 and 2.5 (arXiv 2407.10671, section 2.2), and Qwen3 (arXiv 2505.09388).

Qwen2 and 2.5 have biases on q, k and v. Qwen3 normalizes queries and keys instead.
"""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily
from jshadow.models.llama import QK_NORMS, RULES
from jshadow.models.sliding import last_layers, layer_types

_DEFAULTS = {
    "vocab_size": 151936,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _window(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": bool(config.sliding_layers),
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


def _qwen2(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**last_layers(hf), "attention_bias": True, "output_bias": False}


def _qwen3(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**last_layers(hf), "qk_norm": True}


QWEN2 = ModelFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    rules=RULES,
    differs="biases on q, k and v",
    defaults=_DEFAULTS,
    read=_qwen2,
    write=_window,
)
QWEN3 = ModelFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3 (dense)",
    rules=RULES + QK_NORMS,
    differs="queries and keys are normed before RoPE",
    defaults={**_DEFAULTS, "head_dim": 128},
    read=_qwen3,
    write=_window,
)
