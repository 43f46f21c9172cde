"""The scripts in examples/ run on a tiny checkpoint, and give the right answers on SmolLM2."""

import dataclasses
import re
import runpy
import sys
import tempfile

import byte_models
import pytest
from conftest import REPO

import jshadow

SCRIPTS = sorted((REPO / "examples").glob("*.py"))
MOST_LINES = 40
# For each script: its options on the tiny model, a pattern of its whole output there, and what it answers on SmolLM2.
QUESTIONS = ["--file", "document.txt", "--question", "When?", "Where?", "--max-new-tokens", "3"]
BYTES = r".*KV cache: [\d,]+ bytes on the device, [1-9][\d,]* in host memory\nfull attention: [\d,]+ bytes.*"
ROWS = r"'The three primary colors are.*\n[\"']def add.*\n[\"']Water boils at.*"
SHARED = r"document: [\d,]+ tokens, [\d.]+ s\nWhen\? .*\nWhere\? .*"
SERVED = r"When\? .* \(226 tokens were stored\)\nWhere\? .* \(226 tokens were stored\)"
RUNS = [
    ("generate_long_prompt", ["--tokens", "600", "--max-new-tokens", "3"], BYTES, ["Apache License"]),
    ("batch_decode", ["--steps", "3"], ROWS, ["return a + b"]),
    ("shared_document", QUESTIONS, SHARED, ["1998", "2003", "7 crowns"]),
    ("serve_documents", QUESTIONS, SERVED, ["1998", "2003", "7 crowns"]),
]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script. Returns what it prints."""

    def run(name, *arguments):
        path = REPO / "examples" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return run


def test_every_script_is_run_and_short():
    assert [path.stem for path in SCRIPTS] == sorted(name for name, *_ in RUNS)
    for path in SCRIPTS:
        assert len(path.read_text().splitlines()) < MOST_LINES, path.name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "expected", "_"), RUNS)
def test_it_runs_on_a_tiny_model(name, arguments, expected, _, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "document.txt").write_text("A bridge and a ferry. " * 10)
    roomy = dataclasses.replace(byte_models.CONFIG, context=1024)
    jshadow.save(dataclasses.replace(byte_models.PARAMS, config=roomy), tmp_path / "tiny")
    out = run(name, "tiny", *arguments)
    assert re.fullmatch(expected, out.strip(), flags=re.DOTALL), out


@pytest.mark.real
@pytest.mark.parametrize(("name", "_", "__", "answers"), RUNS)
def test_it_answers_on_smollm2(name, _, __, answers, run, smollm2_dir):
    out = run(name, smollm2_dir)
    assert all(answer in out for answer in answers), out
