"""Tiny checkpoints that NumPy makes from a seed: `make.py` runs them in transformers, and the tests in jshadow.

Neither jshadow nor torch is imported here. The numbers come from NumPy's frozen generator, without functions that are
rounded differently on another machine, so everybody has the same bits.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent

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


HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}
NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
}
EXPERTS_OF_NEMOTRON = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 2.5,
}
EXPERTS_OF_HYBRID = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
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
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4_moe_groups": (
        "glm4_moe",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "first_k_dense_replace": 0,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8, "intermediate_size": 24},
    ),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 20,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    # queries grow after 32, 64, 96 and 128 tokens
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_theta": None,
            "rope_parameters": YARN
            | {
                "rope_theta": 1e5,
                "original_max_position_embeddings": ORIGINAL // 2,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "cohere2": (
        "cohere2",
        {"sliding_window": 16, "sliding_window_pattern": 2, "logit_scale": 0.5, "layer_norm_eps": 1e-3},
    ),
    "cohere2_biased": ("cohere2", {"sliding_window": 48, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma4": (
        "gemma4_text",
        {
            "rope_theta": None,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {
            "rope_theta": None,
            "head_dim": 20,
            "global_head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": 3 * ["sliding_attention"] + ["full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e5,
                    "factor": 2.0,
                },
            },
        },
    ),
    "gemma4_moe": (
        "gemma4_text",
        {
            "rope_theta": None,
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
    ),
    "cwm": (
        "cwm",
        {
            "sliding_window": 16,
            "rope_theta": None,
            "rope_parameters": original(LLAMA3)["rope_scaling"] | {"rope_theta": 1e6},
        },
    ),
    "qwen3_5": ("qwen3_5_text", HYBRID | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID | EXPERTS_OF_HYBRID | {"linear_num_value_heads": 4}),
    "qwen3_next": (
        "qwen3_next",
        HYBRID | EXPERTS_OF_HYBRID | {"layer_types": None, "mlp_only_layers": [1], "num_hidden_layers": 4},
    ),
    "granite_hybrid": ("granitemoehybrid", MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 80}),
    "granite_hybrid_moe": (
        "granitemoehybrid",
        MAMBA
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "shared_intermediate_size": 36,
            "mamba_n_groups": 2,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2": ("lfm2", {"full_attn_idxs": [1], "block_ffn_dim_multiplier": 1.25, "block_multiple_of": 8}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M-MM*-*M-", "mlp_bias": True}),
    "nemotron_h_moe": (
        "nemotron_h",
        NEMOTRON
        | EXPERTS_OF_NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
            "use_conv_bias": False,
        },
    ),
    "nemotron_h_latent": (
        "nemotron_h",
        NEMOTRON
        | EXPERTS_OF_NEMOTRON
        | {"hybrid_override_pattern": "ME*-ME", "moe_latent_size": 24, "n_group": 3, "topk_group": 2, "mlp_bias": True},
    ),
    "iquest": ("iquestcoder", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True}),
    "seed_oss_output": ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": True}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 16,
            "layer_types": 2 * ["sliding_attention"] + ["full_attention"],
            "rope_theta": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": original(YARN)["rope_scaling"] | {"rope_theta": 5e5},
            },
        },
    ),
    "exaone4": (
        "exaone4",
        {
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": 3 * ["full_attention"]}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "swiglu_limit": 0.5,
            "rope_parameters": original(YARN)["rope_scaling"] | {"truncate": False, "rope_theta": 1e4},
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3_yarn": ("smollm3", original(YARN) | {"no_rope_layers": [1, 0, 1]}),
}

# Llama in other shapes and variants.
GQA: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MHA: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20}
WIDE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 40}
LLAMA_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa-plain": ("llama", GQA),
    "gqa-biased": ("llama", GQA | {"attention_bias": True, "mlp_bias": True}),
    "gqa-llama3": ("llama", GQA | original(LLAMA3)),
    "mha-tied": ("llama", MHA | {"tie_word_embeddings": True}),
    "one_kv_head_wide-linear": ("llama", WIDE | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
}
CASES = FAMILY_CASES | LLAMA_CASES
GREEDY = "gqa-plain"  # the case that continues prompts
NEW_TOKENS = 12
# Settings of RopeConfig, whose frequencies are compared for a head of 64 columns.
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"theta": 5e5},
    {"kind": "linear", "factor": 4.0},
    {"theta": 5e5, "kind": "llama3", "factor": 8.0, "original_context": 64},
    {"theta": 5e5, "kind": "llama3", "factor": 8.0, "original_context": 8192},
    {
        "theta": 5e5,
        "kind": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 2.5,
        "original_context": 128,
    },
)
LONG, SHORT = 137, 45  # tokens: past the original context, and within it
STEPS = 4  # tokens that the tests feed one by one after the prompt
COLUMNS = 12  # one of so many tokens of the vocabulary is compared at every position


def lengths_of(case: str) -> tuple[int, ...]:
    """How many tokens a case is compared on. The first tokens of many are those of few, unless the length decides."""
    scaling = CASES[case][1].get("rope_scaling") or {}
    return (LONG, SHORT) if scaling.get("rope_type") in ("dynamic", "longrope") else (LONG,)


def tokens_of(length: int) -> np.ndarray:
    """The token ids [1, length] of every case."""
    return np.random.RandomState(1).randint(3, BASE["vocab_size"], (1, LONG))[:, :length]


def prompts() -> list[list[int]]:
    """The ragged prompts that GREEDY continues."""
    generator = np.random.RandomState(2)
    return [generator.randint(3, BASE["vocab_size"], size).tolist() for size in (5, 33, 64)]


def part_of(logits: np.ndarray) -> np.ndarray:
    """What is kept of logits [1, T, V]: some columns of every position, and the last positions whole."""
    return np.concatenate([logits[0, :, ::COLUMNS].ravel(), logits[0, -STEPS:].ravel()]).astype(np.float32)


def parts_of_many(logits: np.ndarray) -> dict[str, np.ndarray]:
    """What is kept of logits [T, V] of a large vocabulary: few columns, more of the last position, and the sums."""
    wide = logits.astype(np.float64)
    most = wide.max(axis=-1)
    sums = np.log(np.exp(wide - most[:, None]).sum(axis=-1)) + most
    parts = {"columns": logits[:, ::1024], "last": logits[-1, ::64], "sums": sums}
    return {name: part.astype(np.float32) for name, part in parts.items()}


def tensor(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a case that have a name, in float32."""
    uniform = np.random.RandomState(zlib.crc32(f"{case}/{name}".encode())).random_sample(shape) - 0.5
    scale = any(part in name for part in ("norm", "scalar", "scale"))
    hybrid = "linear_num_key_heads" in CASES[case][1]
    adds = hybrid or CASES[case][0] == "gemma3_text"  # 1 itself
    mean = 1.0 if scale and (not adds or "linear_attn" in name) else 0.0
    # transformers starts biases at 0 and matrices at 0.02: too tame to show a mistake
    deviation = 0.1 if scale or "bias" in name else 0.25 if case in LLAMA_CASES else 0.2
    deviation = 0.1 if hybrid and "conv1d" not in name else deviation  # rounding grows where a state nearly cancels
    deviation = 2.0 if "sinks" in name else deviation  # some take most of a softmax, and some nearly nothing
    return (mean + 12**0.5 * deviation * uniform).astype(np.float32)


def described() -> dict[str, Any]:
    """Of each case, what transformers writes: its JSON files and the shapes of its tensors."""
    return json.loads((HERE / "tiny.json").read_text())


def tensors(case: str, told: dict[str, Any]) -> dict[str, np.ndarray]:
    """All tensors of a case. `told` is its entry in `described`."""
    shapes: dict[str, list[int]] = {}
    config = told["config.json"]
    count = len(config["layers_block_type"]) if "layers_block_type" in config else config["num_hidden_layers"]
    for name, shape in told["tensors"].items():
        layers = count if "*" in name else 1
        shapes |= {name.replace("*", str(layer)): shape for layer in range(layers)}
    return {name: tensor(case, name, tuple(shape)) for name, shape in shapes.items()}


def write_checkpoint(case: str, directory: Path, told: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint of a case as transformers would. `told`: its description if it is not the committed one."""
    told = described()[case] if told is None else told
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in told.items():
        if name.endswith(".json"):
            (directory / name).write_text(json.dumps(content))
    save_file(tensors(case, told), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
