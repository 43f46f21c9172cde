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
# Four layers of Qwen3.6-27B: three that are recurrent, and one that attends.
_WHOLE = family_of(published_config("qwen3.6-27b")).config_from_hf(published_config("qwen3.6-27b"))
HYBRID = dataclasses.replace(
    _WHOLE,
    num_layers=4,
    vocab_size=256,
    recurrent=dataclasses.replace(recurrent_of(_WHOLE), layers=(0, 1, 2)),
)
