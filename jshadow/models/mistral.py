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
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2},
    read=all_layers,
    write=lambda config: {"sliding_window": config.sliding_window},
)
