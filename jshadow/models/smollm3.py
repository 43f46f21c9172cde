"""SmolLM3 (Hugging Face, "SmolLM3: smol, multilingual, long-context reasoner"). Every fourth layer has no RoPE."""

from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, check_positive
from jshadow.models.family import ModelFamily
from jshadow.models.llama import RULES
from jshadow.models.sliding import layer_count, layer_types, sliding_fields


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers, interval = layer_count(hf), hf["no_rope_layer_interval"]
    check_positive("config.json", no_rope_layer_interval=interval)
    rotated = hf.get("no_rope_layers")  # in spite of the name, 1 means that the layer has RoPE
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers:
        raise ConfigError(f"config.json no_rope_layers must be {layers} numbers, got {rotated!r}")
    unrotated = tuple(layer for layer in range(layers) if not rotated[layer])
    window = hf if hf.get("use_sliding_window") or hf.get("layer_types") else {**hf, "sliding_window": None}
    return {
        **sliding_fields(
            window, [bool(hf.get("use_sliding_window")) and layer in unrotated for layer in range(layers)]
        ),
        "unrotated_layers": unrotated,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)],
        "use_sliding_window": bool(config.sliding_layers),
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


SMOLLM3 = ModelFamily(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    rules=RULES,
    differs="every fourth layer without RoPE",
    defaults={
        "vocab_size": 128256,
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "eos_token_id": 128001,
    },
    read=_read,
    write=_write,
)
