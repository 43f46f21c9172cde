"""Llama 2, 3 and 3.1, and other models in their checkpoint format. The other families reuse parts of this table."""

import dataclasses

from jshadow.models.family import ModelFamily, Rule

EMBEDDING = (
    Rule(r"model\.embed_tokens\.weight", "embed/embedding"),
    Rule(r"model\.norm\.weight", "norm/scale"),
    Rule(r"lm_head\.weight", "head/kernel", "transpose"),
)
NORMS = (
    Rule(r"model\.layers\.(\d+)\.input_layernorm\.weight", "layer_{0}/attention_norm/scale"),
    Rule(r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", "layer_{0}/mlp_norm/scale"),
)
ATTENTION = (
    Rule(r"model\.layers\.(\d+)\.self_attn\.q_proj\.weight", "layer_{0}/attention/q/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.self_attn\.k_proj\.weight", "layer_{0}/attention/k/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.self_attn\.q_proj\.bias", "layer_{0}/attention/q/bias"),
    Rule(r"model\.layers\.(\d+)\.self_attn\.k_proj\.bias", "layer_{0}/attention/k/bias"),
)
INTERLEAVED = tuple(dataclasses.replace(rule, interleaved=True) for rule in ATTENTION)
VALUES = (
    Rule(r"model\.layers\.(\d+)\.self_attn\.v_proj\.weight", "layer_{0}/attention/v/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.self_attn\.v_proj\.bias", "layer_{0}/attention/v/bias"),
)
OUTPUT = (
    Rule(r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight", "layer_{0}/attention/o/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.self_attn\.o_proj\.bias", "layer_{0}/attention/o/bias"),
)
QK_NORMS = (
    Rule(r"model\.layers\.(\d+)\.self_attn\.q_norm\.weight", "layer_{0}/attention/q_norm/scale"),
    Rule(r"model\.layers\.(\d+)\.self_attn\.k_norm\.weight", "layer_{0}/attention/k_norm/scale"),
)
GATE_AND_UP = (
    Rule(r"model\.layers\.(\d+)\.mlp\.gate_proj\.weight", "layer_{0}/mlp/gate/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.mlp\.up_proj\.weight", "layer_{0}/mlp/up/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.mlp\.gate_proj\.bias", "layer_{0}/mlp/gate/bias"),
    Rule(r"model\.layers\.(\d+)\.mlp\.up_proj\.bias", "layer_{0}/mlp/up/bias"),
)
FUSED_GATE_AND_UP = (
    Rule(r"model\.layers\.(\d+)\.mlp\.gate_up_proj\.weight", "layer_{0}/mlp/{1}/kernel", "transpose", ("gate", "up")),
)
DOWN = (
    Rule(r"model\.layers\.(\d+)\.mlp\.down_proj\.weight", "layer_{0}/mlp/down/kernel", "transpose"),
    Rule(r"model\.layers\.(\d+)\.mlp\.down_proj\.bias", "layer_{0}/mlp/down/bias"),
)
RULES = EMBEDDING + NORMS + ATTENTION + VALUES + OUTPUT + GATE_AND_UP + DOWN

EXPERTS = (  # of the later families that have experts
    Rule(r"model\.layers\.(\d+)\.mlp\.gate\.weight", "layer_{0}/mlp/router/kernel", "transpose"),
    *(
        Rule(
            rf"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.{name}_proj\.weight",
            f"layer_{{0}}/mlp/experts/{name}/kernel",
            "transpose",
            stacked=True,
        )
        for name in ("gate", "up", "down")
    ),
    *(
        Rule(
            rf"model\.layers\.(\d+)\.mlp\.shared_experts\.{name}_proj\.weight",
            f"layer_{{0}}/mlp/shared/{name}/kernel",
            "transpose",
        )
        for name in ("gate", "up", "down")
    ),
)

LLAMA = ModelFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2, 3, 3.1, 3.2; Yi; SmolLM2",
    rules=RULES,
    defaults={
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    differs="the plain form: RMS norms, gated SiLU, grouped queries; biases where the config says so",
)
