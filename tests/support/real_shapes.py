"""Shapes of real models, for plans and bounds that need no weights."""

import dataclasses

from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.policies import ShadowKV

SMOLLM2 = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    num_layers=30,
    model_dim=576,
    ffn_dim=1536,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    context=8192,
    rope=RopeConfig(theta=1e5),
    tie_embeddings=True,
)
LLAMA_31_8B = ModelConfig(
    model_type="llama",
    vocab_size=128256,
    num_layers=32,
    model_dim=4096,
    ffn_dim=14336,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    context=131072,
    rope=RopeConfig(theta=5e5),
)
PAPERS_SHARE = ShadowKV(rank=32, budget=256)
WIDE = ModelConfig(
    model_type="llama",
    vocab_size=257,
    num_layers=4,
    model_dim=256,
    ffn_dim=256,
    q_heads=8,
    kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    context=65536,
)
LLAMA_SHAPE = dataclasses.replace(
    WIDE, model_dim=1024, ffn_dim=512, q_heads=32, kv_heads=8, head_dim=128
)  # Llama-3.1-8B's attention in a narrower model

# The same as its config.json says it.
LLAMA_31_8B_JSON = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
}
