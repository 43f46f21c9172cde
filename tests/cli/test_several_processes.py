"""Commands that two real processes run together: one prints, and both say what differs."""

import json
import os

import jax
import pytest
from several_processes import ended, start_all

from jshadow.cli.main import main
from jshadow.engine.mesh import agree

SHORT = ("--max-new-tokens", "3", "--dtype", "float32", "--policy", "quest", "--set", "budget=32", "--json")


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    """A file that two processes of a test read."""
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text("a document " * 12)
    return path


def run(count, model, *options, each=None):
    """Run `jshadow generate` in several processes of one device each, with the suite's compiled programs."""
    arguments = ["-m", "jshadow", "generate", model, *SHORT, *options]
    return start_all(count, arguments, each, XLA_FLAGS=os.environ.get("XLA_FLAGS", ""))


def test_only_process_0_prints_and_writes(tiny_model, prompt, tmp_path, capsys):
    """Its answer is that of one process. What gloo prints is not in the JSON object."""
    state = tmp_path / "state"
    saved = {number: ("--save-state", f"{state}{number}") for number in range(2)}
    first, second = map(ended, run(2, tiny_model, "--prompt-file", prompt, each=saved))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert second[1:] == ("", "")
    assert os.listdir(tmp_path) == ["state0"]
    assert main(["generate", tiny_model, *SHORT, "--prompt-file", str(prompt)]) == 0
    expected = json.loads(capsys.readouterr().out)["results"]
    assert [one["tokens"] for one in json.loads(first[1])["results"]] == [one["tokens"] for one in expected]


@pytest.fixture
def twin(monkeypatch):
    """A function that lets the command believe in a second process, which has other facts."""

    def with_facts(**others):
        def exchange(name, value, seconds):
            return [value, json.dumps(json.loads(value) | others)]

        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(agree, "exchange", exchange)

    return with_facts


@pytest.mark.parametrize(
    "field", ["weights", "config", "tokenizer", "jax", "prompt", "seed", "set", "policy", "fetch", "dtype"]
)
def test_what_must_be_the_same_in_all_processes(field, tiny_model, prompt, twin, capsys):
    twin(**{field: "other"})
    arguments = ["generate", tiny_model, *SHORT, "--prompt-file", str(prompt)]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert f"DistributedError: {field} must be the same in all processes: process 0 has " in err
    assert err.rstrip().endswith("process 1 has 'other'")


@pytest.mark.parametrize("field", ["files", "stored keys", "capacity"])
def test_what_must_be_the_same_to_add_documents(field, tiny_model, prompt, twin, tmp_path, capsys):
    twin(**{field: "other"})
    library = str(tmp_path / "library")
    assert main(["library", "add", library, str(prompt), "--model", tiny_model, "--policy", "full"]) == 2
    assert f"DistributedError: {field} must be the same in all processes" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_missing_process_is_named(tiny_model, prompt):
    """Within --join-timeout, and without an answer."""
    processes = run(3, tiny_model, "--prompt-file", prompt, "--join-timeout", "1")
    processes[1].kill()
    processes[2].kill()
    (status, out, err), *_ = map(ended, processes)
    assert (status, out) == (2, "")
    assert "DistributedError: process 1 and 2 of 3 did not join within join_timeout, 1 s" in err


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
