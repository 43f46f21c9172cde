"""The commands, as a user calls them: output, --json, exit codes, typed errors on stderr."""

import argparse
import dataclasses
import io
import json
import subprocess
import sys

import jax
import pytest
from byte_models import CONFIG
from tiny_text import byte_tokenizer

import jshadow
from jshadow.cli.main import main, parser
from jshadow.cli.progress import SlowProgress
from jshadow.engine.saved.state import read_state_info
from jshadow.errors import ConfigError
from jshadow.policies import POLICIES, parse_policy
from jshadow.weights.params import init_params

TEXT = "a document " * 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random model with a byte tokenizer, as a directory."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    jshadow.save(dataclasses.replace(init_params(CONFIG), tokenizer=byte_tokenizer()), path)
    return str(path)


def test_generate_prints_text_and_table(checkpoint, capsys):
    arguments = [
        "generate",
        checkpoint,
        "--prompt",
        TEXT,
        "--set",
        "rank=8",
        "--set",
        "outlier_chunks=2",
        "--baseline",
        "full",
        "--max-new-tokens",
        "6",
        "--dtype",
        "float32",
        "--fetch",
        "device_put",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for label in (
        "[full]",
        "[shadowkv]",
        "│ device ",
        "│ dtype ",
        "prompt tokens",
        "tokens attended a step",
        "KV bytes on the device",
        "KV bytes on the host",
        "repeat share",
        "prefill seconds",
        "decode tokens/s",
        "compile seconds",
        "fallback",
    ):
        assert label in out


@pytest.mark.parametrize("way", ["--prompt", "--prompt-file", "-"])
def test_generate_json_from_every_source(checkpoint, way, capsys, tmp_path, monkeypatch):
    given = {"--prompt": [way, TEXT], "--prompt-file": [way, str(tmp_path / "p.txt")], "-": [way]}[way]
    (tmp_path / "p.txt").write_text(TEXT)
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    assert main(["generate", checkpoint, *given, "--policy", "full", "--max-new-tokens", "3", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["report"]["prompt_tokens"] == len(TEXT)
    assert result["report"]["policy"] == {"name": "full"}
    assert len(result["tokens"]) == 3


def test_a_state_is_saved_today_and_asked_tomorrow(checkpoint, capsys, tmp_path, monkeypatch):
    """Prefill only, then two questions of the same file; the second saves its answer, a third goes on from there."""
    kept, later = str(tmp_path / "kept.state"), str(tmp_path / "later.state")
    common = ["--dtype", "float32", "--json"]
    settings = ["--set", "rank=8", "--set", "budget=64", "--set", "outlier_chunks=2", "--fetch", "device_put"]

    def run(*arguments):
        assert main(["generate", checkpoint, *arguments, *common]) == 0
        return json.loads(capsys.readouterr().out)["results"][0]

    first = run("--prompt", TEXT, *settings, "--max-new-tokens", "0", "--save-state", kept)
    assert (first["tokens"], first["report"]["fallback"]) == ([], None)
    info = read_state_info(kept)
    assert info["lengths"] == [len(TEXT)]
    assert len(info["tokens"][0]) == len(TEXT)
    steps: list[tuple[str, int, int]] = []
    question = ["--prompt", " one?", "--load-state", kept, "--max-new-tokens", "4"]
    one = run(*question)
    with monkeypatch.context() as patch:
        patch.setattr(SlowProgress, "__call__", lambda bar, done, of: steps.append((bar.title, done, of)))
        same = run(*question, "--verify", "--save-state", later)
    assert ("decode", 4, 4) in steps
    assert one["tokens"] == same["tokens"]
    assert (one["report"]["fetch"], one["report"]["verified_steps"]) == ("device_put", None)
    assert same["report"]["verified_steps"] == 4
    assert read_state_info(later)["lengths"] == [len(TEXT) + 5 + 4]
    assert read_state_info(later)["tokens"][0][-4:] == same["tokens"]
    run("--prompt", " two?", "--load-state", later, "--max-new-tokens", "2")


STATE_OPTIONS = {
    "policy": (["--load-state", "x", "--policy", "full"], "--policy must be left out"),
    "fetch": (["--load-state", "x", "--fetch", "resident"], "--fetch must be left out"),
    "no_file": (["--load-state", "/dev/null/x.state"], "there is no such file"),
    "baseline": (["--save-state", "x", "--baseline", "full"], "--baseline must be left out"),
    "nothing_to_do": (["--max-new-tokens", "0"], "at least 1 without --save-state"),
    "no_place": (["--save-state", "/dev/null/x.state", "--max-new-tokens", "1"], "/dev/null"),
}


@pytest.mark.parametrize("case", STATE_OPTIONS)
def test_bad_state_options_are_told(checkpoint, case, capsys):
    options, told = STATE_OPTIONS[case]
    assert main(["generate", checkpoint, "--prompt", TEXT, *options]) == 2
    assert told in capsys.readouterr().err


def test_policies_and_plan(checkpoint, capsys):
    assert main(["policies", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["policies"]] == list(POLICIES)
    assert main(["plan", checkpoint, "--lengths", "256,400", "--set", "rank=8", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["capacity"] for plan in plans] == [320, 464]
    assert all(sum(d for d, _ in plan["parts"].values()) == plan["device_bytes"] for plan in plans)
    for command in (["policies"], ["plan", checkpoint]):
        assert main(command) == 0
        assert "shadowkv" in capsys.readouterr().out or command[0] == "plan"


def test_convert_writes_and_refuses_to_overwrite(checkpoint, capsys, tmp_path):
    target = str(tmp_path / "copy")
    assert main(["convert", checkpoint, target, "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == target
    assert main(["convert", checkpoint, target]) == 2
    assert "CheckpointError" in capsys.readouterr().err


BAD = {
    "policy": (["--policy", "magic"], "policy must be one of"),
    "setting": (["--set", "rnk=3"], "--set must be KEY=VALUE"),
    "no_value": (["--set", "rank"], "--set must be KEY=VALUE"),
    "rank": (["--set", "rank=99"], "shadowkv.rank"),
    "text_for_a_number": (["--set", "rank=many"], "shadowkv.rank"),
    "empty_prompt": (["--prompt", " \n"], "must have text"),
    "two_prompts": (["--prompt-file", "x"], "exactly one"),
    "temperature": (["--temperature", "-1"], "sampler.temperature"),
    "dtype": (["--dtype", "int3"], "dtype"),
    "fetch": (["--fetch", "mail"], "fetch"),
    "too_long": (["--max-new-tokens", "400"], "context=512"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_told(checkpoint, case, capsys):
    options, told = BAD[case]
    assert main(["generate", checkpoint, "--prompt", TEXT, *options]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


def test_missing_model_and_file(checkpoint, capsys, tmp_path):
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert main(["generate", checkpoint, "--prompt-file", str(tmp_path / "none.txt")]) == 2
    assert "PromptError" in capsys.readouterr().err


def test_settings_become_numbers():
    made = parse_policy("streaming_llm", ["sinks=2", "rebase_positions=False"])
    assert made == jshadow.StreamingLLM(sinks=2, rebase_positions=False)
    with pytest.raises(ConfigError, match="outlier_chunks"):
        parse_policy("shadowkv", ["outliers=2"])


@pytest.mark.parametrize("command", ["", "generate", "convert", "policies", "plan", "eval", "prefill-patterns"])
def test_help(command):
    done = subprocess.run([sys.executable, "-m", "jshadow", *command.split(), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage: jshadow" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"jshadow {jshadow.__version__} (jax {jax.__version__})\n"


def commands(parser, path=()):
    """Every command that runs something, with its own parser."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield path, parser
    for action in inner:
        for name, command in action.choices.items():
            yield from commands(command, (*path, name))


def test_every_command_has_help_and_json(capsys):
    found = dict(commands(parser()))
    assert len(found) == 20
    for path, command in found.items():
        assert "--json" in command.format_usage(), path
        with pytest.raises(SystemExit) as stopped:
            main([*path, "--help"])
        assert stopped.value.code == 0
        assert f"usage: jshadow {' '.join(path)}" in capsys.readouterr().out
