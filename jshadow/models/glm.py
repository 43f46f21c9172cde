"""GLM-4 (arXiv 2406.12793, section 2) and GLM-4.5 (arXiv 2508.06471, section 2).

RoPE rotates half of each head. In GLM-4, the columns of a pair are neighbors. GLM-4.5 has experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jshadow.models.config import Experts, ModelConfig, experts_of
from jshadow.models.family import ModelFamily, of_layer, read_part, write_part
from jshadow.models.llama import (
    DOWN,
    EMBEDDING,
    EXPERTS,
    FUSED_GATE_AND_UP,
    INTERLEAVED,
    NORMS,
    OUTPUT,
    QK_NORMS,
    RULES,
    VALUES,
)
from jshadow.models.sliding import layer_count

_POST_NORMS = (
    of_layer(r"post_self_attn_layernorm\.weight", "attention_post_norm/scale"),
    of_layer(r"post_mlp_layernorm\.weight", "mlp_post_norm/scale"),
)
_RULES = EMBEDDING + NORMS + INTERLEAVED + VALUES + OUTPUT + FUSED_GATE_AND_UP + DOWN
_CORRECTION = of_layer(r"mlp\.gate\.e_score_correction_bias", "mlp/router/correction")
ROUTED = {
    "count": "n_routed_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalized": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "chosen_groups": "topk_group",
}
_DEFAULTS = {
    "vocab_size": 151552,
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}


def _glm(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"output_bias": False}


def _glm4(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"output_bias": False, "post_norms": True}


def routed(hf: Mapping[str, Any], layers: Sequence[int], **fields: Any) -> Experts:
    """Return the experts of a config.json with the keys of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""
    fields |= {"router": "sigmoid", "least_sum": 1e-20, "corrected": True}
    count = hf.get("num_local_experts") or hf["n_routed_experts"]
    return read_part(Experts, ROUTED, hf, count=count, layers=tuple(layers), **fields)


def _glm4_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
    shared = hf["n_shared_experts"] * hf["moe_intermediate_size"]
    experts = routed(hf, range(hf["first_k_dense_replace"], layer_count(hf)), shared_width=shared)
    return {"output_bias": False, "qk_norm": bool(hf.get("use_qk_norm")), "experts": experts}


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        **_share(config),
        "use_qk_norm": config.qk_norm,
        **write_part(experts, ROUTED),
        "first_k_dense_replace": config.num_layers - len(experts.layers),
        "n_shared_experts": experts.shared_width // experts.width,
    }


def _share(config: ModelConfig) -> dict[str, Any]:
    return {"partial_rotary_factor": config.rope.rotary_share}


GLM = ModelFamily(
    model_type="glm",
    architecture="GlmForCausalLM",
    models="GLM-4-9B, GLM-4-9B-Chat-1M (the -hf checkpoints)",
    rules=_RULES,
    differs="half of each head rotated, interleaved; biases on q, k and v; fused gate and up",
    defaults=_DEFAULTS,
    read=_glm,
    write=_share,
    partial_rotary=True,
)
GLM4 = ModelFamily(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
    rules=_RULES + _POST_NORMS,
    differs="as `glm`, with norms behind attention and MLP",
    defaults=_DEFAULTS,
    read=_glm4,
    write=_share,
    partial_rotary=True,
)
GLM4_MOE = ModelFamily(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    rules=(*RULES, *QK_NORMS, *EXPERTS, _CORRECTION),
    differs="half of each head rotated; experts beside an MLP that all tokens share",
    defaults={
        "vocab_size": 151552,
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    read=_glm4_moe,
    write=_write_moe,
    partial_rotary=True,
)
