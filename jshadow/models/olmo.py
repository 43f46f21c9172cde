"""OLMo 2 (arXiv 2501.00656, section 2) and Olmo 3: norms behind attention and MLP, and over all heads together."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily, Rule
from jshadow.models.llama import ATTENTION, DOWN, EMBEDDING, GATE_AND_UP, OUTPUT, QK_NORMS, VALUES
from jshadow.models.sliding import FULL, SLIDING, layer_count, layer_types, rope_of_kind, ropes_to_hf, sliding_fields

POST_NORMS = (
    Rule(r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", "layer_{0}/attention_post_norm/scale"),
    Rule(r"model\.layers\.(\d+)\.post_feedforward_layernorm\.weight", "layer_{0}/mlp_post_norm/scale"),
)
_RULES = EMBEDDING + POST_NORMS + ATTENTION + VALUES + OUTPUT + QK_NORMS + GATE_AND_UP + DOWN
_DEFAULTS = {
    "vocab_size": 50304,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "eos_token_id": 50279,
}
_SWITCHES = {"norm": "wide", "pre_norms": False, "post_norms": True, "joint_qk_norm": True}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of RoPE is that of the full layers alone."""
    return {
        **sliding_fields(hf, [(layer + 1) % 4 != 0 for layer in range(layer_count(hf))]),
        "rope": rope_of_kind(hf, FULL, hf["rope_theta"], hf.get("rope_scaling")),
        "sliding_rope": rope_of_kind(hf, SLIDING, hf["rope_theta"]),
        **_SWITCHES,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        **ropes_to_hf(config),
    }


OLMO2 = ModelFamily(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    rules=_RULES,
    differs="norms behind attention and MLP, and none before them; queries and keys are normed over all heads",
    defaults=_DEFAULTS,
    read=lambda hf: _SWITCHES,
)
OLMO3 = ModelFamily(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    models="Olmo 3",
    rules=_RULES,
    differs="as `olmo2`; three of four layers have a sliding window and an unscaled RoPE",
    defaults={**_DEFAULTS, "sliding_window": 4096, "rope_theta": 5e5},
    read=_read,
    write=_write,
)
