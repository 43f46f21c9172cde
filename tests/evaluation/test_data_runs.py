"""Local data through `evaluate`: several questions on one context, truncated contexts, and damaged result files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_cases import made_up_case
from tiny_text import byte_tokenizer

from jshadow import Full, ShadowKV, cli, save
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation import data, runner, samples, tasks
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 1, 16, 24, 2, 1, 8, 1e-5, 2048, eos_ids=(256,))
TOKENIZER = byte_tokenizer()
TEXT = "The ferry costs 7 crowns. The bridge was closed in 1998. " * 6
ROW = {"context": TEXT, "question": "When?", "answer_prefix": "In", "answer": "1998", "max_new_tokens": 4}


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, TOKENIZER)


POLICY = ShadowKV(rank=8, budget=32, outlier_chunks=2)
QUESTIONS = [ROW, ROW | {"question": "What does the ferry cost, in crowns?", "answer": "7"}, ROW | {"question": "Why?"}]


def by_hand(params: Params, case: tasks.Case, index: int, capacity: int) -> str:
    """The answer to one question after a separate prefill, token by token."""
    tokens = np.array([case.prompt], np.int32)
    logits, state = decode.prefill(params, tokens, np.array([tokens.shape[1]]), POLICY, capacity=capacity)
    for token in case.questions[index]:
        logits, state = decode.decode_step(params, np.array([token]), state)
    said: list[int] = []
    while len(said) < case.samples[index].max_new_tokens:
        token = int(np.asarray(logits)[0].argmax())
        if token in CONFIG.eos_ids:
            break
        said.append(token)
        logits, state = decode.decode_step(params, np.array([token]), state)
    return params.tokenizer.decode(said)


@pytest.mark.slow
def test_questions_on_one_context_are_prefilled_once_and_answered_alike(params, tmp_path, monkeypatch):
    """Each question is asked on a fork of the context, so earlier questions change nothing."""
    prefills: list[int] = []
    original = decode.prefill_many

    def counted(params: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        prefills.append(tokens.shape[1])
        return original(params, tokens, *args, **options)

    monkeypatch.setattr(decode, "prefill_many", counted)
    path = write(tmp_path / "mine.jsonl", QUESTIONS)
    rows = runner.evaluate(params, [], [], [POLICY], data=[path], out=tmp_path / "out")
    monkeypatch.setattr(decode, "prefill_many", original)
    assert [row["name"] for row in rows] == ["full", "shadowkv", "streaming_llm"]
    assert len(prefills) == 1
    assert all(row["task"] == "mine" and row["asked"] == 3 and len(row["turns"]) == 1 for row in rows)
    assert "depths" not in rows[0]
    [made] = data.read_cases([path], TOKENIZER, 2048)
    [case] = made.cases
    assert len(case.questions) == 3
    lines = [json.loads(line) for line in (tmp_path / "out" / samples.SAMPLES_FILE).read_text().splitlines()]
    [mine] = [line for line in lines if line["policy"].startswith("shadowkv")]
    assert mine["outputs"] == [by_hand(params, case, index, rows[1]["capacity"]) for index in range(3)]
    assert rows[1]["attended_tokens"] < rows[0]["attended_tokens"]


LENGTHS = [ROW | {"context": TEXT[: 100 + 61 * i]} for i in range(3)] + [ROW | {"context": TEXT * 8}]


def lines_of(out: Path) -> list[bytes]:
    """The records of finished samples."""
    return (out / samples.SAMPLES_FILE).read_bytes().splitlines()


@pytest.mark.slow
def test_prompts_of_several_lengths_are_answered_as_by_themselves(params, tmp_path):
    """A prompt that is padded to the width of the longest gets the answer of an unpadded one."""
    path, one = write(tmp_path / "mine.jsonl", LENGTHS), write(tmp_path / "one.jsonl", LENGTHS[:1])
    runner.evaluate(params, [], [], [Full()], data=[path], out=tmp_path / "out", truncate="middle")
    [alone] = runner.evaluate(params, [], [], [Full()], data=[one], out=tmp_path / "alone")
    record, wanted = json.loads(lines_of(tmp_path / "out")[0]), json.loads(lines_of(tmp_path / "alone")[0])
    assert record["outputs"] == wanted["outputs"]
    assert record["hits"] == [bool(alone["found"])]


def test_prompts_of_several_lengths_share_a_cell_and_broken_rows_run_again(params, tmp_path, monkeypatch, capsys):
    path, out, ran = write(tmp_path / "mine.jsonl", LENGTHS), tmp_path / "out", []

    def counted(setup: Any, cell: Any, index: int, policies: Any) -> Any:
        ran.append(index)
        return made_up_case(setup, cell, index, policies)

    monkeypatch.setattr(runner, "run_case", counted)
    call: dict[str, Any] = {"data": [path], "out": out, "truncate": "middle"}
    first = runner.evaluate(params, [], [], [Full()], **call)
    assert ran == [0, 1, 2, 3]
    assert [(row["samples"], row["truncated"], row["length"]) for row in first] == [(4, 1, 2044)]
    lines = lines_of(out)
    assert [json.loads(line).get("truncated", 0) > 0 for line in lines] == [False, False, False, True]
    lines[1], lines[2] = lines[1][:50], b"null"
    (out / samples.SAMPLES_FILE).write_bytes(b"\n".join(lines) + b"\n")
    assert runner.evaluate(params, [], [], [Full()], **call) == first
    assert ran[4:] == [1, 2]
    assert "2 damaged line(s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"data": "x.jsonl"}, {"truncate": "middle"}, {"limit": 3}, {"data": ["none.jsonl"]}, {}], ids=str
)
def test_calls_without_anything_to_do_are_refused(params, change):
    with pytest.raises(ConfigError):
        runner.evaluate(params, [], [], [Full()], **change)


def test_the_command_line_takes_data(params, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run_case", made_up_case)
    save(params, tmp_path / "model")
    path = write(tmp_path / "mine.jsonl", [ROW, ROW | {"context": TEXT * 8}])
    args = ["eval", str(tmp_path / "model"), "--data", str(path), "--policies", "full", "--dtype", "float32"]
    assert cli.main([*args, "--json"]) == 2
    assert "row 2 of" in capsys.readouterr().err
    assert cli.main([*args, "--truncate", "middle"]) == 0
    assert "mine at 2,044: 1 of 2 contexts were cut" in capsys.readouterr().out
    assert cli.main([*args, "--limit", "1", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["results"]
    assert (row["task"], row["samples"], row["truncated"]) == ("mine", 1, 0)
