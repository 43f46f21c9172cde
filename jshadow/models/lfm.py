"""LFM2 (Liquid AI, arXiv 2511.23404): most layers are short convolutions between two gates. One model has experts."""

import math
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import Experts, ModelConfig, Recurrent, check_positive, experts_of, flag_of
from jshadow.models.family import ModelFamily, Rule, linear, read_part, write_part
from jshadow.models.family import of_layer as _part
from jshadow.models.llama import ATTENTION, EMBEDDING, VALUES
from jshadow.models.mixtral import NUMBERED
from jshadow.models.sliding import FULL, layer_count

_CONVOLUTION = "conv"
_KEYS = {
    "count": "num_experts",
    "chosen": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalized": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "corrected": "use_expert_bias",
}
_RULES = (
    *(EMBEDDING[0], EMBEDDING[2], *ATTENTION[:2], *VALUES[:1]),
    Rule(r"model\.embedding_norm\.weight", "norm/scale"),  # in spite of its name, it stands before the head
    _part(r"operator_norm\.weight", "attention_norm/scale"),
    _part(r"ffn_norm\.weight", "mlp_norm/scale"),
    linear(r"self_attn\.out_proj", "attention/o"),
    *(_part(rf"self_attn\.{one}_layernorm\.weight", f"attention/{one}_norm/scale") for one in "qk"),
    linear(r"conv\.in_proj", "recurrent/{1}", "k", "q", "v"),
    _part(r"conv\.in_proj\.bias", "recurrent/{1}/bias", "copy", "k", "q", "v"),
    _part(r"conv\.conv\.weight", "recurrent/v_taps", "taps"),
    _part(r"conv\.conv\.bias", "recurrent/v_biases"),
    linear(r"conv\.out_proj", "recurrent/o"),
    _part(r"conv\.out_proj\.bias", "recurrent/o/bias"),
    *(linear(rf"feed_forward\.{theirs}", f"mlp/{ours}") for theirs, ours in NUMBERED.items()),
)
_EXPERTS = (
    linear(r"feed_forward\.gate", "mlp/router"),
    _part(r"feed_forward\.expert_bias", "mlp/router/correction"),
    *(
        linear(rf"feed_forward\.experts\.(\d+)\.{theirs}", f"mlp/experts/{ours}", stacked=True)
        for theirs, ours in NUMBERED.items()
    ),
)


def _convolutions(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers that are convolutions: those of `layer_types`, or all but `full_attn_idxs`, or none."""
    layers, kinds, attending = layer_count(hf), hf.get("layer_types"), hf.get("full_attn_idxs")
    if kinds is None and attending is not None:
        if not isinstance(attending, list) or not all(layer in range(layers) for layer in attending):
            raise ConfigError(f"config.json full_attn_idxs must be numbers in [0, {layers}), got {attending!r:.200}")
        kinds = [FULL if layer in attending else _CONVOLUTION for layer in range(layers)]
    if kinds is None:
        kinds = [FULL] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, _CONVOLUTION) for kind in kinds):
        raise ConfigError(
            f"config.json layer_types must be {layers} times {FULL!r} or {_CONVOLUTION!r}, got {kinds!r:.200}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _CONVOLUTION)


def _read_common(hf: Mapping[str, Any]) -> dict[str, Any]:
    convolutions, width = _convolutions(hf), hf["hidden_size"]
    check_positive("config.json", hidden_size=width, num_key_value_heads=hf["num_key_value_heads"])
    heads = math.gcd(width, hf["num_key_value_heads"])  # so a mesh splits these layers as it splits attention
    recurrent = Recurrent(
        layers=convolutions,
        key_heads=heads,
        value_heads=heads,
        key_dim=width // heads,
        value_dim=width // heads,
        taps=hf["conv_L_cache"],
        kind="convolution",
        tap_biases=flag_of(hf, "conv_bias"),
    )
    tied = "tie_word_embeddings" if hf.get("tie_embedding") is None else "tie_embedding"
    return {
        "recurrent": recurrent if convolutions else None,
        "qk_norm": True,
        "norm_eps": hf["norm_eps"],
        "tie_embeddings": flag_of(hf, tied),
    }


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    width, unit, factor = hf.get("block_ff_dim", hf["intermediate_size"]), hf["block_multiple_of"], 1.0
    check_positive("config.json", intermediate_size=width, block_multiple_of=unit)
    if flag_of(hf, "block_auto_adjust_ff_dim"):
        width, factor = int(2 * width / 3), hf["block_ffn_dim_multiplier"]
        width = width if factor is None else -(-int(factor * width) // unit) * unit
    return {**_read_common(hf), "ffn_dim": width}


def _read_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers = tuple(range(hf["num_dense_layers"], layer_count(hf)))
    flags = {name: flag_of(hf, _KEYS[name]) for name in ("normalized", "corrected")}
    experts = read_part(Experts, _KEYS, hf, layers=layers, router="sigmoid", least_sum=1e-6, **flags)
    return {**_read_common(hf), "experts": experts}


def _write(config: ModelConfig) -> dict[str, Any]:
    r = config.recurrent
    kinds = [_CONVOLUTION if r and layer in r.layers else FULL for layer in range(config.num_layers)]
    fields = {"norm_eps": config.norm_eps, "layer_types": kinds, "block_auto_adjust_ff_dim": False}
    return fields | ({"conv_L_cache": r.taps, "conv_bias": r.tap_biases} if r else {})


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        **_write(config),
        **write_part(experts, _KEYS),
        "num_dense_layers": config.num_layers - len(experts.layers),
    }


_DEFAULTS = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "conv_L_cache": 3,
}
LFM2 = ModelFamily(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    models="LFM2 and LFM2.5 (350M, 700M, 1.2B, 2.6B)",
    rules=_RULES,
    differs="most layers are short convolutions; queries and keys are normed before RoPE",
    defaults={
        **_DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    read=_read,
    write=_write,
    attention_keys=("full_attn_idxs",),
)
LFM2_MOE = ModelFamily(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    models="LFM2-8B-A1B",
    rules=_RULES + _EXPERTS,
    differs="as `lfm2`, with experts",
    defaults={
        **_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    read=_read_experts,
    write=_write_experts,
    attention_keys=("full_attn_idxs",),
)
