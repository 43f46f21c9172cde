"""Model families: published configs give the right model, unknown variants are refused, and RoPE follows the papers."""

import dataclasses
import functools
import itertools
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from family_cases import BASE, FAMILY_CASES, LONGROPE, ORIGINAL
from few import quick
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import jshadow
from jshadow.errors import ConfigError, Infeasible
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.models.published import published_config, published_names
from jshadow.models.registry import FAMILIES, family_of, support_matrix
from jshadow.models.transformer import abstract_weights
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import full_bytes
from jshadow.planner.machine import footprint
from jshadow.planner.mesh import share_of
from jshadow.policies import Full, Quantized, Quest, ShadowKV, StreamingLLM
from jshadow.policies.base import full_layers, why_dense
from jshadow.policies.sizing import at_share
from jshadow.weights.params import init_params, load, save

MODELS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def read(model_type: str, **changes) -> ModelConfig:
    """The config of a tiny member of a family."""
    hf = BASE | {"model_type": model_type, "rms_norm_eps": 1e-6, "sliding_window": None} | changes
    return family_of(hf).config_from_hf(hf)


# The models of the paper, and later ones: the published number of parameters, the elements of keys and values of a
# token, by hand (2 x layers that see all tokens x KV heads x head width), and the context.
PUBLISHED = {
    "llama-3-8b-1m": (8_030_261_248, 2 * 32 * 8 * 128, 2**20),
    "llama-3.1-8b": (8_030_261_248, 2 * 32 * 8 * 128, 131_072),
    "llama-3-70b-1m": (70_553_706_496, 2 * 80 * 8 * 128, 2**20),
    "yi-9b-200k": (8_829_407_232, 2 * 48 * 4 * 128, 262_144),
    "glm-4-9b-1m": (9_484_000_000, 2 * 40 * 4 * 128, 2**20),
    "phi-3-mini-128k": (3_821_079_552, 2 * 32 * 32 * 96, 131_072),
    "qwen2-7b": (7_615_616_512, 2 * 28 * 4 * 128, 32_768),
    "qwen3-30b-a3b": (30_532_122_624, 2 * 48 * 4 * 128, 262_144),
    "glm-4.5-air": (106_852_251_264, 2 * 46 * 8 * 128, 131_072),
    "gpt-oss-20b": (20.91e9, 2 * 12 * 8 * 64, 131_072),
    "gpt-oss-120b": (116.83e9, 2 * 18 * 8 * 64, 131_072),
    "gemma-4-31b": (30_700_000_000, 2 * 10 * 4 * 512, 262_144),
    "mistral-small-3.2-24b": (23_572_403_200, 2 * 40 * 8 * 128, 131_072),
    "ministral-3-8b": (8_490_000_000, 2 * 34 * 8 * 128, 262_144),
    "command-r7b": (8_028_033_024, 2 * 8 * 8 * 128, 131_072),
    "qwen3.6-27b": (26.9e9, 2 * 16 * 4 * 256, 262_144),
    "qwen3.6-35b-a3b": (34.66e9, 2 * 10 * 2 * 256, 262_144),
    "qwen3-next-80b-a3b": (79.67e9, 2 * 12 * 2 * 256, 262_144),
    "lfm2-8b-a1b": (8.34e9, 2 * 6 * 8 * 64, 128_000),
    "nemotron-nano-9b-v2": (8_888_227_328, 2 * 4 * 8 * 128, 131_072),
    "nemotron-3-nano-30b-a3b": (31.6e9, 2 * 6 * 2 * 128, 262_144),
}
# Models with sliding windows: the elements of keys and values of a token in these layers, and the window.
WINDOWED = {
    "gpt-oss-20b": (2 * 12 * 8 * 64, 128),
    "gpt-oss-120b": (2 * 18 * 8 * 64, 128),
    "gemma-4-31b": (2 * 50 * 16 * 256, 1024),
    "command-r7b": (2 * 24 * 8 * 128, 4096),
}
# Hybrid models: recurrent layers, their key heads, which are 128 wide, their value heads, and the width of these.
HYBRID = {
    "qwen3.6-27b": (48, 16, 48, 128),
    "qwen3.6-35b-a3b": (30, 16, 32, 128),
    "qwen3-next-80b-a3b": (36, 16, 32, 128),
    "nemotron-nano-9b-v2": (27, 8, 128, 80),
    "nemotron-3-nano-30b-a3b": (23, 8, 64, 64),
}
CONVOLUTIONS = {"lfm2-8b-a1b": (18, 2048)}  # layers and columns of short convolutions


