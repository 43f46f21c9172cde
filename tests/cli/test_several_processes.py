"""Commands that two real processes run together: one prints, and both say what differs."""

import json
import os

import pytest
from several_processes import ended, start_all

from jshadow.cli.main import main

SHORT = ("--max-new-tokens", "3", "--dtype", "float32", "--policy", "quest", "--set", "budget=32", "--json")


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    """A file that two processes of a test read."""
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text("a document " * 12)
    return path


def generate(model, *options):
    return ["-m", "jshadow", "generate", model, *SHORT, *options]


def test_only_process_0_prints_and_writes(tiny_model, prompt, tmp_path, capsys):
    """Its answer is that of one process. What gloo prints is not in the JSON object."""
    state = tmp_path / "state"
    saved = {number: ("--save-state", f"{state}{number}") for number in range(2)}
    first, second = map(ended, start_all(2, generate(tiny_model, "--prompt-file", prompt), saved))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert second[1:] == ("", "")
    assert os.listdir(tmp_path) == ["state0"]
    assert main(["generate", tiny_model, *SHORT, "--prompt-file", str(prompt)]) == 0
    expected = json.loads(capsys.readouterr().out)["results"]
    assert [one["tokens"] for one in json.loads(first[1])["results"]] == [one["tokens"] for one in expected]


def test_each_process_tells_what_differs(tiny_model, prompt, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("another document")
    each = {0: ("--prompt-file", prompt, "--seed", "1"), 1: ("--prompt-file", other, "--seed", "2")}
    for status, out, err in map(ended, start_all(2, generate(tiny_model), each)):
        assert status == 2
        assert out == ""
        assert "DistributedError" in err
        assert "prompt must be the same in all processes: process 0 has '" in err
        assert "seed must be the same in all processes: process 0 has '1', process 1 has '2'" in err


def test_a_missing_process_is_named(tiny_model, prompt):
    """Within --join-timeout, and without an answer."""
    options = ("--prompt-file", prompt, "--join-timeout", "1")
    processes = start_all(3, generate(tiny_model, *options))
    processes[1].kill()
    ends = [ended(process) for process in processes]
    for status, out, err in (ends[0], ends[2]):
        assert (status, out) == (2, "")
        assert "DistributedError: process 1" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "2"], "ConfigError: coordinator must be given with processes"),
        (["--coordinator", "here", "--processes", "2", "--process", "0"], "ConfigError: coordinator must be HOST:PORT"),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process", "2"],
            "process must be from 0 to 1, got 2",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "library add"])
def test_bad_options(command, options, message, tiny_model, prompt, tmp_path, capsys):
    own = [tiny_model, "--prompt-file", str(prompt)]
    if command == "library add":
        own = [str(tmp_path / "library"), str(prompt), "--model", tiny_model]
    assert main([*command.split(), *own, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "library").exists()
