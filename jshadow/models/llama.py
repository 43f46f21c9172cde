"""Llama 2, 3 and 3.1, and other models in their checkpoint format. The other families reuse parts of this table."""

import dataclasses

from jshadow.models.family import ModelFamily, Rule, linear, of_layer

EMBEDDING = (
    Rule(r"model\.embed_tokens\.weight", "embed/embedding"),
    Rule(r"model\.norm\.weight", "norm/scale"),
    Rule(r"lm_head\.weight", "head/kernel", "transpose"),
)
NORMS = (
    of_layer(r"input_layernorm\.weight", "attention_norm/scale"),
    of_layer(r"post_attention_layernorm\.weight", "mlp_norm/scale"),
)


def _projections(theirs: str, ours: str, names: str) -> tuple[Rule, ...]:
    """Return the rows of linear layers: their kernels, then their biases."""
    kernels = [linear(rf"{theirs}\.{name}_proj", f"{ours}/{name}") for name in names.split()]
    return (*kernels, *(of_layer(rf"{theirs}\.{name}_proj\.bias", f"{ours}/{name}/bias") for name in names.split()))


ATTENTION = _projections("self_attn", "attention", "q k")
INTERLEAVED = tuple(dataclasses.replace(rule, interleaved=True) for rule in ATTENTION)
VALUES = _projections("self_attn", "attention", "v")
OUTPUT = _projections("self_attn", "attention", "o")
QK_NORMS = tuple(of_layer(rf"self_attn\.{name}_norm\.weight", f"attention/{name}_norm/scale") for name in "qk")
GATE_AND_UP = _projections("mlp", "mlp", "gate up")
FUSED_GATE_AND_UP = (linear(r"mlp\.gate_up_proj", "mlp/{1}", "gate", "up"),)
DOWN = _projections("mlp", "mlp", "down")
RULES = EMBEDDING + NORMS + ATTENTION + VALUES + OUTPUT + GATE_AND_UP + DOWN

GATED = ("gate", "up", "down")  # the projections of an MLP
EXPERTS = (  # of the later families that have experts
    linear(r"mlp\.gate", "mlp/router"),
    *(linear(rf"mlp\.experts\.(\d+)\.{name}_proj", f"mlp/experts/{name}", stacked=True) for name in GATED),
    *(linear(rf"mlp\.shared_experts\.{name}_proj", f"mlp/shared/{name}") for name in GATED),
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
