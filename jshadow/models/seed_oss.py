"""Seed-OSS (ByteDance, "Seed-OSS open-source models"): Llama with a context of 524,288 tokens."""

from jshadow.models.family import ModelFamily
from jshadow.models.llama import RULES

SEED_OSS = ModelFamily(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    models="Seed-OSS-36B",
    rules=RULES,
    differs="biases on q, k and v",
    defaults={
        "vocab_size": 155136,
        "num_hidden_layers": 64,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "eos_token_id": 2,
    },
    read=lambda hf: {"output_bias": bool(hf.get("attention_out_bias"))},
    attention_keys=("attention_out_bias",),
    write=lambda config: {"attention_out_bias": config.output_bias},
)
