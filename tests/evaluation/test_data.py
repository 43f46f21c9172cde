"""Local data: reading rows, writing rows, and prompts that are too long."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_text import byte_tokenizer
from tokenizers_by_kind import TOKENIZERS

from jshadow.errors import ConfigError
from jshadow.evaluation import data, tasks

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
def test_the_suites_own_files_are_known_by_their_columns(task, tmp_path):
    row, wanted = SUITE_ROWS[task]
    [read] = data.read_rows([write(tmp_path / f"{task}.jsonl", [row])])
    assert read.task == task
    assert read.length is None
    for name, value in wanted.items():
        assert getattr(read.sample, name) == value
    assert read.chat is (task not in ("trec", "lcc", "vt", "qa_1"))
    for option in row.get("options") or [row.get("choice_A", "")]:
        assert option in read.sample.question


def test_a_plain_text_is_gone_on_with(tmp_path):
    [made] = data.read_cases([write(tmp_path / "vt" / "validation.jsonl", [SUITE_ROWS["vt"][0]])], TOKENIZER, 2048)
    assert made.task == "vt"
    assert TOKENIZER.decode(list(made.cases[0].prompt)) == TEXT
    [made] = data.read_cases([write(tmp_path / "trec.jsonl", [SUITE_ROWS["trec"][0]])], TOKENIZER, 2048)
    assert TOKENIZER.decode(list(made.cases[0].prompt)) == f"{TEXT}\n\nType:"


def test_kvpress_rows_and_their_scorers(tmp_path):
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


def test_parquet_and_json_hold_the_same_rows(tmp_path, monkeypatch):
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
    """A fake pyarrow that reads a table with these rows, or that is missing if rows is None."""

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
def test_bad_rows_are_refused_with_file_and_number(told, row, tmp_path):
    path = write(tmp_path / "mine.jsonl", [ROW, row])
    with pytest.raises(ConfigError, match=told) as caught:
        data.read_cases([path], TOKENIZER, 2048)
    assert f"row 2 of {path}" in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
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


def test_the_limit_counts_rows_of_each_file(tmp_path):
    path = write(tmp_path / "mine.jsonl", [ROW] * 3)
    assert len(data.read_rows([path, path], 2)) == 4
    assert len(data.read_rows([path], 9)) == 3


def test_a_prompt_that_does_not_fit_is_refused_or_cut_in_the_middle(tmp_path):
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


ASKING = [name for name in tasks.TASKS if not name.startswith("agreement")]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", ASKING)
def test_rows_that_are_read_back_give_the_same_cases(task, kind, tmp_path):
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


def test_token_ids_of_another_text_are_not_believed(tmp_path):
    rows = [ROW | {"prompt_ids": [1, 2, 3]}]
    [made] = data.read_cases([write(tmp_path / "mine.jsonl", rows)], TOKENIZER, 2048)
    [plain] = data.read_cases([write(tmp_path / "mine.jsonl", [ROW])], TOKENIZER, 2048)
    assert made.cases == plain.cases
