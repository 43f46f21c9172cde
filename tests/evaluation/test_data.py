"""Local data: rows in, rows out, several questions on one context, what does not fit, and damaged results."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_text import byte_tokenizer
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, ShadowKV, cli, save
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation import data, metrics, results, runner, samples, tasks
from jshadow.evaluation.tasks.__main__ import main
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 1, 16, 24, 2, 1, 8, 1e-5, 2048, eos_ids=(256,))
TOKENIZER = byte_tokenizer()
TEXT = "The ferry costs 7 crowns. The bridge was closed in 1998. " * 6
ROW = {"context": TEXT, "question": "When?", "answer_prefix": "In", "answer": "1998", "max_new_tokens": 4}
SUITE_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hotpotqa": (
        {"input": "When?", "context": TEXT, "answers": ["1998", "in 1998"], "all_classes": None, "length": 9},
        {"answer": ("1998", "in 1998"), "scorer": "f1", "max_new_tokens": 32},
    ),
    "trec": (
        {"input": "Type:", "context": TEXT, "answers": ["Date"], "all_classes": ["Date", "Place"]},
        {"answer": ("Date",), "scorer": "classes", "choices": ("Date", "Place"), "question": "Type:"},
    ),
    "lcc": (
        {"input": "", "context": "def f():\n", "answers": ["    return"], "all_classes": None},
        {"scorer": "edit_similarity", "max_new_tokens": 64, "question": ""},
    ),
    "longbench_v2": (
        {
            "question": "Which?",
            "choice_A": "a1",
            "choice_B": "b1",
            "choice_C": "c1",
            "choice_D": "d1",
            "answer": "C",
            "context": TEXT,
            "length": "short",
            "difficulty": "easy",
        },
        {"answer": ("C",), "scorer": "letter", "max_new_tokens": 128},
    ),
    "longbook_choice_eng": (
        {"context": TEXT, "input": "Who?", "answer": ["Leo"], "options": ["Ada", "Max", "Eve", "Leo"], "id": 0},
        {"answer": ("D",), "scorer": "letter", "max_new_tokens": 40},
    ),
    "code_debug": (
        {"context": TEXT, "input": "", "answer": ["f", "B"], "options": ["e", "f", "g", "h"]},
        {"answer": ("B", "B"), "scorer": "letter", "max_new_tokens": 5},
    ),
    "passkey": (
        {"context": TEXT, "input": "What is the pass key?", "answer": [71], "options": []},
        {"answer": ("71",), "scorer": "first_number", "max_new_tokens": 6, "answer_prefix": "The pass key is"},
    ),
    "vt": (
        {"index": 0, "input": TEXT, "outputs": ["AB", "CD"], "length": 4000},
        {"answer": ("AB", "CD"), "scorer": "string_match_all", "max_new_tokens": 30, "context": TEXT},
    ),
    "qa_1": (
        {"index": 0, "input": TEXT, "outputs": ["AB", "CD"], "answer_prefix": " Answer:"},
        {"scorer": "string_match_part", "max_new_tokens": 32, "answer_prefix": " Answer:"},
    ),
}


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("task", SUITE_ROWS)
def test_the_suites_own_files_are_known_by_their_columns(task: str, tmp_path: Path) -> None:
    row, wanted = SUITE_ROWS[task]
    [read] = data.read_rows([write(tmp_path / f"{task}.jsonl", [row])])
    assert read.task == task
    assert read.length is None
    for name, value in wanted.items():
        assert getattr(read.sample, name) == value
    assert read.chat is (task not in ("trec", "lcc", "vt", "qa_1"))
    for option in row.get("options") or [row.get("choice_A", "")]:
        assert option in read.sample.question


def test_a_plain_text_is_gone_on_with(tmp_path: Path) -> None:
    [made] = data.read_cases([write(tmp_path / "vt" / "validation.jsonl", [SUITE_ROWS["vt"][0]])], TOKENIZER, 2048)
    assert made.task == "vt"
    assert TOKENIZER.decode(list(made.cases[0].prompt)) == TEXT
    [made] = data.read_cases([write(tmp_path / "trec.jsonl", [SUITE_ROWS["trec"][0]])], TOKENIZER, 2048)
    assert TOKENIZER.decode(list(made.cases[0].prompt)) == f"{TEXT}\n\nType:"


def test_kvpress_rows_and_their_scorers(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"answer": ["1998", "7"]},
        ROW | {"task": "qa_2", "answer": ["1998"]},
        ROW | {"scorer": "f1", "task": "own", "length": 64},
    ]
    read = data.read_rows([write(tmp_path / "mine.jsonl", rows)])
    assert [row.sample.scorer for row in read] == ["string_match_part", "string_match_all", "string_match_part", "f1"]
    assert [row.task for row in read] == ["mine", "mine", "qa_2", "own"]
    assert [row.sample.answer for row in read[:2]] == ["1998", ("1998", "7")]
    assert read[3].length == 64


def test_parquet_and_json_hold_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ROW, ROW | {"question": "What does it cost?", "answer": "7"}]
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    wanted = [row.sample for row in data.read_rows([write(tmp_path / "mine.jsonl", rows)])]
    assert [row.sample for row in data.read_rows([tmp_path / "mine.json"])] == wanted
    (tmp_path / "mine.parquet").write_bytes(b"PAR1 not really")
    monkeypatch.setattr(importlib, "import_module", fake_parquet(rows))
    assert [row.sample for row in data.read_rows([tmp_path / "mine.parquet"])] == wanted
    monkeypatch.setattr(importlib, "import_module", fake_parquet(None))
    with pytest.raises(ConfigError, match="needs pyarrow: pip install pyarrow"):
        data.read_rows([tmp_path / "mine.parquet"])


def fake_parquet(rows: Any) -> Any:
    """pyarrow as it reads a table, or as it is missing."""

    class Parquet:
        @staticmethod
        def read_table(path: Any) -> Any:
            return type("Table", (), {"to_pylist": lambda self: rows})()

    def load(name: str) -> Any:
        assert name == "pyarrow.parquet"
        if rows is None:
            raise ImportError(name)
        return Parquet

    return load


BAD_ROWS: list[tuple[str, Any]] = [
    ("must have the columns", {"context": "x"}),
    ("must be an object", [1]),
    ("context must be text", ROW | {"context": 3}),
    ("context must have text", ROW | {"context": ""}),
    ("answer must be text", ROW | {"answer": []}),
    ("answer must be text", ROW | {"answer": ""}),
    ("max_new_tokens must be", ROW | {"max_new_tokens": 0}),
    ("max_new_tokens must be", ROW | {"max_new_tokens": "9"}),
    ("scorer must be one of", ROW | {"scorer": "bleu"}),
    ("turn 2 must follow", ROW | {"turn": 2}),
    ("begin with the instruction", ROW | {"instruction": "Read"}),
    ("segmentation", SUITE_ROWS["trec"][0] | {"dataset": "dureader"}),
    ("LongBench", SUITE_ROWS["trec"][0] | {"dataset": "what"}),
    ("options must be 4", SUITE_ROWS["passkey"][0] | {"task": "code_debug", "options": ["a"]}),
]


@pytest.mark.parametrize(("told", "row"), BAD_ROWS)
def test_bad_rows_are_refused_with_file_and_number(told: str, row: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [ROW, row])
    with pytest.raises(ConfigError, match=told) as caught:
        data.read_cases([path], TOKENIZER, 2048)
    assert f"row 2 of {path}" in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"context":')
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, told in (
        ("broken.jsonl", "cannot be read"),
        ("empty.jsonl", "must have rows"),
        ("none.jsonl", "cannot be read"),
        ("rows.csv", "must be .jsonl"),
    ):
        with pytest.raises(ConfigError, match=told):
            data.read_rows([tmp_path / name])
    with pytest.raises(ConfigError, match="limit must be"):
        data.read_rows([write(tmp_path / "mine.jsonl", [ROW])], 0)


def test_the_limit_counts_rows_of_each_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [ROW] * 3)
    assert len(data.read_rows([path, path], 2)) == 4
    assert len(data.read_rows([path], 9)) == 3


# What does not fit


def test_a_prompt_that_does_not_fit_is_refused_or_cut_in_the_middle(tmp_path: Path) -> None:
    long = ROW | {"context": "BEGIN " + TEXT * 8 + " END"}
    path = write(tmp_path / "mine.jsonl", [ROW, long])
    with pytest.raises(ConfigError, match=r"row 2 of .* has 2,7\d\d tokens and needs 4 more, context=2,048"):
        data.read_cases([path], TOKENIZER, 2048)
    [made] = data.read_cases([path], TOKENIZER, 2048, truncate="middle")
    short, cut = made.cases
    assert short.truncated == 0
    assert len(cut.prompt) + cut.growth == 2048
    whole = data.case_of(TOKENIZER, [row.sample for row in data.read_rows([path])][1:])
    assert cut.truncated == len(whole.prompt) - len(cut.prompt)
    half = len(cut.samples[0].context) // 2
    assert cut.samples[0].context[:half] == long["context"][:half]
    assert cut.samples[0].context[-half:] == long["context"][-half:]
    assert cut.prompt[-20:] == whole.prompt[-20:]
    with pytest.raises(ConfigError, match="too little of it would be left"):
        data.read_cases([path], TOKENIZER, 30, truncate="middle")
    with pytest.raises(ConfigError, match="truncate must be one of"):
        data.read_cases([path], TOKENIZER, 2048, truncate="left")


# Out and in again

ASKING = [name for name in tasks.TASKS if not name.startswith("agreement")]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", ASKING)
def test_rows_that_are_read_back_give_the_same_cases(task: str, kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    pairs = [tasks.sample_of(task, tokenizer, 4200, index, 2, 5) for index in range(2)]
    rows = [row for case, depth in pairs for row in data.rows_of(task, tokenizer, 4200, case, depth)]
    for row in rows:
        assert row.keys() >= {"context", "question", "answer_prefix", "answer", "max_new_tokens"}
    data.write_rows(tmp_path / "rows.jsonl", rows)
    [made] = data.read_cases([tmp_path / "rows.jsonl"], tokenizer, 10**6)
    assert made.task == task
    assert made.depths == tuple(depth for _, depth in pairs)
    assert made.cases == tuple(dataclasses.replace(case, planted=()) for case, _ in pairs)


def test_token_ids_of_another_text_are_not_believed(tmp_path: Path) -> None:
    rows = [ROW | {"prompt_ids": [1, 2, 3]}]
    [made] = data.read_cases([write(tmp_path / "mine.jsonl", rows)], TOKENIZER, 2048)
    [plain] = data.read_cases([write(tmp_path / "mine.jsonl", [ROW])], TOKENIZER, 2048)
    assert made.cases == plain.cases


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
        (["agreement", *args], "must ask something"),
        (["passkey", *args, "--depth", "1"], "--depth"),
        (["passkey", *args, "--samples", "0"], "--samples"),
        (["passkey", *args[:-1], str(tmp_path / "none" / "x.jsonl")], "can be written"),
    ):
        assert main(bad) == 2
        assert told in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]


# Through the runner


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, TOKENIZER)


POLICY = ShadowKV(rank=8, budget=32, outlier_chunks=2)
QUESTIONS = [ROW, ROW | {"question": "What does the ferry cost, in crowns?", "answer": "7"}, ROW | {"question": "Why?"}]


def by_hand(params: Params, case: tasks.Case, index: int, capacity: int) -> str:
    """The answer of one question after a prefill of its own, token by token."""
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


def test_questions_on_one_context_are_prefilled_once_and_answered_alike(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked before: each fork starts from the context."""
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


