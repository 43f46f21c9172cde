"""Nemotron-H (NVIDIA, arXiv 2504.03624, section 2) and Nemotron 3 (arXiv 2512.20848): Mamba-2, few layers that attend,
and MLPs or experts without a gate. No layer has RoPE.

In a checkpoint, each layer is one part with a norm and a residual connection: Mamba-2, attention, an MLP or experts. A
block here is Mamba-2 or attention, with the MLP or the experts that follow. Where none follow, it has no MLP.

As in the published code, time steps have no limits. transformers 5.23 instead holds them at `time_step_min` or more
while it reads a prompt (https://github.com/huggingface/transformers/pull/48989).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import Experts, ModelConfig, Recurrent, check_positive
from jshadow.models.family import ModelFamily, Rule
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


def _rule(name: str, path: str, transform: str = "copy", stacked: bool = False) -> Rule:
    return Rule(_LAYER + name, "layer_{0}/" + path, transform, stacked=stacked)


def _linear(name: str, path: str) -> Rule:
    return _rule(rf"mixer\.{name}\.weight", f"{path}/kernel", "transpose")


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
            _rule(
                rf"mixer\.experts\.(\d+)\.{name}_proj\.weight", f"mlp/experts/{name}/kernel", "transpose", stacked=True
            ),
            _rule(rf"mixer\.experts\.{name}_proj", f"mlp/experts/{name}/kernel", "transpose"),
        )
    ),
)
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


def _recurrent(hf: Mapping[str, Any], layers: tuple[int, ...]) -> Recurrent:
    return Recurrent(
        layers=layers,
        key_heads=hf["n_groups"],
        value_heads=hf["mamba_num_heads"],
        key_dim=hf["ssm_state_size"],
        value_dim=hf["mamba_head_dim"],
        taps=hf["conv_kernel"],
        kind="mamba2",
        tap_biases=bool(hf["use_conv_bias"]),
    )


def _experts(hf: Mapping[str, Any], layers: tuple[int, ...]) -> Experts:
    return Experts(
        count=hf.get("num_local_experts") or hf["n_routed_experts"],
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=layers,
        router="sigmoid",
        normalized=bool(hf["norm_topk_prob"]),
        least_sum=1e-20,
        scale=float(hf["routed_scaling_factor"]),
        corrected=True,
        groups=hf["n_group"],
        chosen_groups=hf["topk_group"],
        shared_width=hf["moe_shared_expert_intermediate_size"],
        latent_width=hf.get("moe_latent_size") or 0,
    )


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
        latent = {"moe_latent_size": hf["moe_latent_size"]} if hf.get("moe_latent_size") is not None else {}
        check_positive("config.json", moe_shared_expert_intermediate_size=shared, **latent)
    return {
        "num_layers": len(mixers),
        "ffn_dim": hf["intermediate_size"] if "-" in pattern or not experts else shared,
        "norm_eps": hf["layer_norm_epsilon"],
        "norm": "wide",
        "activation": "relu2",
        "rope": RopeConfig(kind="none"),
        "recurrent": _recurrent(hf, recurrent) if recurrent else None,
        "experts": _experts(hf, experts) if experts else None,
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
        fields |= {
            "n_groups": r.key_heads,
            "mamba_num_heads": r.value_heads,
            "ssm_state_size": r.key_dim,
            "mamba_head_dim": r.value_dim,
            "conv_kernel": r.taps,
            "use_conv_bias": r.tap_biases,
        }
    if experts is not None:
        fields |= {
            "n_routed_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "moe_intermediate_size": experts.width,
            "moe_shared_expert_intermediate_size": experts.shared_width,
            "moe_latent_size": experts.latent_width or None,
            "n_group": experts.groups,
            "topk_group": experts.chosen_groups,
            "norm_topk_prob": experts.normalized,
            "routed_scaling_factor": experts.scale,
        }
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
