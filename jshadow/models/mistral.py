"""Mistral 7B and later models (arXiv 2310.06825): Llama's architecture. The first version has a sliding window."""

from jshadow.models.family import ModelFamily
from jshadow.models.llama import RULES
from jshadow.models.sliding import all_layers

MISTRAL = ModelFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B, Nemo, Small",
    rules=RULES,
    differs="a sliding window in all layers where the config has one",
    defaults={
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    read=all_layers,
    write=lambda config: {"sliding_window": config.sliding_window},
)
