"""A tiny model that the tests of several commands share."""

import dataclasses

import pytest
from tiny_text import byte_tokenizer

import jshadow
from jshadow.models.config import ModelConfig
from jshadow.weights.params import init_params

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=257,
    num_layers=2,
    model_dim=32,
    ffn_dim=48,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context=512,
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A tiny random model with a byte tokenizer and a chat template, as a directory."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    jshadow.save(dataclasses.replace(init_params(CONFIG), tokenizer=byte_tokenizer()), path)
    return str(path)
