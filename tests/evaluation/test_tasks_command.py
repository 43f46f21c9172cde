"""The command `python -m jshadow.evaluation.tasks`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text import byte_tokenizer

from jshadow import save
from jshadow.evaluation import data, tasks
from jshadow.evaluation.tasks.__main__ import main
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 1, 16, 24, 2, 1, 8, 1e-5, 2048, eos_ids=(256,))


TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, TOKENIZER)


def test_the_module_writes_rows(tmp_path: Path, params: Params, capsys: pytest.CaptureFixture[str]) -> None:
    save(params, tmp_path / "model")
    out = tmp_path / "rows.jsonl"
    args = ["--model", str(tmp_path / "model"), "--tokens", "1200", "--samples", "2", "--seed", "3", "--out", str(out)]
    assert main(["niah_multiquery_apart", *args]) == 0
    assert "8 rows" in capsys.readouterr().out
    [made] = data.read_cases([out], params.tokenizer, 2048)
    wanted = tuple(tasks.sample_of("niah_multiquery_apart", params.tokenizer, 1200, i, 2, 3)[0] for i in range(2))
    assert made.cases == wanted
    for bad, told in (
        (["agreement", *args], "must have questions"),
        (["passkey", *args, "--depth", "1"], "--depth"),
        (["passkey", *args, "--samples", "0"], "--samples"),
        (["passkey", *args[:-1], str(tmp_path / "none" / "x.jsonl")], "can be written"),
    ):
        assert main(bad) == 2
        assert told in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]


def test_the_module_prints_a_prompt(params: Params, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(params, tmp_path / "model")
    args = ["needle_docs", "--model", str(tmp_path / "model"), "--tokens", "600", "--depth", "0.25", "--seed", "3"]
    assert main(args) == 0
    case = tasks.make("needle_docs", params.tokenizer, 600, 0.25, 3)
    assert capsys.readouterr().out == case.text + "\n"
    assert main([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["prompt"] == case.text
    assert printed["samples"][0].keys() >= {"context", "question", "answer_prefix", "answer", "max_new_tokens"}
    assert main(["nothing", *args[1:]]) == 2
    assert "ConfigError" in capsys.readouterr().err
    run = [sys.executable, "-W", "error", "-m", "jshadow.evaluation.tasks", "--help"]
    assert "--depth" in subprocess.run(run, check=True, capture_output=True, text=True).stdout
