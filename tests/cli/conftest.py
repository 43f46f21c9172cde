"""A tiny model that the tests of several commands share, and commands that are run and read."""

import dataclasses
import json
import os

import pytest
from byte_models import CONFIG
from tiny_text import byte_tokenizer

import jshadow
from jshadow.cli import console
from jshadow.cli.main import main
from jshadow.weights import params
from jshadow.weights.params import init_params


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A tiny random model with a byte tokenizer and a chat template, as a directory."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    jshadow.save(dataclasses.replace(init_params(CONFIG), tokenizer=byte_tokenizer()), path)
    return str(path)


@pytest.fixture(autouse=True)
def same_environment():
    """The variables that a command sets for JAX do not reach the next test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_lines(monkeypatch):
    """No line of progress on stderr, also on a machine where a tiny answer takes long."""
    monkeypatch.setattr(console, "LINE_SECONDS", 3600.0)


@pytest.fixture
def no_weights(monkeypatch):
    """Loading the weights fails the test."""

    def fail(*given, **named):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(params, "load", fail)


@pytest.fixture
def printed(capsys):
    """Runs a command that succeeds, and gives what it prints."""

    def printed(*words):
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def answer(printed):
    """Runs a command with --json, and gives what it prints."""
    return lambda *words: json.loads(printed(*words, "--json"))


@pytest.fixture
def refused(capsys):
    """Runs a command that is refused with a message and nothing on standard output. Gives what it says on stderr."""

    def refused(told, *words):
        assert main([str(word) for word in words]) == 2, words
        out, err = capsys.readouterr()
        assert told in err
        assert out == ""
        return err

    return refused