def test_prompts_of_several_lengths_share_a_cell_and_broken_rows_run_again(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW | {"context": TEXT[: 100 + 61 * i]} for i in range(3)] + [ROW | {"context": TEXT * 8}]
    path = write(tmp_path / "mine.jsonl", rows)
    call: dict[str, Any] = {"data": [path], "out": tmp_path / "out", "truncate": "middle"}
    first = runner.evaluate(params, [], [], [Full()], **call)
    assert [(row["samples"], row["truncated"], row["length"]) for row in first] == [(4, 1, 2044)]
    lines = (tmp_path / "out" / samples.SAMPLES_FILE).read_bytes().splitlines()
    assert [json.loads(line).get("truncated", 0) > 0 for line in lines] == [False, False, False, True]
    alone = [
        runner.evaluate(params, [], [], [Full()], data=[write(tmp_path / "one.jsonl", [row])])[0]["found"]
        for row in rows[:3]
    ]
    assert [json.loads(line)["hits"] for line in lines[:3]] == [[bool(one)] for one in alone]

    ran: list[int] = []
    original = runner.run_case

    def counted(setup: Any, cell: Any, index: int, policies: Any) -> Any:
        ran.append(index)
        return original(setup, cell, index, policies)

    monkeypatch.setattr(runner, "run_case", counted)
    lines[1], lines[2] = lines[1][:50], b"null"
    (tmp_path / "out" / samples.SAMPLES_FILE).write_bytes(b"\n".join(lines) + b"\n")
    assert runner.evaluate(params, [], [], [Full()], **call) == first
    assert ran == [1, 2]
    assert "2 damaged line(s)" in capsys.readouterr().err


