"""The prompts of an evaluation in a file: the same plan as without it, on a machine without the texts."""

import dataclasses
import gzip
import json
from typing import Any

import pytest
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, StreamingLLM, cli, save
from jshadow.errors import ConfigError
from jshadow.evaluation import plan
from jshadow.evaluation.plan import EvalSettings
from jshadow.evaluation.runner import plan_evaluation
from jshadow.evaluation.tasks import Case, Sample, ruler

# Tasks with depths, forced tokens, turns, independent questions and several answers.
TASKS = ["needle_docs", "agreement", "needle_multiturn", "niah_multiquery_apart", "fwe", "text_to_json"]


@pytest.fixture
def planned(params, tmp_path):
    """Plans of evaluations, which are not run. The file of prompts is `planned.file`."""

    def planned(tasks, lengths, params=params, **settings: Any):
        asked = EvalSettings(**{"samples": 2} | settings)
        return plan_evaluation(params, tasks, lengths, [Full(), StreamingLLM()], asked).plans

    planned.file = tmp_path / "prompts.json.gz"
    return planned


def never(*_: Any) -> None:
    raise AssertionError("no case may be made")


def test_the_cases_of_a_file_are_those_that_were_made(planned, monkeypatch):
    file, want = planned.file, planned(TASKS, [800, 900])
    assert planned(TASKS, [800, 900], cases=file) == want
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(plan, "sample_of", never)
    assert planned(TASKS, [800, 900], cases=file) == want
    assert planned(TASKS[:1], [900], cases=str(file)) == planned(TASKS, [900], cases=file)[:1]


@pytest.mark.usefixtures("made_up")
def test_the_file_replaces_the_package_of_ruler(params, planned, tmp_path, monkeypatch, capsys):
    file, name = planned.file, "ruler_vt"
    sample = Sample("", "text", "", ("one", "two"), 8, "string_match_all")
    made = {name: [Case((sample,), tuple(range(300))), Case((sample,), tuple(range(290)))]}
    with monkeypatch.context() as patch:
        patch.setattr(ruler, "check_tasks", lambda *_: None)
        patch.setattr(ruler, "cases_at", lambda *_: made)
        want = planned([name], [512], cases=file)
    monkeypatch.setattr(ruler, "cases_at", never)
    assert planned([name], [512], cases=file) == want
    assert [list(case.prompt) for case in want[0].cases] == [list(range(300)), list(range(290))]
    save(params, tmp_path / "model")
    words = ["eval", str(tmp_path / "model"), "--tasks", name, "--lengths", "512", "--samples", "2"]
    assert cli.main([*words, "--policies", "full", "--cases", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["task"] == name


def test_a_file_that_does_not_fit_is_refused_and_not_changed(params, planned):
    asked, file = {"tasks": ["needle_docs"], "lengths": [700], "cases": planned.file}, planned.file
    planned(**asked)
    before = file.read_bytes()
    for message, changes in {
        "with seed=5, got 0": {"seed": 5},
        "with samples=3, got 2": {"samples": 3},
        "with tokenizer=": {"params": dataclasses.replace(params, tokenizer=TOKENIZERS["plain"])},
        "with needle_docs at 800 tokens": {"lengths": [700, 800]},
        "with agreement at 700 tokens": {"tasks": ["needle_docs", "agreement"]},
        "cases must be a file that can be written": {"cases": file.parent / "missing" / file.name},
    }.items():
        with pytest.raises(ConfigError, match=message):
            planned(**asked | changes)
    assert file.read_bytes() == before
    content = json.loads(gzip.decompress(before))
    content["cases"]["700"]["needle_docs"][0][0].pop("prompt")
    for damaged in (before[:-9], b"", b"text", gzip.compress(b"[]"), gzip.compress(json.dumps(content).encode())):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cases must be a file that --cases wrote"):
            planned(**asked)
        assert file.read_bytes() == damaged
