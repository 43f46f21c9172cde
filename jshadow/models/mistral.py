"""Mistral 7B and later models (arXiv 2310.06825): Llama's architecture. The first version has a sliding window."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily
from jshadow.models.llama import RULES
from jshadow.models.sliding import all_layers
from jshadow.ops.rope import ORIGINAL, TEMPERATURE, RopeConfig

_DEFAULTS = {
    "vocab_size": 131072,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "eos_token_id": 2,
}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


MISTRAL = ModelFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B, Nemo, Small",
    rules=RULES,
    differs="a sliding window in all layers where the config has one",
    defaults=_DEFAULTS
    | {"vocab_size": 32000, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096},
    read=all_layers,
    write=_write,
)


def _read_ministral(hf: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(hf.get("rope_scaling") or hf["rope_parameters"])
    for key in (TEMPERATURE, ORIGINAL):
        if scaling.get(key) is None:
            raise ConfigError(f"config.json rope_parameters lacks {key}")
    temperature = float(scaling.pop(TEMPERATURE))
    rope = RopeConfig.from_hf({**hf, "rope_scaling": scaling})
    rope = dataclasses.replace(rope, temperature=temperature, original_context=int(scaling[ORIGINAL]))
    return {"rope": rope, **all_layers(hf)}


MINISTRAL3 = ModelFamily(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    models="Ministral 3, Devstral 2 (the text models)",
    rules=RULES,
    differs="as `mistral`; queries grow with the logarithm of their position",
    defaults=_DEFAULTS
    | {
        "num_hidden_layers": 34,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            ORIGINAL: 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            TEMPERATURE: 0.1,
        },
    },
    read=_read_ministral,
    write=_write,
)
