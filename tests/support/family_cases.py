"""Tiny members of every family, as transformers' own configs: what parity, conversion and the laws are tried on."""

import functools
from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.models.registry import family_of

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ORIGINAL = 64  # tokens of the original context wherever a RoPE variant has one
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.0 + 1.7 * i for i in range(6)],
}


def original(scaling: dict[str, Any]) -> dict[str, Any]:
    """A RoPE scaling with its original context."""
    return {"rope_scaling": scaling | {"original_max_position_embeddings": ORIGINAL}}


# name -> (model_type, what its config says beyond BASE)
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_dynamic": (
        "llama",
        {
            "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
            "max_position_embeddings": ORIGINAL,
        },
    ),
    "llama_yarn": ("llama", original(YARN)),
    "llama_yarn_tuned": ("llama", original(YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3})),
    "llama_both_spellings": (
        "llama",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama_longrope": ("llama", original(LONGROPE)),
    "yi": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_theta": 1e7}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral_sliding": ("mistral", {"sliding_window": 24}),
    # the window is that of the original context, which YaRN stretches
    "mistral_yarn": ("mistral", original(YARN) | {"sliding_window": ORIGINAL, "max_position_embeddings": ORIGINAL}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2_yarn": ("qwen2", original(YARN) | {"max_position_embeddings": ORIGINAL}),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": False}),
    "qwen3_biased": ("qwen3", {"head_dim": 24, "attention_bias": True}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_longrope": (
        "phi3",
        {
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": ORIGINAL,
            "sliding_window": 400,
        },
    ),
    # the original context that a checkpoint leaves out is 4096: these tokens are few
    "phi3_short": ("phi3", {"rope_scaling": LONGROPE, "max_position_embeddings": 8192, "sliding_window": None}),
    "phi3_partial_longrope": (
        "phi3",
        {
            "rope_scaling": LONGROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": ORIGINAL,
            "sliding_window": 40,
            "hidden_size": 64,
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm_unbiased": ("glm", {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "glm4": ("glm4", {"head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 20,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 10,
            "rope_theta": 1e6,
        },
    ),
    # a window as long as the context: nothing falls out of it, and its layers still have their own rotation
    "gemma3_all_seen": ("gemma3_text", {"head_dim": 16, "sliding_window": 512, "rope_theta": 1e6}),
    "gemma3_scaled": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": 2 * ["sliding_attention"] + ["full_attention"],
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "full_attention": original(YARN)["rope_scaling"] | {"rope_theta": 1e5},
            },
        },
    ),
    "gemma3_linear": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": 2 * ["sliding_attention"] + ["full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3_yarn": ("smollm3", original(YARN) | {"no_rope_layers": [1, 0, 1]}),
}


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
    "smollm3",
)


@functools.cache
def family_config(name: str) -> ModelConfig:
    """The config of a case, read without transformers."""
    model_type, settings = FAMILY_CASES[name]
    hf = {"model_type": model_type, "rms_norm_eps": 1e-6} | BASE | settings
    return family_of(hf).config_from_hf(hf)


def transformers_config(name: str, **more: Any) -> Any:
    """The config of a case, as transformers builds it."""
    import transformers

    model_type, settings = FAMILY_CASES[name]
    told = {key: value for key, value in (BASE | settings | more).items() if value is not None or key not in BASE}
    return transformers.AutoConfig.for_model(model_type, **told)


def random_checkpoint(name: str, directory: Any, *, shard: str = "1GB", **more: Any) -> Any:
    """A tiny random model of transformers', saved to directory; the model."""
    import torch
    import transformers

    model_type, _ = FAMILY_CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers_config(name, **more)).float().eval()
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            # transformers starts biases at 0 and matrices at 0.02: too tame to show a mistake
            scale = "norm" in parameter_name
            mean = 1.0 if scale and model_type != "gemma3_text" else 0.0  # Gemma adds 1 itself
            weight.normal_(mean, 0.1 if scale or "bias" in parameter_name else 0.2)
    model.save_pretrained(directory, max_shard_size=shard)
    return model