def recurrent_by_hand(name):
    """The bytes of the recurrent layers of a row: float32 states and 32 newest tokens, 19 inputs of convolutions.

    A short convolution of 3 taps has 18 inputs alone.
    """
    if name in CONVOLUTIONS:
        layers, columns = CONVOLUTIONS[name]
        return layers * 2 * 18 * columns
    layers, keys, values, width = HYBRID.get(name, (0, 0, 0, 0))
    newest = 2 * 16 * (128 * keys + width * values + values)
    return layers * (4 * (values * 128 * width + newest + 1) + 2 * 19 * (2 * 128 * keys + width * values))


@functools.cache
def published(name: str) -> ModelConfig:
    return family_of(published_config(name)).config_from_hf(published_config(name))


def test_every_published_config_is_compared():
    assert set(published_names()) == set(PUBLISHED)


# One without and one with windows, and one of each sort of hybrid model: all weights of a model are traced.
TRACED = ("llama-3.1-8b", "gpt-oss-20b", "lfm2-8b-a1b", "qwen3.6-35b-a3b")


@pytest.mark.parametrize("name", quick(TRACED, PUBLISHED))
def test_published_configs(name):
    """Keys have rank 160 of 1,024 columns for all chunks outside the local window. Their values are on the host."""
    (parameters, numbers, context), tokens, held = PUBLISHED[name], 32_000, 32_000 + 64 - 4 * 8
    config, columns = published(name), published(name).kv_heads * published(name).head_dim
    counted = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_weights(config)))
    assert counted == pytest.approx(parameters, rel=1e-3)
    told = published_config(name)
    head_dim = told.get("global_head_dim") or told.get("head_dim", config.model_dim // config.q_heads)
    assert (config.context, config.head_dim) == (context, head_dim)
    full = footprint(config, Full(), capacity=tokens, prompt=tokens, fetch="resident")
    near, window = WINDOWED.get(name, (0, 0))
    windows = near * (window + 15) * 2 + recurrent_by_hand(name)
    assert full_bytes(config, tokens, 2) == full["device_bytes"] == tokens * numbers * 2 + windows
    plan = footprint(config, ShadowKV(), capacity=tokens + 64, prompt=tokens, fetch="device_put")
    rank = -(-round(160 * columns / 1024) // 8) * 8
    assert plan["parts"]["left"][0] == len(full_layers(config)) * held * rank * 2
    assert plan["host_bytes"] == held * numbers
    assert (plan["full_bytes"] - windows) / (plan["device_bytes"] - windows) > 3.5


def test_special_settings_of_published_configs():
    glm, phi = published("glm-4-9b-1m"), published("phi-3-mini-128k")
    assert glm.rope.rotary_dim(128) == 64
    assert (glm.attention_bias, glm.output_bias) == (True, False)
    assert phi.rope.attention_factor == pytest.approx(1.190238, rel=1e-6)  # the value in GGUF files of the model
    assert (phi.rope.original_context, len(phi.rope.long_factors)) == (4096, 48)
    assert {kind.window for kind in phi.attention_kinds} == {None}  # 262,144 tokens are longer than its context
    assert published("llama-3.1-8b").eos_ids == (128001, 128008, 128009)
    assert published("qwen2-7b").sliding_layers == ()


def test_gemma_holds_its_windows_only():
    config = read("gemma3_text", head_dim=16, sliding_window=32, sliding_window_pattern=3, num_hidden_layers=6)
    assert config.sliding_layers == (0, 1, 3, 4)
    token = 2 * config.key_columns * 4
    # 15 slots more than the window: a turn of 16 tokens passes at once
    assert full_bytes(config, 300, 4) == (2 * 300 + 4 * (32 + 15)) * token
    made = footprint(config, Full(), capacity=300, prompt=300, dtype="float32", fetch="resident")
    assert made["device_bytes"] == made["full_bytes"]


def scaled(**scaling):
    return {"rope_scaling": scaling}


def longrope(**changes):
    return {"rope_scaling": LONGROPE | changes}


YARN = {"rope_type": "yarn", "factor": 2.0}
WINDOWS = {"use_sliding_window": True}
MAMBA = {"layer_types": ["mamba", "mamba", "attention"]}
REFUSED = [
    ("llama", scaled(rope_type="mrope", factor=2.0), "mrope"),
    ("llama", scaled(**YARN, mscale_bend=3), "mscale_bend"),
    ("llama", scaled(rope_type="dynamic"), "lacks factor"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ("llama", scaled(**YARN) | {"rope_theta": 1.0}, "above 1 for yarn"),
    ("llama", scaled(rope_type="yarn", factor=None), "lacks factor and original_max_position_embeddings"),
    ("llama", scaled(rope_type="yarn", original_max_position_embeddings=1024), "factor must be at least 1, got 0.5"),
    ("llama", scaled(rope_type="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=1.0), "got 2.0 and 1.0"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0 in a llama model"),
    ("llama", {"hidden_act": "relu2"}, "relu2"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
    *(
        ("llama", scaled(**one) | {"original_max_position_embeddings": 1}, "must be above 1 token, got 1")
        for one in (YARN, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    ),
    ("phi3", scaled(type="longrope", short_factor=[1.0]), "lacks long_factor"),
    ("phi3", longrope(short_factor=[1.0]), "must have 6 numbers"),
    ("phi3", longrope(long_factor=[1.0] * 5 + [-1.0]), "above 0, got -1.0"),
    ("phi3", longrope(short_factor="123456"), "short_factor must be a list"),
    ("phi3", longrope() | {"original_max_position_embeddings": 1}, "must be at least 2, got 1"),
    ("phi3", {"auto_map": {"AutoModel": "modeling_phi3_v.Phi3VForCausalLM"}}, "auto_map"),
    ("phimoe", {}, "phimoe"),
    ("glm", {"head_dim": 12, "partial_rotary_factor": 0.75}, "even rotated part"),
    ("glm", {"partial_rotary_factor": 1.5}, "rotary_share"),
    ("qwen2", WINDOWS | {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ("qwen2", WINDOWS | {"layer_types": "full"}, "must be a list, got 'full'"),
    ("gemma3_text", {"layer_types": ["full_attention"]}, "3 times"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"sliding_window_pattern": "two"}, "sliding_window_pattern"),
    ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_scalar"),
    ("ministral3", scaled(**YARN), "lacks llama_4_scaling_beta"),
    ("ministral3", scaled(**YARN, llama_4_scaling_beta=-1, original_max_position_embeddings=9), "temperature must be"),
    ("mistral", scaled(**YARN, llama_4_scaling_beta=0.1), "unknown keys llama_4_scaling_beta"),
    ("cohere2", {"logit_scale": 0}, "logit_scale must be above 0"),
    ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 0}, "letters L and G, got 0"),
    ("gemma4_text", {}, "hidden_size_per_layer_input must be 0 or false (embeddings of each layer"),
    ("gemma4_unified_text", {"num_kv_shared_layers": 1}, "layers that share keys and values are not supported"),
    ("gemma4_unified_text", {"use_bidirectional_attention": "all"}, "must be null or 'vision', got 'all'"),
    ("gemma4_unified_text", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config must have the layers"),
    ("gemma4_unified_text", {"per_layer_config": {"2": {"window": 8}}}, "per_layer_config must have the layers"),
    ("gemma4_unified_text", {"sliding_window": 8, "global_head_dim": 7}, "even rotated part"),
    ("gemma4_unified_text", {"sliding_window": 8, "num_key_value_heads": 3}, "multiple of kv_heads=3"),
    ("gemma4_unified_text", {"hidden_activation": "relu"}, "hidden_activation must be one of"),
    ("gemma4_unified_text", {"final_logit_softcapping": -1}, "logit_cap must be above 0"),
    ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1, got 0"),
    ("mistral", {"num_hidden_layers": 10**9}, "at most 65536, got 1000000000"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be 3"),
    ("smollm3", {"no_rope_layers": "101"}, "got '101'"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("qwen3_5_text", {"layer_types": 3 * ["mamba"]}, "layer_types must be 3 times 'full_attention' or"),
    ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types must be 3 times"),
    ("qwen3_5_text", {"full_attention_interval": 4}, "recurrent.layers must leave a layer that attends, got all 3"),
    ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval"),
    ("qwen3_5_text", {"full_attention_interval": 2, "linear_num_value_heads": 24}, "multiple of key_heads=16, got 24"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate must be true"),
    ("qwen3_5_text", {"full_attention_interval": 2, "attention_bias": True}, "attention_bias must be false, got True"),
    ("qwen3_next", {"full_attention_interval": 2, "shared_expert_intermediate_size": -1}, "size must be an integer"),
    ("granitemoehybrid", {}, "layer_types must be 3 times one of"),
    ("granitemoehybrid", {"layer_types": ["mamba", "moe", "attention"]}, "layer_types must be 3 times one of"),
    ("granitemoehybrid", MAMBA | {"mamba_proj_bias": True}, "mamba_proj_bias must be false"),
    ("granitemoehybrid", MAMBA | {"time_step_limit": [0.1, 1.0]}, "time_step_limit must be [0.0, inf]"),
    ("granitemoehybrid", MAMBA | {"mamba_n_heads": 0}, "mamba_n_heads must be an integer of at least 1"),
    ("lfm2", {"layer_types": 3 * ["conv"]}, "recurrent.layers must leave a layer that attends, got all 3"),
    ("lfm2", {"layer_types": ["conv", "short_conv", "full_attention"]}, "layer_types must be 3 times 'full_attention'"),
    ("lfm2", {"full_attn_idxs": [3]}, "full_attn_idxs must be numbers in [0, 3), got [3]"),
    ("lfm2", {"full_attn_idxs": 1}, "full_attn_idxs must be numbers in [0, 3), got 1"),
    ("lfm2", {"full_attn_idxs": [1], "conv_L_cache": 0}, "recurrent.taps must be an integer of at least 1, got 0"),
    ("lfm2", {"full_attn_idxs": [1], "conv_bias": "no"}, "conv_bias must be true or false, got 'no'"),
    ("lfm2", {"tie_embedding": 1}, "tie_embedding must be true or false, got 1"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of must be an integer of at least 1, got 0"),
    ("nemotron_h", {"hybrid_override_pattern": "-M*"}, "must have Mamba-2 (M) or attention (*) before each MLP (-)"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "mlp"]}, "(E), got E before layer 2 (-)"),
    ("nemotron_h", {"hybrid_override_pattern": "M-M|*E"}, "must have layers of ['M', '*', '-', 'E'], got ['|']"),
    ("nemotron_h", {"layer_types": ["mamba", "sliding_attention"]}, "got ['sliding_attention']"),
    ("nemotron_h", {"hybrid_override_pattern": ""}, "must name from 1 to 65536 layers, got ''"),
    ("nemotron_h", {"hybrid_override_pattern": "M-M-"}, "recurrent.layers must leave a layer that attends, got all 2"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be 'relu2', got 'silu'"),
    ("nemotron_h", {"use_bias": True}, "use_bias must be False, got True"),
    ("nemotron_h", {"sliding_window": 16}, "sliding_window must be None, got 16"),
    ("nemotron_h", {"time_step_limit": [0.001, 0.1]}, "time_step_limit must be [0.0, inf]"),
    ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size must be an integer of at least 1, got 0"),
]


@pytest.mark.parametrize(("model_type", "changes", "told"), REFUSED)
def test_an_unknown_variant_is_refused_by_name(model_type, changes, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        read(model_type, **changes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_says(model_type):
    """A checkpoint need not repeat the defaults of transformers' config classes.

    The class of GLM-4.5 has heads that RoPE cannot rotate, so the width of the published ones is the default. That of
    Gemma 4 has embeddings of each layer, which are refused. That of Granite 4.0 has no layer that attends.
    """
    told, family = CONFIG_MAPPING[model_type]().to_dict(), FAMILIES[model_type]
    told |= {"head_dim": 128} if model_type == "glm4_moe" else {}
    left_out = {"hidden_size_per_layer_input": 0} if model_type == "gemma4_text" else {}
    left_out |= {"layer_types": 31 * ["mamba"] + ["attention"]} if model_type == "granitemoehybrid" else {}
    assert family.config_from_hf({"model_type": model_type, **left_out}) == family.config_from_hf(told | left_out)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "qwen3_5_text"])
def test_a_hybrid_family_without_recurrent_layers(tmp_path, model_type):
    """Such as Granite 4.0 1B, whose file has no experts and no layer of Mamba-2."""
    unused = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 0}
    more = unused | {"shared_intermediate_size": 80} if model_type == "granitemoehybrid" else {}
    config = read(model_type, layer_types=3 * ["full_attention"], head_dim=16, **more)
    assert (config.recurrent, config.experts, config.ffn_dim) == (None, None, 80)
    save(init_params(config), tmp_path / "m")
    assert load(tmp_path / "m").config == config


def test_the_width_and_the_head_of_lfm2():
    """The width follows the config class of transformers. Published files have other names of two keys."""
    layers = {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16}
    sizes = {"block_ff_dim": 12288, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = read("lfm2", **layers, **sizes, tie_embedding=True, tie_word_embeddings=False)
    assert (config.ffn_dim, config.tie_embeddings) == (8192, True)
    assert config.recurrent.layers == (0, 1, 3, 4, 6, 7, 9, 11, 13, 15)
    assert (config.recurrent.value_heads, config.recurrent.value_dim) == (8, 256)
    assert read("lfm2").recurrent is None
    for changes, width in (
        ({"block_auto_adjust_ff_dim": False}, 80),
        ({"block_ffn_dim_multiplier": None}, 53),
        ({"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 10}, 70),
    ):
        assert read("lfm2", **changes).ffn_dim == width


def test_a_device_of_a_mesh_has_some_heads_of_a_recurrent_layer():
    part = share_of(published("qwen3.6-27b"), 4)
    assert (part.recurrent.key_heads, part.recurrent.value_heads, part.kinds[0].q_heads) == (4, 12, 12)


def test_the_text_config_of_gemma_3_4b_as_published():
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    told = {"model_type": "gemma3_text", **sizes, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = family_of(told).config_from_hf(told)
    assert (config.vocab_size, config.context, config.norm_eps) == (262_208, 131_072, 1e-6)
    assert (config.q_heads, config.kv_heads, config.head_dim, config.query_scalar) == (8, 4, 256, 256)
    assert (config.rope.kind, config.rope.theta, config.sliding_rope) == ("linear", 1e6, RopeConfig(theta=1e4))


def test_the_end_of_text_that_a_vocabulary_is_too_small_for_is_left_out():
    told = {"model_type": "phi3", "vocab_size": 97}
    assert FAMILIES["phi3"].config_from_hf(told).eos_ids == ()
    assert FAMILIES["phi3"].config_from_hf(told | {"vocab_size": 32001}).eos_ids == (32000,)


def test_a_window_that_is_left_out_is_transformers_default():
    told = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "use_sliding_window": True, "max_window_layers": 1}
    assert family_of(told).config_from_hf(BASE | told) == read(**told, sliding_window=4096)


def test_published_code_is_ignored_where_it_is_the_model_s_own():
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    plain = read("phi3")
    assert read("phi3", auto_map=code) == plain
    assert read("phi3", auto_map=code | {"AutoTokenizer": "Xenova/gpt-4o"}) == plain  # Phi-4-mini's


def test_a_model_of_sliding_layers_alone_has_nothing_to_select():
    told = "every layer of the model sees a window of 16 tokens only"
    assert why_dense(ShadowKV(rank=8, budget=16), read("mistral", sliding_window=16), 89) == told


def test_nominal_counts_the_windows():
    """The bytes, including sliding layers, are at most the share of full attention's."""
    sizes = {"head_dim": 64, "num_hidden_layers": 12, "max_position_embeddings": 32768}
    config = read("gemma3_text", **sizes, sliding_window=64, sliding_window_pattern=6)
    least: list[tuple[float, float]] = []
    for case in itertools.product((2048, 8192), (StreamingLLM, ShadowKV), (0.1, 0.25, 0.5, 0.9)):
        tokens, policy, fraction = case
        try:
            made = at_share(policy(), fraction, tokens, config)
        except Infeasible as error:
            least.append((fraction, float(str(error).split("at least ")[1].split()[0])))
            continue
        taken = footprint(config, made, capacity=tokens, prompt=tokens, fetch="device_put")
        assert taken["device_bytes"] <= fraction * taken["full_bytes"] * 1.02, case
    assert all(fraction < needed <= 1 for fraction, needed in least)


def test_what_was_attended_is_told_layer_by_layer():
    """After enough tokens, a sliding layer sees only generated tokens. A global layer still sees the prompt."""
    config = read("gemma3_text", head_dim=16, sliding_window=16, sliding_window_pattern=3, eos_token_id=[])
    out = jshadow.generate(init_params(config), list(range(3, 23)), Full(), max_new_tokens=41)
    # 40 generated tokens were attended to, with 20 of the prompt: two layers see 16 tokens, one sees all 60
    assert out.report.attended_parts == pytest.approx({"window": 20 / 3, "generated": (2 * 16 + 40) / 3})


def test_the_page_of_models_has_the_support_matrix():
    assert support_matrix() in MODELS_PAGE.read_text()


def bytes_table():
    """The table of docs/models.md that tells what policies save on the published models."""
    quantized = Quantized(dtype="fp8")
    ways = [(Full(), "resident"), (quantized, "resident")]
    ways += [(policy, "device_put") for policy in (ShadowKV(), ShadowKV.packed(), ShadowKV.packed(small=True), Quest())]
    names = ["model", "bytes a token", "full", "fp8", "`ShadowKV()`", "`packed()`", "`packed(small=True)`", "`Quest()`"]
    rows = [names, ["---"] * len(names)]
    for name, (_, numbers, _) in sorted(PUBLISHED.items()):
        sizes = {"capacity": 32768 + 256, "prompt": 32768}
        found = [footprint(published(name), policy, fetch=fetch, **sizes)["device_bytes"] for policy, fetch in ways]
        rows.append([f"`{name}`", f"{2 * numbers:,}", *(f"{size / 1e9:.2f}" for size in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_of_models_tells_what_policies_save():
    assert bytes_table() in MODELS_PAGE.read_text()


def test_families_and_kinds_of_rope_all_have_a_parity_case():
    assert {model_type for model_type, _ in FAMILY_CASES.values()} == set(FAMILIES)
    kinds = {(settings.get("rope_scaling") or {}).get("rope_type", "default") for _, settings in FAMILY_CASES.values()}
    # llama3 is tested on Llama in test_parity.py. "none" is for SmolLM3's layers without RoPE, and "proportional" for
    # Gemma 4's global ones.
    assert kinds | {"llama3", "none", "proportional"} == set(RopeConfig.KINDS)


def test_length_decides_longrope_and_dynamic_alone():
    long = read("phi3", rope_scaling=LONGROPE, original_max_position_embeddings=ORIGINAL).rope
    at = [inverse_frequencies(long, 12, tokens) for tokens in (0, ORIGINAL, ORIGINAL + 1, 512)]
    np.testing.assert_array_equal(at[0], at[1])
    np.testing.assert_array_equal(at[2], at[3])
    plain = inverse_frequencies(RopeConfig(), 12)
    np.testing.assert_allclose(plain / at[1], LONGROPE["short_factor"], rtol=1e-6)
    np.testing.assert_allclose(plain / at[2], LONGROPE["long_factor"], rtol=1e-6)
    dynamic = dataclasses.replace(RopeConfig(), kind="dynamic", factor=2.0, original_context=ORIGINAL)
    near, far, farther = (inverse_frequencies(dynamic, 12, tokens) for tokens in (ORIGINAL, 2 * ORIGINAL, 4 * ORIGINAL))
    np.testing.assert_array_equal(near, plain)
    assert (far[1:] < near[1:]).all()
    assert (farther[1:] < far[1:]).all()
    yarn = RopeConfig(kind="yarn", factor=4.0, original_context=ORIGINAL)
    np.testing.assert_array_equal(inverse_frequencies(yarn, 12, 10), inverse_frequencies(yarn, 12, 10_000))


def test_stretched_contexts():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    assert read("qwen2", max_position_embeddings=ORIGINAL, rope_scaling=yarn).context == 4 * ORIGINAL
    assert read("qwen2", max_position_embeddings=512, rope_scaling=yarn).context == 512
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert read("llama", max_position_embeddings=ORIGINAL, rope_scaling=dynamic).context == 2 * ORIGINAL


def test_other_kinds_of_attention_are_capped_or_refused():
    """Qwen2.5-1M is plain RoPE up to its original context. To read on would give wrong answers."""
    chunks = {"chunk_size": 64, "local_size": 8, "original_max_position_embeddings": 96}
    long = {"max_position_embeddings": 4096, "dual_chunk_attention_config": chunks}
    assert read("qwen2", **long).context == 96
    with pytest.raises(ConfigError, match=r"dual_chunk_attention_config\.original_max_position_embeddings must be"):
        read("qwen2", **long | {"dual_chunk_attention_config": {"chunk_size": 64}})
    for key, value in {"linear_attention_config": {"kind": "delta"}, "attn_output_gate": True}.items():
        with pytest.raises(ConfigError, match=f"{key} must be absent .* got"):
            read("llama", **{key: value})
    assert read("llama", attn_output_gate=False, attention_dropout=0.1) == read("llama")
