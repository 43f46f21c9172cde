"""GLM-4 (arXiv 2406.12793, section 2).

RoPE rotates half of each head, in pairs of neighboring columns. There are few KV heads.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily, Rule
from jshadow.models.llama import ATTENTION, DOWN, EMBEDDING, FUSED_GATE_AND_UP, NORMS, OUTPUT, VALUES

_INTERLEAVED = tuple(dataclasses.replace(rule, interleaved=True) for rule in ATTENTION)
_POST_NORMS = (
    Rule(r"model\.layers\.(\d+)\.post_self_attn_layernorm\.weight", "layer_{0}/attention_post_norm/scale"),
    Rule(r"model\.layers\.(\d+)\.post_mlp_layernorm\.weight", "layer_{0}/mlp_post_norm/scale"),
)
_RULES = EMBEDDING + NORMS + _INTERLEAVED + VALUES + OUTPUT + FUSED_GATE_AND_UP + DOWN
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
