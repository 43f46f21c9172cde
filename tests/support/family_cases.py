"""Tiny members of every family, as transformers' own configs: what parity, conversion and the laws are tried on."""

import dataclasses
import functools

from seeded import BASE as BASE
from seeded import FAMILY_CASES as FAMILY_CASES
from seeded import HYBRID
from seeded import LONGROPE as LONGROPE
from seeded import ORIGINAL as ORIGINAL

from jshadow.models.config import ModelConfig
from jshadow.models.registry import family_of

# One of each family, and of each thing that a layer's attention may do with rotation and reach.
ONE_OF_EACH = (
    "llama_yarn",
    "mistral_sliding",
    "qwen2",
    "qwen3",
    "phi3_partial_longrope",
    "glm",
    "glm4",
    "gemma3",
    "olmo3",
    "glm4_moe_groups",
    "smollm3",
    "ministral3",
    "cohere2",
    "gemma4",
    "qwen3_5",
    "lfm2",
)

# A recurrent layer first, and one between two layers that attend.
_LAYERS = ["linear_attention", "full_attention"] * 2
_HERE = {"qwen3_5_apart": ("qwen3_5_text", HYBRID | {"layer_types": _LAYERS, "num_hidden_layers": len(_LAYERS)})}


@functools.cache
def family_config(name: str) -> ModelConfig:
    """The config of a case, read without transformers."""
    model_type, settings = (FAMILY_CASES | _HERE)[name]
    hf = {"model_type": model_type, "rms_norm_eps": 1e-6} | BASE | settings
    return family_of(hf).config_from_hf(hf)


def short_hybrid(name: str) -> ModelConfig:
    """A hybrid family's tiny model of two layers: a recurrent one, and one that attends."""
    config = family_config(name)
    recurrent = dataclasses.replace(config.recurrent, layers=(0,))
    return dataclasses.replace(config, num_layers=2, recurrent=recurrent)
