"""Granite 4.0 (IBM): Granite whose layers are mostly Mamba-2 (arXiv 2405.21060, section 7); some have experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, Recurrent, check_positive
from jshadow.models.family import LAYER, ModelFamily, Rule, linear, of_layer, read_part, write_part
from jshadow.models.granite import GRANITE, GRANITE_MOE
from jshadow.models.sliding import FULL, layer_count
from jshadow.ops.rope import RopeConfig

_RECURRENT = "linear_attention"
_KINDS = {FULL: FULL, "attention": FULL, _RECURRENT: _RECURRENT, "mamba": _RECURRENT}
_NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)  # of the time step, as files spell them
_KEYS = {
    "key_heads": "mamba_n_groups",
    "value_heads": "mamba_n_heads",
    "key_dim": "mamba_d_state",
    "value_dim": "mamba_d_head",
    "taps": "mamba_d_conv",
    "tap_biases": "mamba_conv_bias",
}


def mamba_rules(prefix: str) -> tuple[Rule, ...]:
    """Return the weight table of Mamba-2. `prefix` is what the names of its tensors begin with, as in `Rule.pattern`.

    The convolution and the projections have x, B and C, which are values, keys and queries.
    """
    table: tuple[tuple[str, ...], ...] = (
        (r"in_proj\.weight", "{1}/kernel", "transpose", "gate", "v", "k", "q", "decay"),
        (r"conv1d\.weight", "{1}_taps", "taps", "v", "k", "q"),
        (r"conv1d\.bias", "{1}_biases", "copy", "v", "k", "q"),
        ("A_log", "a_log"),
        ("dt_bias", "dt_bias"),
        ("D", "skip"),
        (r"norm\.weight", "norm_scale"),
        (r"out_proj\.weight", "o/kernel", "transpose"),
    )
    return tuple(of_layer(name, f"recurrent/{path}", *rest, prefix=prefix) for name, path, *rest in table)


def refuse_limits(hf: Mapping[str, Any]) -> None:
    """Raise ConfigError if a config.json limits the time steps of Mamba-2."""
    if hf.get("time_step_limit") not in _NO_LIMITS:
        raise ConfigError(f"config.json time_step_limit must be {_NO_LIMITS[0]}, got {hf['time_step_limit']!r}")


_SHARED = tuple(  # alone in a model without experts, and beside them
    rule
    for mlp in ("mlp", "mlp/shared")
    for rule in (
        linear(r"shared_mlp\.input_linear", mlp + "/{1}", "gate", "up"),
        linear(r"shared_mlp\.output_linear", mlp + "/down"),
    )
)


def _recurrent(hf: Mapping[str, Any]) -> Recurrent | None:
    layers, kinds = layer_count(hf), hf.get("layer_types") or hf.get("layers_block_type")
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {*_KINDS}:
        raise ConfigError(f"config.json layer_types must be {layers} times one of {[*_KINDS]}, got {kinds!r:.200}")
    recurrent = tuple(layer for layer, kind in enumerate(kinds) if _KINDS[kind] == _RECURRENT)
    if not recurrent:
        return None
    if hf.get("mamba_proj_bias"):
        raise ConfigError(f"config.json mamba_proj_bias must be false, got {hf['mamba_proj_bias']!r}")
    refuse_limits(hf)
    check_positive("config.json", mamba_n_heads=hf["mamba_n_heads"], mamba_expand=hf["mamba_expand"])
    width = hf["mamba_expand"] * hf["hidden_size"] // hf["mamba_n_heads"]
    width = width if hf["mamba_d_head"] == "auto" else hf["mamba_d_head"]
    return read_part(Recurrent, _KEYS, hf, layers=recurrent, value_dim=width, kind="mamba2")


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    recurrent, shared = _recurrent(hf), hf["shared_intermediate_size"]
    check_positive("config.json", shared_intermediate_size=shared)
    experts = None
    if hf["num_local_experts"]:
        fields = GRANITE_MOE.read(hf)
        experts = dataclasses.replace(fields["experts"], shared_width=shared)
    else:
        fields = GRANITE.read(hf)
    rope = {} if hf.get("position_embedding_type") == "rope" else {"rope": RopeConfig(kind="none")}
    return {**fields, **rope, "recurrent": recurrent, "ffn_dim": shared, "experts": experts}


def _write(config: ModelConfig) -> dict[str, Any]:
    r, experts = config.recurrent, config.experts
    fields = {
        **GRANITE_MOE.write(config),
        "intermediate_size": experts.width if experts else config.ffn_dim,
        "shared_intermediate_size": config.ffn_dim,
        "layer_types": [_RECURRENT if r and layer in r.layers else FULL for layer in range(config.num_layers)],
        "position_embedding_type": None if config.rope.kind == "none" else "rope",
    }
    if r is None:
        return fields
    return fields | write_part(r, _KEYS) | {"mamba_expand": r.value_heads * r.value_dim // config.model_dim}


GRANITE_HYBRID = ModelFamily(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4.0 (H-Micro, H-Tiny, H-Small, 1B)",
    rules=GRANITE_MOE.rules + mamba_rules(rf"{LAYER}mamba\.") + _SHARED,
    differs="as `granite`; most layers are Mamba-2; experts in some models; RoPE in some",
    defaults={
        **GRANITE_MOE.defaults,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    },
    read=_read,
    attention_keys=GRANITE_MOE.attention_keys,
    write=_write,
)
