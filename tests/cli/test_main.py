"""The commands, as a user calls them: output, --json, exit codes, typed errors on stderr."""

import argparse
import io
import struct
import sys
from types import SimpleNamespace

import jax
import pytest
from command_line import CAPACITY, FULL, LENGTH, QUEST, SMALL, TEXT
from few import slow
from plugins import strangers

import jshadow
from jshadow.cli.console import SlowProgress
from jshadow.cli.generate import why_larger
from jshadow.cli.main import main, parser
from jshadow.engine.saved.state import read_state_info
from jshadow.errors import ConfigError
from jshadow.policies import POLICIES, parse_policy


@pytest.fixture
def generate(answer, tiny_model):
    """The results of `jshadow generate`."""
    return lambda *arguments: answer("generate", tiny_model, *LENGTH, *arguments)["results"]


@pytest.mark.parametrize(("name", "settings"), [("quest", QUEST), slow(("shadowkv", SMALL))])
def test_generate_prints_text_and_table(tiny_model, name, settings, printed):
    """A line below the table says what offloading costs on a CPU. The default policy is ShadowKV."""
    given = ["--prompt", TEXT, *LENGTH, *CAPACITY, *settings, "--baseline", "full"]
    out = printed("generate", tiny_model, *given)
    labels = {"[full]", f"[{name}]", "│ device ", "│ dtype ", "prompt tokens", "tokens attended a step", "fallback"}
    labels |= {"KV bytes on the device", "KV bytes on the host", "repeat share", "prefill seconds", "decode tokens/s"}
    assert [label for label in labels | {"compile seconds"} if label not in out] == []
    assert "host memory and device memory are the same memory" in " ".join(out.split())


