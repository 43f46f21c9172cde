"""Command R7B and Command A (Cohere, arXiv 2504.00698, section 2): attention and MLP side by side, behind one norm."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily
from jshadow.models.llama import DOWN, EMBEDDING, GATE_AND_UP, INTERLEAVED, NORMS, OUTPUT, VALUES
from jshadow.models.sliding import by_pattern, layer_types, others, sliding_fields


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    fields = sliding_fields(hf, by_pattern(hf, 4))
    near = fields.get("sliding_layers", ()) if hf.get("sliding_window") is not None else ()
    return {
        **fields,
        "unrotated_layers": others(hf, near),
        "norm": "layer",
        "norm_eps": hf["layer_norm_eps"],
        "parallel": True,
        "logit_scale": hf["logit_scale"],
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer_norm_eps": config.norm_eps,
        "logit_scale": config.logit_scale,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


COHERE2 = ModelFamily(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    models="Command R7B, Command A",
    rules=EMBEDDING + NORMS[:1] + INTERLEAVED + VALUES + OUTPUT + GATE_AND_UP + DOWN,
    differs="attention and MLP side by side; norms that subtract the mean; RoPE in sliding layers alone, interleaved",
    defaults={
        "vocab_size": 256000,
        "num_hidden_layers": 40,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 255001,
    },
    read=_read,
    write=_write,
)
