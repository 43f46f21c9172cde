"""The models of `make aot`, which compiles for absent GPUs, and of `make gpu`, which runs on a real GPU."""

import dataclasses

from jshadow.models.config import ModelConfig, RopeConfig, recurrent_of
from jshadow.models.published import published_config
from jshadow.models.registry import family_of

# The shape of Llama-3.1-8B with the context of Llama-3-8B-1M, so that prompts of 244K tokens fit.
LLAMA = ModelConfig(
    "llama", 128256, 32, 4096, 14336, 32, 8, 128, 1e-5, 2**20, RopeConfig(theta=500000.0), eos_ids=(128001,)
)
ONE_LAYER = ModelConfig("llama", 256, 1, 4096, 14336, 32, 8, 128, 1e-5, 2**20, RopeConfig(theta=500000.0))
EXPERTS = family_of(published_config("qwen3-30b-a3b")).config_from_hf(published_config("qwen3-30b-a3b"))
WHOLE_HYBRID = family_of(published_config("qwen3.6-27b")).config_from_hf(published_config("qwen3.6-27b"))


def hybrid_of(recurrent: int, attending: int) -> ModelConfig:
    """Return Qwen3.6-27B with so many recurrent layers, and then so many that attend."""
    sizes = dataclasses.replace(recurrent_of(WHOLE_HYBRID), layers=tuple(range(recurrent)))
    return dataclasses.replace(WHOLE_HYBRID, num_layers=recurrent + attending, recurrent=sizes)


HYBRID = dataclasses.replace(hybrid_of(3, 1), vocab_size=256)
