"""Qwen3-Next, Qwen3.5 and 3.6 (Qwen Team): three of four layers are gated DeltaNet, the rest attend.

Attention has an output gate, and rotates a quarter of each head.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, Recurrent, check_positive, experts_of, recurrent_of
from jshadow.models.family import ModelFamily, Rule, linear, of_layer, read_part, write_part
from jshadow.models.llama import (
    ATTENTION,
    DOWN,
    EMBEDDING,
    EXPERTS,
    GATE_AND_UP,
    GATED,
    NORMS,
    OUTPUT,
    QK_NORMS,
    VALUES,
)
from jshadow.models.qwen_moe import QWEN3_MOE
from jshadow.models.sliding import FULL, layer_count

_RECURRENT = "linear_attention"
_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


def _part(name: str, path: str, *parts: str, transform: str = "transpose", grouped: bool = False) -> Rule:
    groups = (lambda config: recurrent_of(config).key_heads) if grouped else None
    return of_layer(rf"linear_attn\.{name}", f"recurrent/{path}", transform, *parts, groups=groups)


_QUERY_AND_GATE = linear(r"self_attn\.q_proj", "attention/{1}", "q", "gate", groups=lambda config: config.q_heads)
_COMMON = (
    *(*EMBEDDING, *NORMS, _QUERY_AND_GATE, *ATTENTION[1:2], *VALUES[:1], *OUTPUT[:1], *QK_NORMS),
    _part(r"conv1d\.weight", "{1}_taps", "q", "k", "v", transform="taps"),
    _part("A_log", "a_log", transform="copy"),
    _part("dt_bias", "dt_bias", transform="copy"),
    _part(r"norm\.weight", "norm/scale", transform="copy"),
    _part(r"out_proj\.weight", "o/kernel"),
)
_FUSED = (
    _part(r"in_proj_qkvz\.weight", "{1}/kernel", "q", "k", "v", "gate", grouped=True),
    _part(r"in_proj_ba\.weight", "{1}/kernel", "beta", "decay", grouped=True),
)
_APART = (
    _part(r"in_proj_qkv\.weight", "{1}/kernel", "q", "k", "v"),
    _part(r"in_proj_z\.weight", "gate/kernel"),
    _part(r"in_proj_b\.weight", "beta/kernel"),
    _part(r"in_proj_a\.weight", "decay/kernel"),
)
_SHARED = (
    *(linear(rf"mlp\.shared_expert\.{name}_proj", f"mlp/shared/{name}") for name in GATED),
    linear(r"mlp\.shared_expert_gate", "mlp/shared_gate"),
)
_STACKED = (
    of_layer(r"mlp\.experts\.gate_up_proj", "mlp/experts/{1}/kernel", "transpose", "gate", "up"),
    of_layer(r"mlp\.experts\.down_proj", "mlp/experts/down/kernel", "transpose"),
)
_DENSE = (*GATE_AND_UP[:2], *DOWN[:1])
_DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def _recurrent_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the recurrent layers: those of `layer_types`, or all but each `full_attention_interval`-th."""
    layers, kinds, interval = layer_count(hf), hf.get("layer_types"), hf["full_attention_interval"]
    check_positive("config.json", full_attention_interval=interval)
    if kinds is None:
        kinds = [FULL if (layer + 1) % interval == 0 else _RECURRENT for layer in range(layers)]
    known = isinstance(kinds, list) and len(kinds) == layers and all(kind in (FULL, _RECURRENT) for kind in kinds)
    if not known:
        raise ConfigError(
            f"config.json layer_types must be {layers} times {FULL!r} or {_RECURRENT!r}, got {kinds!r:.200}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _RECURRENT)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, only in (("attn_output_gate", True), ("attention_bias", False)):
        if hf.get(key, only) not in (only, None):
            raise ConfigError(f"config.json {key} must be {str(only).lower()}, got {hf[key]!r}")
    recurrent = read_part(Recurrent, _KEYS, hf, layers=_recurrent_layers(hf))
    return {
        "recurrent": recurrent if recurrent.layers else None,
        "output_gate": True,
        "qk_norm": True,
        "norm": "unit",
    }


def _read_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    shared = hf["shared_expert_intermediate_size"]
    check_positive("config.json", shared_expert_intermediate_size=shared)
    experts = dataclasses.replace(QWEN3_MOE.read(hf)["experts"], shared_width=shared, shared_gate=True)
    return {**_read(hf), "experts": experts}


def _write(config: ModelConfig) -> dict[str, Any]:
    r = config.recurrent
    if r is None:
        return {"layer_types": [FULL] * config.num_layers}
    return {
        "layer_types": [_RECURRENT if layer in r.layers else FULL for layer in range(config.num_layers)],
        **write_part(r, _KEYS),
    }


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    fields = {name: value for name, value in QWEN3_MOE.write(config).items() if name != "use_sliding_window"}
    return {**_write(config), **fields, "shared_expert_intermediate_size": experts_of(config).shared_width}


QWEN3_NEXT = ModelFamily(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    models="Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    rules=_COMMON + _FUSED + EXPERTS[:4] + _SHARED + _DENSE,
    differs="three of four layers are gated DeltaNet; attention and the shared expert have a gate; experts",
    defaults={
        **_DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts_per_tok": 10,
        "num_experts": 512,
    },
    read=_read_experts,
    write=_write_experts,
    attention_keys=("full_attention_interval", "attn_output_gate"),
    partial_rotary=True,
)
QWEN35_TEXT = dataclasses.replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    models="Qwen3.5 and 3.6, dense (4B, 9B, 27B)",
    rules=_COMMON + _APART + _DENSE,
    differs="as `qwen3_next`, without experts",
    defaults={
        **_DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    read=_read,
    write=_write,
)
QWEN35_MOE_TEXT = dataclasses.replace(
    QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    models="Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B)",
    rules=_COMMON + _APART + EXPERTS[:4] + _STACKED + _SHARED,
    differs="as `qwen3_next`",
    defaults={
        **_DEFAULTS,
        "vocab_size": 248320,
        "intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
)
