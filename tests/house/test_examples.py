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
# The options with which a script runs on the tiny model, and a pattern of its whole output.
TINY_RUNS = {
    "generate_long_prompt": (
        ["--tokens", "600", "--max-new-tokens", "3"],
        r".*KV cache: [\d,]+ bytes on the device, [1-9][\d,]* in host memory\nfull attention: [\d,]+ bytes.*",
    ),
    "batch_decode": (["--steps", "3"], r"'The three primary colors are.*\n[\"']def add.*\n[\"']Water boils at.*"),
    "shared_document": (
        ["--question", "When?", "Where?", "--max-new-tokens", "3"],
        r"document: [\d,]+ tokens, [\d.]+ s\nWhen\? .*\nWhere\? .*",
    ),
    "serve_documents": (
        ["--question", "When?", "Where?", "--max-new-tokens", "3"],
        r"When\? .* \(226 tokens were stored\)\nWhere\? .* \(226 tokens were stored\)",
    ),
}
SMOLLM2_ANSWERS = {
    "generate_long_prompt": ["Apache License"],
    "batch_decode": ["return a + b"],
    "shared_document": ["1998", "2003", "7 crowns"],
    "serve_documents": ["1998", "2003", "7 crowns"],
}


def run(name: str, arguments: list[str], monkeypatch, capsys) -> str:
    """What a script prints."""
    path = REPO / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    roomy = dataclasses.replace(byte_models.CONFIG, context=1024)
    jshadow.save(dataclasses.replace(byte_models.PARAMS, config=roomy), path)
    return str(path)


def test_every_script_is_run_and_short():
    assert [path.stem for path in SCRIPTS] == sorted(TINY_RUNS) == sorted(SMOLLM2_ANSWERS)
    for path in SCRIPTS:
        assert len(path.read_text().splitlines()) < MOST_LINES, path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_RUNS)
def test_it_runs_on_a_tiny_model(name, checkpoint, tmp_path, monkeypatch, capsys):
    arguments, expected = TINY_RUNS[name]
    files = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if name in ("shared_document", "serve_documents"):
        document = tmp_path / "document.txt"
        document.write_text("A bridge and a ferry. " * 10)
        files = ["--file", str(document)]
    out = run(name, [checkpoint, *files, *arguments], monkeypatch, capsys)
    assert re.fullmatch(expected, out.strip(), flags=re.DOTALL), out


@pytest.mark.real
@pytest.mark.parametrize("name", SMOLLM2_ANSWERS)
def test_it_answers_on_smollm2(name, smollm2_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = run(name, [str(smollm2_dir)], monkeypatch, capsys)
    assert all(answer in out for answer in SMOLLM2_ANSWERS[name]), out
