"""EXAONE 4.0 (arXiv 2507.11407, section 2): norms behind attention and MLP, and RoPE in the sliding layers alone."""

from collections.abc import Mapping
from typing import Any

from jshadow.models.config import ModelConfig
from jshadow.models.family import ModelFamily
from jshadow.models.llama import ATTENTION, DOWN, EMBEDDING, GATE_AND_UP, OUTPUT, QK_NORMS, VALUES
from jshadow.models.olmo import POST_NORMS
from jshadow.models.sliding import by_pattern, layer_types, others, sliding_fields


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    switches = {"pre_norms": False, "post_norms": True, "qk_norm": True}
    if hf.get("sliding_window") is None:
        return switches
    fields = sliding_fields(hf, by_pattern(hf, 4))
    fields["unrotated_layers"] = others(hf, fields.get("sliding_layers", ()))
    return fields | switches


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, "sliding_window_pattern": 4, "layer_types": layer_types(config)}


EXAONE4 = ModelFamily(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    models="EXAONE 4.0",
    rules=EMBEDDING + POST_NORMS + ATTENTION + VALUES + OUTPUT + QK_NORMS + GATE_AND_UP + DOWN,
    differs="norms behind attention and MLP; layers that see all tokens have no RoPE where others have a window",
    defaults={
        "vocab_size": 102400,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
)
