"""Llama 2, 3 and 3.1 (and what shares their checkpoint format, such as SmolLM2 and Yi)."""

from jshadow.config import ModelConfig
from jshadow.models.family import ModelFamily, Rule

LLAMA = ModelFamily(
    model_type="llama",
    config_from_hf=ModelConfig.from_hf,
    rules=(
        Rule(r"model\.embed_tokens\.weight", "embed/embedding"),
        Rule(r"model\.layers\.(\d+)\.input_layernorm\.weight", "layer_{0}/attention_norm/scale"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.q_proj\.weight", "layer_{0}/attention/q/kernel", "transpose"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.k_proj\.weight", "layer_{0}/attention/k/kernel", "transpose"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.v_proj\.weight", "layer_{0}/attention/v/kernel", "transpose"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight", "layer_{0}/attention/o/kernel", "transpose"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.q_proj\.bias", "layer_{0}/attention/q/bias"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.k_proj\.bias", "layer_{0}/attention/k/bias"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.v_proj\.bias", "layer_{0}/attention/v/bias"),
        Rule(r"model\.layers\.(\d+)\.self_attn\.o_proj\.bias", "layer_{0}/attention/o/bias"),
        Rule(r"model\.layers\.(\d+)\.post_attention_layernorm\.weight", "layer_{0}/mlp_norm/scale"),
        Rule(r"model\.layers\.(\d+)\.mlp\.gate_proj\.weight", "layer_{0}/mlp/gate/kernel", "transpose"),
        Rule(r"model\.layers\.(\d+)\.mlp\.up_proj\.weight", "layer_{0}/mlp/up/kernel", "transpose"),
        Rule(r"model\.layers\.(\d+)\.mlp\.down_proj\.weight", "layer_{0}/mlp/down/kernel", "transpose"),
        Rule(r"model\.layers\.(\d+)\.mlp\.gate_proj\.bias", "layer_{0}/mlp/gate/bias"),
        Rule(r"model\.layers\.(\d+)\.mlp\.up_proj\.bias", "layer_{0}/mlp/up/bias"),
        Rule(r"model\.layers\.(\d+)\.mlp\.down_proj\.bias", "layer_{0}/mlp/down/bias"),
        Rule(r"model\.norm\.weight", "norm/scale"),
        Rule(r"lm_head\.weight", "head/kernel", "transpose"),
    ),
)
