"""MiniMax-M2 (MiniMax, 2025): half of each head rotated, norms over all heads together, and experts."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import Experts, ModelConfig, check_positive, experts_of
from jshadow.models.family import ModelFamily, Rule
from jshadow.models.llama import ATTENTION, EMBEDDING, NORMS, OUTPUT, QK_NORMS, VALUES
from jshadow.models.sliding import layer_count
from jshadow.ops.rope import RopeConfig

EXPERTS = (
    Rule(r"model\.layers\.(\d+)\.block_sparse_moe\.gate\.weight", "layer_{0}/mlp/router/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.block_sparse_moe\.e_score_correction_bias", "layer_{0}/mlp/router/correction"),
    *(
        Rule(
            rf"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.{theirs}\.weight",
            f"layer_{{0}}/mlp/experts/{ours}/kernel",
            "transpose",
            stacked=True,
        )
        for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    share = hf.get("partial_rotary_factor")
    if share is None and hf.get("rotary_dim") is not None:
        check_positive("config.json", rotary_dim=hf["rotary_dim"], head_dim=hf["head_dim"])
        share = hf["rotary_dim"] / hf["head_dim"]
    experts = Experts(
        hf["num_local_experts"],
        hf["num_experts_per_tok"],
        hf["intermediate_size"],
        tuple(range(layer_count(hf))),
        "sigmoid",
        corrected=True,
    )
    rope = RopeConfig.from_hf(hf if share is None else {**hf, "partial_rotary_factor": share})
    return {"rope": rope, "joint_qk_norm": True, "experts": experts}


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
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
