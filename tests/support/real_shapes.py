"""Shapes of real models, for plans and bounds that need no weights."""

import dataclasses

from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.policies import ShadowKV

# Vocabulary, layers, widths of the model and its MLP, query and KV heads and their width, epsilon, context
SMOLLM2 = ModelConfig("llama", 49152, 30, 576, 1536, 9, 3, 64, 1e-5, 8192, RopeConfig(theta=1e5), tie_embeddings=True)
LLAMA_31_8B = ModelConfig("llama", 128256, 32, 4096, 14336, 32, 8, 128, 1e-5, 131072, RopeConfig(theta=5e5))
PAPERS_SHARE = ShadowKV(rank=32, budget=256)
WIDE = ModelConfig("llama", 257, 4, 256, 256, 8, 2, 64, 1e-5, 65536)
# Llama-3.1-8B's attention in a narrower model
LLAMA_SHAPE = dataclasses.replace(WIDE, model_dim=1024, ffn_dim=512, q_heads=32, kv_heads=8, head_dim=128)
# The same as its config.json says it.
LLAMA_31_8B_JSON = {"model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 32, "hidden_size": 4096}
LLAMA_31_8B_JSON |= {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_31_8B_JSON |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 5e5}
