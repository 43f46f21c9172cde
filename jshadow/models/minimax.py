"""MiniMax-M2 (MiniMax, 2025): half of each head rotated, norms over all heads together, and experts."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig, check_positive, experts_of
from jshadow.models.family import ModelFamily, write_part
from jshadow.models.llama import ATTENTION, EMBEDDING, NORMS, OUTPUT, QK_NORMS, VALUES
from jshadow.models.mixtral import EXPERTS, LOCAL, local_experts
from jshadow.ops.rope import RopeConfig


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    share = hf.get("partial_rotary_factor")
    if share is None and hf.get("rotary_dim") is not None:
        check_positive("config.json", rotary_dim=hf["rotary_dim"], head_dim=hf["head_dim"])
        share = hf["rotary_dim"] / hf["head_dim"]
    experts = local_experts(hf, router="sigmoid", corrected=True)
    rope = RopeConfig.from_hf(hf if share is None else {**hf, "partial_rotary_factor": share})
    return {"rope": rope, "joint_qk_norm": True, "experts": experts}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_part(experts_of(config), LOCAL),
        "partial_rotary_factor": config.rope.rotary_share,
        "rotary_dim": config.rope.rotary_dim(config.head_dim),
    }


MINIMAX_M2 = ModelFamily(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    models="MiniMax-M2",
    rules=EMBEDDING + NORMS + ATTENTION + VALUES + OUTPUT + QK_NORMS + EXPERTS,
    differs="half of each head rotated; queries and keys are normed over all heads; experts",
    defaults={
        "vocab_size": 200064,
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
        "eos_token_id": 200020,
    },
    read=_read,
    write=_write,
    partial_rotary=True,
    published_code=("configuration_minimax_m2.MiniMaxM2Config", "modeling_minimax_m2.MiniMaxM2ForCausalLM"),
)
