"""Nemotron-H (NVIDIA, arXiv 2504.03624, section 2) and Nemotron 3 (arXiv 2512.20848): Mamba-2, few layers that attend,
and MLPs or experts without a gate. No layer has RoPE.

In a checkpoint, each layer is one part with a norm and a residual connection: Mamba-2, attention, an MLP or experts. A
block here is Mamba-2 or attention, with the MLP or the experts that follow. Where none follow, it has no MLP.

As in the published code, time steps have no limits. transformers 5.23 instead holds them at `time_step_min` or more
while it reads a prompt (https://github.com/huggingface/transformers/pull/48989).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, Recurrent, check_positive
from jshadow.models.family import ModelFamily, Rule, linear, of_layer, read_part, write_part
from jshadow.models.glm import ROUTED, routed
from jshadow.models.granite_hybrid import mamba_rules, refuse_limits
from jshadow.ops.rope import RopeConfig

_NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LETTERS = {name: letter for letter, name in _NAMES.items()} | {"mamba": "M", "attention": "*"}
_USUAL = ["linear_attention", "moe", "full_attention", "mlp"]  # of a file that names no layers
_MIXERS = "M*"
_MOST_LAYERS = 65536
_FIXED = {  # the only values that transformers computes with
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_bias": False,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "sliding_window": None,
}
_LAYER = r"backbone\.layers\.(\d+)\."


_rule = functools.partial(of_layer, prefix=_LAYER)
_linear = functools.partial(linear, prefix=_LAYER + r"mixer\.")
_MLP = tuple(
    rule
    for theirs, ours in (
        *((f"{name}_proj", name) for name in ("up", "down")),
        *((rf"shared_experts\.{name}_proj", f"shared/{name}") for name in ("up", "down")),
        *(("fc1_latent_proj", "latent_in"), ("fc2_latent_proj", "latent_out")),
    )
    for rule in (_linear(theirs, f"mlp/{ours}"), _rule(rf"mixer\.{theirs}\.bias", f"mlp/{ours}/bias"))
)
_EXPERTS = (
    _linear("gate", "mlp/router"),
    _rule(r"mixer\.gate\.e_score_correction_bias", "mlp/router/correction"),
    *(
        rule
        for name in ("up", "down")
        for rule in (
            _linear(rf"experts\.(\d+)\.{name}_proj", f"mlp/experts/{name}", stacked=True),
            _rule(rf"mixer\.experts\.{name}_proj", f"mlp/experts/{name}/kernel", "transpose"),
        )
    ),
)
_RECURRENT = {
    "key_heads": "n_groups",
    "value_heads": "mamba_num_heads",
    "key_dim": "ssm_state_size",
    "value_dim": "mamba_head_dim",
    "taps": "conv_kernel",
    "tap_biases": "use_conv_bias",
}
_RULES = (
    Rule(r"backbone\.embeddings\.weight", "embed/embedding"),
    Rule(r"backbone\.norm_f\.weight", "norm/scale"),
    Rule(r"lm_head\.weight", "head/kernel", "transpose"),
    _rule(r"norm\.weight", "attention_norm/scale"),
    _rule(r"norm\.weight", "mlp_norm/scale"),
    *(_linear(f"{name}_proj", f"attention/{name}") for name in "qkvo"),
    *(*mamba_rules(rf"{_LAYER}mixer\."), *_MLP, *_EXPERTS),
)
_RENAMED = tuple(  # by transformers, in memory
    dataclasses.replace(rule, pattern=rule.pattern.replace("backbone", "model")) for rule in _RULES
)


def _pattern(hf: Mapping[str, Any]) -> str:
    """Return a letter for each layer of the checkpoint: M for Mamba-2, * for attention, - for an MLP, E for experts."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if hf.get(key) is not None), keys[0])
    kinds, told = _USUAL if hf.get(key) is None else hf[key], f"config.json {key} must"
    if not isinstance(kinds, list | str) or not 1 <= len(kinds) <= _MOST_LAYERS:
        raise ConfigError(f"{told} name from 1 to {_MOST_LAYERS} layers, got {kinds!r:.200}")
    known = _NAMES if isinstance(kinds, str) else _LETTERS
    if unknown := sorted({str(kind) for kind in kinds} - {*known}):
        raise ConfigError(f"{told} have layers of {[*known]}, got {unknown!r:.200}")
    pattern = kinds if isinstance(kinds, str) else "".join(_LETTERS[kind] for kind in kinds)
    for layer, kind in enumerate(pattern):
        if kind not in _MIXERS and (layer == 0 or pattern[layer - 1] not in _MIXERS):
            raise ConfigError(
                f"{told} have Mamba-2 (M) or attention (*) before each MLP (-) and each layer of experts (E), "
                f"got {pattern[:layer][-1:] or 'none'} before layer {layer} ({kind})"
            )
    return pattern


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, only in _FIXED.items():
        if (hf.get(key) or None) != (only or None):
            raise ConfigError(f"config.json {key} must be {only!r}, got {hf[key]!r}")
    refuse_limits(hf)
    pattern = _pattern(hf)
    mixers = [layer for layer, kind in enumerate(pattern) if kind in _MIXERS]
    after = [pattern[layer + 1 : layer + 2] for layer in mixers]

    def blocks(found: list[bool]) -> tuple[int, ...]:
        return tuple(block for block, is_found in enumerate(found) if is_found)

    recurrent = blocks([pattern[layer] == "M" for layer in mixers])
    experts = blocks([kind == "E" for kind in after])
    shared = hf["moe_shared_expert_intermediate_size"]
    if experts:
        latent = {} if hf.get("moe_latent_size") is None else {"moe_latent_size": hf["moe_latent_size"]}
        check_positive("config.json", moe_shared_expert_intermediate_size=shared, **latent)
    return {
        "num_layers": len(mixers),
        "ffn_dim": hf["intermediate_size"] if "-" in pattern or not experts else shared,
        "norm_eps": hf["layer_norm_epsilon"],
        "norm": "wide",
        "activation": "relu2",
        "rope": RopeConfig(kind="none"),
        "recurrent": read_part(Recurrent, _RECURRENT, hf, layers=recurrent, kind="mamba2") if recurrent else None,
        "experts": routed(hf, experts, shared_width=shared, latent_width=hf.get("moe_latent_size") or 0)
        if experts
        else None,
        "layers_without_mlp": blocks([kind not in ("-", "E") for kind in after]),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    r, experts, kinds = config.recurrent, config.experts, []
    for block in range(config.num_layers):
        kinds.append(_NAMES["M" if r and block in r.layers else "*"])
        if block not in config.layers_without_mlp:
            kinds.append(_NAMES["E" if experts and block in experts.layers else "-"])
    fields = {
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "layer_norm_epsilon": config.norm_eps,
        "mlp_hidden_act": "relu2",
    }
    if r is not None:
        fields |= write_part(r, _RECURRENT)
    if experts is not None:
        fields |= write_part(experts, ROUTED | {"shared_width": "moe_shared_expert_intermediate_size"})
        fields["moe_latent_size"] = experts.latent_width or None
    return fields


NEMOTRON_H = ModelFamily(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    models="Nemotron Nano 2 (9B, 12B), Nemotron 3 (Nano 30B-A3B, Super 120B-A12B)",
    rules=_RULES + _RENAMED,
    differs="most layers are Mamba-2; MLPs and experts without a gate, and not in every block; no RoPE",
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "num_hidden_layers": 4,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "mamba_num_heads": 128,
        "ssm_state_size": 128,
        "mamba_head_dim": 64,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
    layers_apart=True,
    published_code=("configuration_nemotron_h.NemotronHConfig", "modeling_nemotron_h.NemotronHForCausalLM"),
)
