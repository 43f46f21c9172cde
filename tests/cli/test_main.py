"""The commands, as a user calls them: output, --json, exit codes, typed errors on stderr."""

import argparse
import io
import json
import struct
import sys
from types import SimpleNamespace

import jax
import pytest
from command_line import FULL, LENGTH, QUEST, SMALL, TEXT
from plugins import strangers

import jshadow
from jshadow.cli.main import main, parser
from jshadow.cli.progress import SlowProgress
from jshadow.cli.report_table import why_larger
from jshadow.engine.saved.state import read_state_info
from jshadow.errors import ConfigError
from jshadow.policies import POLICIES, parse_policy


def run(capsys, model, *arguments):
    """The results of `jshadow generate`."""
    assert main(["generate", model, *LENGTH, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["results"]


@pytest.mark.parametrize(
    ("name", "settings"), [("quest", QUEST), pytest.param("shadowkv", SMALL, marks=pytest.mark.slow)]
)
def test_generate_prints_text_and_table(tiny_model, name, settings, capsys):
    """A line below the table says what offloading costs on a CPU. The default policy is ShadowKV."""
    assert main(["generate", tiny_model, "--prompt", TEXT, *LENGTH, *settings, "--baseline", "full"]) == 0
    out = capsys.readouterr().out
    for label in (
        "[full]",
        f"[{name}]",
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
    assert "host memory and device memory are the same memory" in " ".join(out.split())


@pytest.mark.parametrize("way", ["--prompt", "--prompt-file", "-"])
def test_generate_json_from_every_source(tiny_model, way, capsys, tmp_path, monkeypatch):
    given = {"--prompt": [way, TEXT], "--prompt-file": [way, str(tmp_path / "p.txt")], "-": [way]}[way]
    (tmp_path / "p.txt").write_text(TEXT)
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    assert main(["generate", tiny_model, *given, *FULL, *LENGTH, "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["report"]["prompt_tokens"] == len(TEXT)
    assert result["report"]["policy"] == {"name": "full"}
    assert len(result["tokens"]) == 4


def test_right_answers_are_marked(tiny_model, capsys):
    command = ["--prompt", TEXT, *FULL]
    [plain] = run(capsys, tiny_model, *command)
    assert "right" not in plain
    for expected, right, mark in ((plain["text"], True, "✓"), ("nothing like it", False, "✗")):
        [marked] = run(capsys, tiny_model, *command, "--expect", expected)
        assert marked["right"] is right
        assert main(["generate", tiny_model, *LENGTH, *command, "--expect", expected]) == 0
        out = capsys.readouterr().out
        assert mark in out
        assert "same memory" not in out  # nothing is offloaded


def test_a_policy_that_takes_more_memory_says_why():
    told = []
    for device, fetch in ((9, "resident"), (9, "device_put"), (8, "resident")):
        report = {
            "device_bytes": device,
            "full_bytes": 8,
            "fetch": fetch,
            "prompt_tokens": 1200,
            "generated_tokens": 34,
        }
        told.append(why_larger(SimpleNamespace(**report, policy=SimpleNamespace(name="less"))))
    reason = "less takes more device memory than full attention because "
    assert all(sentence.startswith(reason) and "1,234 tokens" in sentence for sentence in told[:2])
    assert ["fetch=resident moves nothing to the host" in sentence for sentence in told[:2]] == [True, False]
    assert told[2] is None


@pytest.mark.slow
def test_a_state_is_saved_today_and_asked_tomorrow(tiny_model, capsys, tmp_path, monkeypatch):
    """Prefill only, then two questions of the same file; the second saves its answer, a third goes on from there."""
    kept, later = str(tmp_path / "kept.state"), str(tmp_path / "later.state")
    prefill = ["--prompt", TEXT, *SMALL, "--max-new-tokens", "0", "--save-state", kept]
    [first] = run(capsys, tiny_model, *prefill)
    assert (first["tokens"], first["report"]["fallback"]) == ([], None)
    info = read_state_info(kept)
    assert info["lengths"] == [len(TEXT)]
    assert len(info["tokens"][0]) == len(TEXT)
    steps: list[tuple[str, int, int]] = []
    question = ["--prompt", " one?", "--load-state", kept]
    [one] = run(capsys, tiny_model, *question)
    with monkeypatch.context() as patch:
        patch.setattr(SlowProgress, "__call__", lambda bar, done, of: steps.append((bar.title, done, of)))
        [same] = run(capsys, tiny_model, *question, "--verify", "--save-state", later)
    assert ("decode", 4, 4) in steps
    assert one["tokens"] == same["tokens"]
    assert (one["report"]["fetch"], one["report"]["verified_steps"]) == ("device_put", None)
    assert same["report"]["verified_steps"] == 4
    assert read_state_info(later)["lengths"] == [len(TEXT) + 5 + 4]
    assert read_state_info(later)["tokens"][0][-4:] == same["tokens"]
    run(capsys, tiny_model, "--prompt", " two?", "--load-state", later)


def test_policies_and_plan(tiny_model, capsys):
    assert main(["policies", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["policies"]] == list(POLICIES)
    assert main(["plan", tiny_model, "--lengths", "256,400", "--set", "rank=8", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["capacity"] for plan in plans] == [320, 464]
    assert all(sum(d for d, _ in plan["parts"].values()) == plan["device_bytes"] for plan in plans)
    for command in (["policies"], ["plan", tiny_model]):
        assert main(command) == 0
        assert "shadowkv" in capsys.readouterr().out or command[0] == "plan"


def test_convert_writes_and_refuses_to_overwrite(tiny_model, capsys, tmp_path):
    target = str(tmp_path / "copy")
    assert main(["convert", tiny_model, target, "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == target
    assert main(["convert", tiny_model, target]) == 2
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
    "state_policy": (["--load-state", "x", "--policy", "full"], "--policy must be left out"),
    "state_fetch": (["--load-state", "x", "--fetch", "resident"], "--fetch must be left out"),
    "no_file": (["--load-state", "/dev/null/x.state"], "there is no such file"),
    "baseline": (["--save-state", "x", "--baseline", "full"], "--baseline must be left out"),
    "nothing_to_do": (["--max-new-tokens", "0"], "at least 1 without --save-state"),
    "no_place": (["--save-state", "/dev/null/x.state", "--max-new-tokens", "1"], "/dev/null"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_told(tiny_model, case, capsys):
    options, told = BAD[case]
    assert main(["generate", tiny_model, "--prompt", TEXT, *options]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


def test_missing_model_and_file(tiny_model, capsys, tmp_path):
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert main(["generate", tiny_model, "--prompt-file", str(tmp_path / "none.txt")]) == 2
    assert "PromptError" in capsys.readouterr().err


def test_settings_become_numbers():
    made = parse_policy("streaming_llm", ["sinks=2", "rebase_positions=False"])
    assert made == jshadow.StreamingLLM(sinks=2, rebase_positions=False)
    with pytest.raises(ConfigError, match="outlier_chunks"):
        parse_policy("shadowkv", ["outliers=2"])


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


# Errors before the weights are loaded


def damaged(path):
    """A safetensors file whose header is cut."""
    path.write_bytes(struct.pack("<Q", 1000) + b'{"__metadata__":')
    return str(path)


EARLY = {
    "fetch": (["--fetch", "mail"], "fetch must be 'auto' or one of"),
    "no_state": (["--load-state", "none.state"], "none.state"),
    "damaged_state": (["--load-state", "damaged"], "damaged"),
    "stranger": (["--load-state", "damaged", "--policy", "nowhere:Nobody"], "policy must be module:Class"),
    "not_a_place": (["--save-state", "/dev/null/x.state"], "--save-state must be a file in a directory"),
    "a_directory": (["--save-state", "."], "--save-state must be a file in a directory"),
    "damaged_fitted": (["--policy", "loki", "--fitted", "damaged"], "damaged"),
}


@pytest.mark.parametrize("case", EARLY)
def test_what_cannot_work_is_told_before_the_weights_are_loaded(case, no_weights, tmp_path, monkeypatch, capsys):
    options, told = EARLY[case]
    damaged(tmp_path / "damaged")
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "model", "--prompt", "a", *options]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


# A policy from outside, which the command line finds by module:Class

NEWEST = """
import dataclasses
from jshadow.policies import StreamingLLM

@dataclasses.dataclass(frozen=True)
class Newest(StreamingLLM):
    name = "newest_of_all"
"""


@pytest.mark.slow
def test_a_state_is_continued_by_module_and_class(tiny_model, tmp_path, capsys):
    (tmp_path / "outside.py").write_text(NEWEST)
    common = ["generate", tiny_model, "--dtype", "float32", "--max-new-tokens", "2", "--json"]
    there = ["--policy", "outside:Newest"]
    with strangers(tmp_path):
        assert main([*common, "--prompt", "one?", *there, "--set", "window=16", "--save-state", "kept.state"]) == 0
        capsys.readouterr()
        del POLICIES["newest_of_all"]  # as in another process
        later = [*common, "--prompt", "two?", "--load-state", "kept.state"]
        assert main(later) == 2
        assert "newest_of_all" in capsys.readouterr().err
        assert main([*later, *there]) == 0
        [result] = json.loads(capsys.readouterr().out)["results"]
        assert (result["report"]["policy"]["name"], result["report"]["policy"]["window"]) == ("newest_of_all", 16)
