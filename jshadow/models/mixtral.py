"""Mixtral (Mistral AI, arXiv 2401.04088, section 2): Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import Experts, ModelConfig, experts_of
from jshadow.models.family import ModelFamily, linear, of_layer, read_part, write_part
from jshadow.models.llama import ATTENTION, EMBEDDING, NORMS, OUTPUT, VALUES
from jshadow.models.sliding import all_layers, layer_count

LOCAL = {"count": "num_local_experts", "chosen": "num_experts_per_tok"}
NUMBERED = {"w1": "gate", "w3": "up", "w2": "down"}  # the projections of an MLP in some checkpoints
EXPERTS = (
    linear(r"block_sparse_moe\.gate", "mlp/router"),
    of_layer(r"block_sparse_moe\.e_score_correction_bias", "mlp/router/correction"),
    *(
        linear(rf"block_sparse_moe\.experts\.(\d+)\.{theirs}", f"mlp/experts/{ours}", stacked=True)
        for theirs, ours in NUMBERED.items()
    ),
)


def local_experts(hf: Mapping[str, Any], **fields: Any) -> Experts:
    """Return the experts of a config.json with the keys of Mixtral, in which every layer has experts."""
    return read_part(Experts, LOCAL, hf, width=hf["intermediate_size"], layers=tuple(range(layer_count(hf))), **fields)


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**all_layers(hf), "experts": local_experts(hf)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_part(experts_of(config), LOCAL), "sliding_window": config.sliding_window}


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
