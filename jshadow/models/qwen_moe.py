"""Qwen3 with experts (arXiv 2505.09388, section 2)."""

from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import Experts, ModelConfig, check_positive, experts_of
from jshadow.models.family import ModelFamily, read_part, write_part
from jshadow.models.llama import EXPERTS, QK_NORMS, RULES
from jshadow.models.sliding import layer_count

_KEYS = {
    "count": "num_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalized": "norm_topk_prob",
}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, step = layer_count(hf), hf["decoder_sparse_step"]
    check_positive("config.json", decoder_sparse_step=step)
    plain = hf.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise ConfigError(f"config.json mlp_only_layers must be a list, got {plain!r}")
    if hf.get("use_sliding_window"):
        raise ConfigError(f"config.json use_sliding_window must be false, got {hf['use_sliding_window']!r}")
    count = hf.get("num_local_experts") or hf["num_experts"]  # published files have the second name
    having = tuple(layer for layer in range(layers) if layer not in plain and (layer + 1) % step == 0)
    return {"qk_norm": True, "experts": read_part(Experts, _KEYS, hf, count=count, layers=having)}


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        **write_part(experts, _KEYS),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in experts.layers],
        "use_sliding_window": False,
    }


QWEN3_MOE = ModelFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B",
    rules=RULES + QK_NORMS + EXPERTS,
    differs="as `qwen3`, with experts",
    defaults={
        "vocab_size": 151936,
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
    read=_read,
    write=_write,
)
