"""A tiny model over bytes, which generation and the command line are tried on."""

import dataclasses

from tiny_text import byte_tokenizer

import jshadow
from jshadow.models.config import ModelConfig
from jshadow.weights.params import init_params

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=257,
    num_layers=2,
    model_dim=32,
    ffn_dim=48,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context=512,
)
BARE = init_params(CONFIG, seed=3)
PARAMS = dataclasses.replace(BARE, tokenizer=byte_tokenizer())
SHADOW = jshadow.ShadowKV(rank=12, budget=64, outlier_chunks=2)
