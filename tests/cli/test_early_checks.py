"""Options and files that `jshadow generate` refuses before it loads any weights."""

import struct

import pytest

from jshadow.cli.main import main
from jshadow.weights import params


@pytest.fixture
def no_weights(monkeypatch):
    """Loading the weights fails the test."""

    def fail(*given, **named):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(params, "load", fail)


def damaged(path):
    """A safetensors file whose header is cut."""
    path.write_bytes(struct.pack("<Q", 1000) + b'{"__metadata__":')
    return str(path)


BAD = {
    "fetch": (["--fetch", "mail"], "fetch must be 'auto' or one of"),
    "no_state": (["--load-state", "none.state"], "none.state"),
    "damaged_state": (["--load-state", "damaged"], "damaged"),
    "stranger": (["--load-state", "damaged", "--policy", "nowhere:Nobody"], "policy must be module:Class"),
    "not_a_place": (["--save-state", "/dev/null/x.state"], "--save-state must be a file in a directory"),
    "a_directory": (["--save-state", "."], "--save-state must be a file in a directory"),
    "damaged_fitted": (["--policy", "loki", "--fitted", "damaged"], "damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_told_before_the_weights_are_loaded(case, no_weights, tmp_path, monkeypatch, capsys):
    options, told = BAD[case]
    damaged(tmp_path / "damaged")
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "model", "--prompt", "a", *options]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
