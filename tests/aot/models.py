"""The models whose steps are compiled for absent GPUs (`make aot`) and run on real ones (`make gpu`)."""

from jshadow.models.config import ModelConfig, RopeConfig

# Llama-3.1-8B's shape; the context is that of Llama-3-8B-1M, so that 244K fits too.
LLAMA = ModelConfig(
    "llama", 128256, 32, 4096, 14336, 32, 8, 128, 1e-5, 2**20, RopeConfig(theta=500000.0), eos_ids=(128001,)
)
ONE_LAYER = ModelConfig("llama", 256, 1, 4096, 14336, 32, 8, 128, 1e-5, 2**20, RopeConfig(theta=500000.0))
