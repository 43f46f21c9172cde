"""Mixtral (Mistral AI, arXiv 2401.04088, section 2): Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import Experts, ModelConfig, experts_of
from jshadow.models.family import ModelFamily
from jshadow.models.llama import ATTENTION, EMBEDDING, NORMS, OUTPUT, VALUES
from jshadow.models.minimax import EXPERTS
from jshadow.models.sliding import all_layers, layer_count


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    sizes = (hf["num_local_experts"], hf["num_experts_per_tok"], hf["intermediate_size"])
    return {**all_layers(hf), "experts": Experts(*sizes, tuple(range(layer_count(hf))))}


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    sizes = {"num_local_experts": experts.count, "num_experts_per_tok": experts.chosen}
    return {**sizes, "sliding_window": config.sliding_window}


MIXTRAL = ModelFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral 8x7B, 8x22B",
    rules=EMBEDDING + NORMS + ATTENTION + VALUES + OUTPUT + EXPERTS,
    differs="as `mistral`, with experts",
    defaults={
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
)
