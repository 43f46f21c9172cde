"""Code World Model (Meta, arXiv 2510.02387, section 3): Llama 3 whose layers slide, but for each fourth one."""

from jshadow.models.family import ModelFamily
from jshadow.models.llama import RULES
from jshadow.models.sliding import layer_count, layer_types, sliding_fields
from jshadow.ops.rope import ORIGINAL

CWM = ModelFamily(
    model_type="cwm",
    architecture="CwmForCausalLM",
    models="CWM 32B",
    rules=RULES,
    differs="three of four layers slide",
    defaults={
        "vocab_size": 128256,
        "num_hidden_layers": 64,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 8192,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 8192},
        "eos_token_id": [128001, 128008, 128009],
    },
    read=lambda hf: sliding_fields(hf, [layer % 4 != 0 for layer in range(layer_count(hf))]),
    write=lambda config: {
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        "bos_token_id": min(128000, config.vocab_size - 1),  # transformers refuses a file without one
    },
)