def test_partial_scores_are_summed_and_shown() -> None:
    common = {"kl": None, "attended_tokens": 1.0, "hit_rate": None}
    mine = [common | {"score": 50.0, "hits": [False], "scores": [0.5]}, common | {"score": 100.0, "hits": [True]}]
    full = [common | {"score": 75.0, "hits": [False], "scores": [0.75]}, common | {"score": 100.0, "hits": [True]}]
    row = results.score_row(mine, full, (0.0, 1.0))
    assert (row["asked"], row["found"], row["found_by_full"], row["found_by_both"]) == (2, 1.5, 1.75, 1.5)
    assert row["recall_of_full"] == pytest.approx(100 * 1.5 / 1.75)
    assert (row["depths"], row["depth_scores"], row["turns"]) == ([0.0, 1.0], [50.0, 100.0], [75.0])


def test_perplexity_against_numpy() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (5, 11))
    tokens = np.array([3, 0, 10, 3, 7])
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.prod(chances[np.arange(5), tokens]) ** (-1 / 5)
    assert metrics.perplexity(logits, tokens) == pytest.approx(wanted)
    records = [
        {"score": 1.0, "hits": [], "kl": 0.0, "attended_tokens": 1.0, "hit_rate": None, "ppl": x} for x in (2, 8)
    ]
    assert results.score_row(records, records)["ppl"] == pytest.approx(4)
    assert results.score_row([{**records[0], "ppl": None}], records[:1])["ppl"] is None


def test_the_perplexity_of_an_agreement_is_that_of_its_text(params: Params) -> None:
    case = tasks.sample_of("agreement", params.tokenizer, 300, 0, 1, 0)[0]
    [row] = runner.evaluate(params, ["agreement"], [300], [Full()], samples=1)
    ids = np.array([[*case.prompt, *case.forced]], np.int32)
    logits, _ = decode.prefill(params, ids, np.array([ids.shape[1]]), Full(), capacity=ids.shape[1], logits="all")
    wanted = metrics.perplexity(np.asarray(logits)[0, 299:-1], np.array(case.forced))
    assert row["ppl"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    "change", [{"data": "x.jsonl"}, {"truncate": "middle"}, {"limit": 3}, {"data": ["none.jsonl"]}, {}], ids=str
)
def test_calls_without_anything_to_do_are_refused(params: Params, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        runner.evaluate(params, [], [], [Full()], **change)


def test_the_command_line_takes_data(params: Params, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
