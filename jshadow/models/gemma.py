"""Gemma 3, text only (arXiv 2503.19786, section 2).

There are five sliding layers for each global layer. The two kinds of layers have different RoPE settings.
"""

from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, activation_of
from jshadow.models.family import ModelFamily, Rule
from jshadow.models.llama import ATTENTION, DOWN, EMBEDDING, GATE_AND_UP, OUTPUT, QK_NORMS, VALUES
from jshadow.models.sliding import FULL, SLIDING, by_pattern, layer_types, rope_of_kind, ropes_to_hf, sliding_fields

AROUND = (
    Rule(r"model\.layers\.(\d+)\.input_layernorm\.weight", "layer_{0}/attention_norm/scale"),
    Rule(r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", "layer_{0}/attention_post_norm/scale"),
    Rule(r"model\.layers\.(\d+)\.pre_feedforward_layernorm\.weight", "layer_{0}/mlp_norm/scale"),
    Rule(r"model\.layers\.(\d+)\.post_feedforward_layernorm\.weight", "layer_{0}/mlp_post_norm/scale"),
)
_NOT_BUILT = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key in _NOT_BUILT:
        if hf.get(key):
            raise ConfigError(f"config.json {key} must be absent (it is not supported), got {hf[key]!r}")
    return {
        **sliding_fields(hf, by_pattern(hf, 6)),
        "rope": rope_of_kind(hf, FULL, hf["rope_theta"], hf.get("rope_scaling")),
        "sliding_rope": rope_of_kind(hf, SLIDING, hf["rope_local_base_freq"]),
        "activation": activation_of(hf, "hidden_activation"),
        "qk_norm": True,
        "post_norms": True,
        "norm": "unit",
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "query_scalar": hf["query_pre_attn_scalar"],
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "query_pre_attn_scalar": config.query_scalar,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        **ropes_to_hf(config),
    }


GEMMA3_TEXT = ModelFamily(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3, text (270M, 1B)",
    rules=EMBEDDING + AROUND + ATTENTION + VALUES + OUTPUT + QK_NORMS + GATE_AND_UP + DOWN,
    differs="sliding layers keep a plain window, global layers take the policy; norms around everything; tanh GELU",
    defaults={
        "vocab_size": 262208,
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    read=_read,
    write=_write,
)
