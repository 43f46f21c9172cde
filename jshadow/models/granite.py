"""Granite 3 and 4 (IBM): Llama with factors on embeddings, residuals, scores and logits; some models have experts."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig, check_positive
from jshadow.models.family import ModelFamily, linear, write_part
from jshadow.models.llama import ATTENTION, EMBEDDING, NORMS, OUTPUT, RULES, VALUES
from jshadow.models.mixtral import LOCAL, local_experts

_EXPERTS = (
    linear(r"block_sparse_moe\.router\.layer", "mlp/router"),
    linear(r"block_sparse_moe\.input_linear", "mlp/experts/{1}", "gate", "up"),
    linear(r"block_sparse_moe\.output_linear", "mlp/experts/down"),
)
_DEFAULTS = {
    "vocab_size": 32000,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_scale": float(hf["embedding_multiplier"]),
        "residual_scale": float(hf["residual_multiplier"]),
        "logit_scale": 1 / hf["logits_scaling"],
        "query_scalar": hf["attention_multiplier"] ** -2.0,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logit_scale,
        "attention_multiplier": config.attention_scale,
    }


def _read_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
    check_positive("config.json", intermediate_size=hf["intermediate_size"])
    return {**_read(hf), "experts": local_experts(hf, router="softmax_of_chosen")}


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    return {**_write(config), **(write_part(experts, LOCAL) if experts else {"num_local_experts": 0})}


GRANITE = ModelFamily(
    model_type="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3 (dense)",
    rules=RULES,
    differs="factors on embeddings, residuals, scores and logits",
    defaults=_DEFAULTS,
    read=_read,
    attention_keys=("attention_multiplier",),
    write=_write,
)
GRANITE_MOE = ModelFamily(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    models="Granite 3 (1B-A400M, 3B-A800M)",
    rules=EMBEDDING + NORMS + ATTENTION + VALUES + OUTPUT + _EXPERTS,
    differs="as `granite`, with experts",
    defaults={**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
    read=_read_moe,
    attention_keys=("attention_multiplier",),
    write=_write_moe,
)