@pytest.mark.parametrize("way", ["--prompt", "--prompt-file", "-"])
def test_generate_json_from_every_source(answer, tiny_model, way, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text(TEXT)
    given = {"--prompt": [way, TEXT], "--prompt-file": [way, tmp_path / "p.txt"], "-": [way]}[way]
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    [result] = answer("generate", tiny_model, *given, *FULL, *CAPACITY, *LENGTH)["results"]
    assert result["report"]["prompt_tokens"] == len(TEXT)
    assert result["report"]["policy"] == {"name": "full"}
    assert len(result["tokens"]) == 4


def test_right_answers_are_marked(tiny_model, generate, printed):
    command = ["--prompt", TEXT, *FULL, *CAPACITY]
    [plain] = generate(*command)
    assert "right" not in plain
    for expected, right, mark in ((plain["text"], True, "✓"), ("nothing like it", False, "✗")):
        [marked] = generate(*command, "--expect", expected)
        assert marked["right"] is right
        out = printed("generate", tiny_model, *LENGTH, *command, "--expect", expected)
        assert mark in out
        assert "same memory" not in out  # nothing is offloaded


def test_a_policy_that_takes_more_memory_says_why():
    common = {"full_bytes": 8, "prompt_tokens": 1200, "generated_tokens": 34, "policy": SimpleNamespace(name="less")}
    resident, offloaded, none = (
        why_larger(SimpleNamespace(device_bytes=device, fetch=fetch, **common))
        for device, fetch in ((9, "resident"), (9, "device_put"), (8, "resident"))
    )
    for told in (resident, offloaded):
        assert told.startswith("less takes more device memory than full attention because ")
        assert "1,234 tokens" in told
        assert ("fetch=resident moves nothing to the host" in told) is (told is resident)
    assert none is None


@pytest.mark.slow
def test_a_state_is_saved_today_and_asked_tomorrow(generate, tmp_path, monkeypatch):
    """Prefill only, then two questions of the same file; the second saves its answer, a third goes on from there."""
    kept, later = tmp_path / "kept.state", tmp_path / "later.state"
    [first] = generate("--prompt", TEXT, *SMALL, "--max-new-tokens", "0", "--save-state", kept)
    assert (first["tokens"], first["report"]["fallback"]) == ([], None)
    info = read_state_info(kept)
    assert info["lengths"] == [len(info["tokens"][0])] == [len(TEXT)]
    steps: list[tuple[str, int, int]] = []
    question = ["--prompt", " one?", "--load-state", kept]
    [one] = generate(*question)
    with monkeypatch.context() as patch:
        patch.setattr(SlowProgress, "__call__", lambda bar, done, of: steps.append((bar.title, done, of)))
        [same] = generate(*question, "--verify", "--save-state", later)
    assert ("decode", 4, 4) in steps
    assert one["tokens"] == same["tokens"]
    assert (one["report"]["fetch"], one["report"]["verified_steps"]) == ("device_put", None)
    assert same["report"]["verified_steps"] == 4
    assert read_state_info(later)["lengths"] == [len(TEXT) + 5 + 4]
    assert read_state_info(later)["tokens"][0][-4:] == same["tokens"]
    generate("--prompt", " two?", "--load-state", later)


def test_policies_and_plan(tiny_model, answer, printed):
    assert [row["name"] for row in answer("policies")["policies"]] == list(POLICIES)
    plans = answer("plan", tiny_model, "--lengths", "256,400", "--set", "rank=8")["plans"]
    assert [plan["capacity"] for plan in plans] == [320, 464]
    assert all(sum(d for d, _ in plan["parts"].values()) == plan["device_bytes"] for plan in plans)
    assert "shadowkv" in printed("policies")
    assert printed("plan", tiny_model)


def test_convert_writes_and_refuses_to_overwrite(tiny_model, answer, refused, tmp_path):
    target = str(tmp_path / "copy")
    assert answer("convert", tiny_model, target, "--dtype", "float32")["target"] == target
    refused("CheckpointError", "convert", tiny_model, target)


def test_settings_become_numbers():
    made = parse_policy("streaming_llm", ["sinks=2", "rebase_positions=False"])
    assert made == jshadow.StreamingLLM(sinks=2, rebase_positions=False)
    with pytest.raises(ConfigError, match="outlier_chunks"):
        parse_policy("shadowkv", ["outliers=2"])


def commands(parser, path=()):
    """Every command that runs something, with its own parser."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield path, parser
    for action in inner:
        for name, command in action.choices.items():
            yield from commands(command, (*path, name))


def test_every_command_has_help_and_json_and_there_is_a_version(capsys):
    def told(*words):
        with pytest.raises(SystemExit) as stopped:
            main([*words])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    found = dict(commands(parser()))
    assert len(found) == 20
    for path, command in found.items():
        assert "--json" in command.format_usage(), path
        assert f"usage: jshadow {' '.join(path)}" in told(*path, "--help")
    assert told("--version") == f"jshadow {jshadow.__version__} (jax {jax.__version__})\n"


# Refusals

BAD = [
    (["--policy", "magic"], "policy must be one of"),
    (["--set", "rnk=3"], "--set must be KEY=VALUE"),
    (["--set", "rank"], "--set must be KEY=VALUE"),
    (["--set", "rank=99"], "shadowkv.rank"),
    (["--set", "rank=many"], "shadowkv.rank"),
    (["--prompt", " \n"], "must have text"),
    (["--prompt-file", "x"], "exactly one"),
    (["--temperature", "-1"], "sampler.temperature"),
    (["--dtype", "int3"], "dtype"),
    (["--fetch", "mail"], "fetch"),
    (["--max-new-tokens", "400"], "context=512"),
    (["--load-state", "x", "--policy", "full"], "--policy must be left out"),
    (["--load-state", "x", "--fetch", "resident"], "--fetch must be left out"),
    (["--load-state", "/dev/null/x.state"], "there is no such file"),
    (["--save-state", "x", "--baseline", "full"], "--baseline must be left out"),
    (["--max-new-tokens", "0"], "at least 1 without --save-state"),
    (["--save-state", "/dev/null/x.state", "--max-new-tokens", "1"], "/dev/null"),
]


@pytest.mark.parametrize(("options", "told"), BAD)
def test_bad_options_are_told(tiny_model, options, told, refused):
    refused(told, "generate", tiny_model, "--prompt", TEXT, *options)


def test_a_missing_model_and_a_missing_file_are_told(tiny_model, refused):
    refused("nowhere/none", "generate", "nowhere/none/model", "--prompt", "x")
    refused("PromptError", "generate", tiny_model, "--prompt-file", "/dev/null/none.txt")


EARLY = [
    (["--fetch", "mail"], "fetch must be 'auto' or one of"),
    (["--load-state", "none.state"], "none.state"),
    (["--load-state", "damaged"], "damaged"),
    (["--load-state", "damaged", "--policy", "nowhere:Nobody"], "policy must be module:Class"),
    (["--save-state", "/dev/null/x.state"], "--save-state must be a file in a directory"),
    (["--save-state", "."], "--save-state must be a file in a directory"),
    (["--policy", "loki", "--fitted", "damaged"], "damaged"),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("options", "told"), EARLY)
def test_what_cannot_work_is_told_before_the_weights_are_loaded(options, told, tmp_path, monkeypatch, refused):
    (tmp_path / "damaged").write_bytes(struct.pack("<Q", 1000) + b'{"__metadata__":')  # a header that is cut
    monkeypatch.chdir(tmp_path)
    refused(told, "generate", "model", "--prompt", "a", *options)


# A policy from outside, which the command line finds by module:Class

NEWEST = """
import dataclasses
from jshadow.policies import StreamingLLM

@dataclasses.dataclass(frozen=True)
class Newest(StreamingLLM):
    name = "newest_of_all"
"""


@pytest.mark.slow
def test_a_state_is_continued_by_module_and_class(tiny_model, tmp_path, answer, refused):
    (tmp_path / "outside.py").write_text(NEWEST)
    common = ["generate", tiny_model, "--dtype", "float32", "--max-new-tokens", "2"]
    there = ["--policy", "outside:Newest"]
    with strangers(tmp_path):
        answer(*common, "--prompt", "one?", *there, "--set", "window=16", "--save-state", "kept.state")
        del POLICIES["newest_of_all"]  # as in another process
        later = [*common, "--prompt", "two?", "--load-state", "kept.state"]
        refused("newest_of_all", *later)
        [result] = answer(*later, *there)["results"]
        assert (result["report"]["policy"]["name"], result["report"]["policy"]["window"]) == ("newest_of_all", 16)
