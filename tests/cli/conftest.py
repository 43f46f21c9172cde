"""A tiny model that the tests of several commands share."""

import dataclasses

import pytest
from byte_models import CONFIG
from tiny_text import byte_tokenizer

import jshadow
from jshadow.cli import progress
from jshadow.weights import params
from jshadow.weights.params import init_params


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A tiny random model with a byte tokenizer and a chat template, as a directory."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    jshadow.save(dataclasses.replace(init_params(CONFIG), tokenizer=byte_tokenizer()), path)
    return str(path)


@pytest.fixture(autouse=True)
def no_lines(monkeypatch):
    """No line of progress on stderr, also on a machine where a tiny answer takes long."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 3600.0)


@pytest.fixture
def no_weights(monkeypatch):
    """Loading the weights fails the test."""

    def fail(*given, **named):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(params, "load", fail)
