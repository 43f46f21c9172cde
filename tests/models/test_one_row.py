"""On a GPU, one row is computed as two in norms and in projections of a shared input. Other programs have one row."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import BASE, FAMILY_CASES
from few import quick
from flax import traverse_util

from jshadow.models import layers
from jshadow.models.quantization import quantize_kernel, quantized
from jshadow.models.registry import family_of
from jshadow.models.transformer import Transformer, abstract_weights
from jshadow.weights.params import init_params


def config_of(name):
    model_type, changes = FAMILY_CASES[name]
    hf = {"model_type": model_type, "rms_norm_eps": 1e-6, "sliding_window": None, **changes, "num_hidden_layers": 1}
    hf = BASE | hf
    return family_of(hf).config_from_hf(hf)


def weights_of(config, bits):
    """Random weights, with the projections in int8 if bits is 8."""
    flat = traverse_util.flatten_dict(init_params(config).weights, sep="/")
    for path in [path for path in flat if bits == 8 and quantized(path)]:
        record = quantize_kernel("int8", np.asarray(flat[path]))
        flat |= {path.removesuffix("kernel") + name: part for name, part in record.items()}
    return traverse_util.unflatten_dict(flat, sep="/")


def logits(config, weights, tokens):
    """The logits of a model whose attention is a sum over the projections."""

    def cache(heads):
        return heads.q_pre + (heads.k_pre - 2 * heads.v).sum(axis=2, keepdims=True), None

    return Transformer(config).apply({"params": weights}, tokens, cache)


NAMES = ("llama", "qwen2", "qwen3", "gemma3_all_seen")


@pytest.mark.parametrize(
    ("name", "bits"), quick([("llama", None), ("gemma3_all_seen", 8)], itertools.product(NAMES, (None, 8)))
)
def test_a_row_has_the_same_logits_with_a_second_row(name, bits, monkeypatch):
    config, token = config_of(name), np.array([[5]])
    weights = weights_of(config, bits)
    alone = jax.jit(functools.partial(logits, config))(weights, token)
    calls = []

    def as_on_a_gpu(function, x):
        calls.append(x.shape)
        return layers.as_two_rows(function, x) if x.size == x.shape[-1] else function(x)

    monkeypatch.setattr(layers, "rows_of", as_on_a_gpu)
    both = jax.jit(functools.partial(logits, config))(weights, token)
    assert len(calls) >= 8
    assert both.shape == alone.shape == (1, 1, config.vocab_size)
    np.testing.assert_allclose(both, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "rows", "pairs"), [("cuda", 1, 5), ("cuda", 3, 0), ("cpu", 1, 0)])
def test_only_a_gpu_program_of_one_row_has_two_rows(platform, rows, pairs):
    config = config_of("llama")
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    traced = jax.jit(functools.partial(logits, config)).trace(abstract_weights(config), tokens)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    products = re.findall(r"dot_general .*: \(tensor<(\w+)>", text)
    assert len(products) == 8
    width = config.model_dim
    assert products.count(f"2x{width}xf32") == pairs
    assert len(re.findall(rf"tensor<2x{width}xi1>", text)) > 0 if pairs else f"2x{width}x" not in text
