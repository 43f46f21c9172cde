"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219, section 2).

One fused tensor holds q, k and v, and another holds gate and up. Long contexts use LongRoPE.
"""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily, Rule
from jshadow.models.llama import DOWN, EMBEDDING, FUSED_GATE_AND_UP, NORMS, OUTPUT
from jshadow.models.sliding import all_layers
from jshadow.ops.rope import RopeConfig

_FUSED_QKV = Rule(
    r"model\.layers\.(\d+)\.self_attn\.qkv_proj\.weight", "layer_{0}/attention/{1}/kernel", "transpose", ("q", "k", "v")
)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters")
    if isinstance(scaling, Mapping):
        # The original context at the top level of the file overrides the one inside the scaling. Early files call
        # LongRoPE "yarn".
        scaled = {**scaling, "original_max_position_embeddings": hf["original_max_position_embeddings"]}
        if scaled.get("rope_type", scaled.get("type")) == "yarn":
            scaled |= {"type": "longrope", "rope_type": "longrope"}
        hf = {**hf, "rope_scaling": scaled}
    return {**all_layers(hf), "rope": RopeConfig.from_hf(hf)}


def _write(config: ModelConfig) -> dict[str, Any]:
    original = config.rope.original_context if config.rope.kind == "longrope" else config.context
    return {"sliding_window": config.sliding_window, "original_max_position_embeddings": original}


PHI3 = ModelFamily(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini",
    rules=(*EMBEDDING, *NORMS, _FUSED_QKV, *OUTPUT, *FUSED_GATE_AND_UP, *DOWN),
    differs="fused projections; LongRoPE, long or short by the capacity",
    defaults={
        "vocab_size": 32064,
        "num_hidden_layers": 32,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "eos_token_id": 32000,
    },
    read=_read,
    write=_write,
    partial_rotary=True,
    published_code=("configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"),
)
