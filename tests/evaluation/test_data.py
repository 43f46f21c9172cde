"""Local data: reading rows, writing rows, prompts that are too long, and its way through `evaluate`."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import made_up_cases, records_of
from tiny_text import byte_tokenizer
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, ShadowKV, cli, save
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation import data, runner, tasks

TOKENIZER = byte_tokenizer()
TEXT = "The ferry costs 7 crowns. The bridge was closed in 1998. " * 6
ROW = {"context": TEXT, "question": "When?", "answer_prefix": "In", "answer": "1998", "max_new_tokens": 4}
PLAIN_TEXT = ("trec", "lcc", "vt", "qa_1")  # without a chat template
LONGBENCH: dict[str, Any] = {"context": TEXT, "all_classes": None}
CHOICES = {"choice_A": "a1", "choice_B": "b1", "choice_C": "c1", "choice_D": "d1", "length": "short"}
RULER = {"index": 0, "input": TEXT, "outputs": ["AB", "CD"]}
PEOPLE, NAMES = ["Ada", "Max", "Eve", "Leo"], ["e", "f", "g", "h"]
SUITE_ROWS: dict[str, dict[str, Any]] = {  # of other suites' own files
    "hotpotqa": LONGBENCH | {"input": "When?", "answers": ["1998", "in 1998"], "length": 9},
    "trec": LONGBENCH | {"input": "Type:", "answers": ["Date"], "all_classes": ["Date", "Place"]},
    "lcc": LONGBENCH | {"input": "", "answers": ["    return"], "context": "def f():\n"},
    "longbench_v2": {"question": "Which?", **CHOICES, "answer": "C", "context": TEXT, "difficulty": "easy"},
    "longbook_choice_eng": {"context": TEXT, "input": "Who?", "answer": ["Leo"], "options": PEOPLE, "id": 0},
    "code_debug": {"context": TEXT, "input": "", "answer": ["f", "B"], "options": NAMES},
    "passkey": {"context": TEXT, "input": "What is the pass key?", "answer": [71], "options": []},
    "vt": RULER | {"length": 4000},
    "qa_1": RULER | {"answer_prefix": " Answer:"},
}
READ: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {  # scorer, most new tokens, answers and more
    "hotpotqa": ("f1", 32, ("1998", "in 1998"), {}),
    "trec": ("classes", 64, ("Date",), {"choices": ("Date", "Place"), "question": "Type:"}),
    "lcc": ("edit_similarity", 64, ("    return",), {"question": ""}),
    "longbench_v2": ("letter", 128, ("C",), {}),
    "longbook_choice_eng": ("letter", 40, ("D",), {}),
    "code_debug": ("letter", 5, ("B", "B"), {}),
    "passkey": ("first_number", 6, ("71",), {"answer_prefix": "The pass key is"}),
    "vt": ("string_match_all", 30, ("AB", "CD"), {"context": TEXT}),
    "qa_1": ("string_match_part", 32, ("AB", "CD"), {"answer_prefix": " Answer:"}),
}


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def read(tmp_path):
    """What is read from a file of rows, and the path of the file is `read.path`."""

    def read(rows, tokenizer=TOKENIZER, context=2048, **options):
        return data.read_cases([write(read.path, rows)], tokenizer, context, **options)

    read.path = tmp_path / "mine.jsonl"
    return read


@pytest.mark.parametrize("task", SUITE_ROWS)
def test_the_suites_own_files_are_known_by_their_columns(task, tmp_path):
    row, (scorer, most, answers, more) = SUITE_ROWS[task], READ[task]
    wanted = {"scorer": scorer, "max_new_tokens": most, "answer": answers} | more
    [read] = data.read_rows([write(tmp_path / f"{task}.jsonl", [row])])
    assert (read.task, read.length) == (task, None)
    assert {name: getattr(read.sample, name) for name in wanted} == wanted
    assert read.chat is (task not in PLAIN_TEXT)
    for option in row.get("options") or [row.get("choice_A", "")]:
        assert option in read.sample.question


@pytest.mark.parametrize(("task", "name", "end"), [("vt", "vt/validation", ""), ("trec", "trec", "\n\nType:")])
def test_a_plain_text_is_gone_on_with(task, name, end, tmp_path):
    [made] = data.read_cases([write(tmp_path / f"{name}.jsonl", [SUITE_ROWS[task]])], TOKENIZER, 2048)
    assert made.task == task
    assert TOKENIZER.decode(list(made.cases[0].prompt)) == TEXT + end


def test_kvpress_rows_and_their_scorers(tmp_path):
    rows = [ROW, ROW | {"answer": ["1998", "7"]}, ROW | {"task": "qa_2", "answer": ["1998"]}]
    rows += [ROW | {"scorer": "f1", "task": "own", "length": 64}]
    read = data.read_rows([write(tmp_path / "mine.jsonl", rows)])
    assert [row.sample.scorer for row in read] == ["string_match_part", "string_match_all", "string_match_part", "f1"]
    assert [row.task for row in read] == ["mine", "mine", "qa_2", "own"]
    assert [row.sample.answer for row in read[:2]] == ["1998", ("1998", "7")]
    assert read[3].length == 64


def test_parquet_and_json_hold_the_same_rows(tmp_path, monkeypatch):
    rows = [ROW, ROW | {"question": "What does it cost?", "answer": "7"}]
    there = [True]

    def pyarrow(name: str) -> Any:
        assert name == "pyarrow.parquet"
        if not there[0]:
            raise ImportError(name)
        table = type("Table", (), {"to_pylist": lambda self: rows})()
        return type("Parquet", (), {"read_table": staticmethod(lambda path: table)})

    (tmp_path / "mine.json").write_text(json.dumps(rows))
    wanted = [row.sample for row in data.read_rows([write(tmp_path / "mine.jsonl", rows)])]
    assert [row.sample for row in data.read_rows([tmp_path / "mine.json"])] == wanted
    (tmp_path / "mine.parquet").write_bytes(b"PAR1 not really")
    monkeypatch.setattr(importlib, "import_module", pyarrow)
    assert [row.sample for row in data.read_rows([tmp_path / "mine.parquet"])] == wanted
    there[0] = False
    with pytest.raises(ConfigError, match="needs pyarrow: pip install pyarrow"):
        data.read_rows([tmp_path / "mine.parquet"])


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
    ("segmentation", SUITE_ROWS["trec"] | {"dataset": "dureader"}),
    ("LongBench", SUITE_ROWS["trec"] | {"dataset": "what"}),
    ("options must be 4", SUITE_ROWS["passkey"] | {"task": "code_debug", "options": ["a"]}),
]


@pytest.mark.parametrize(("told", "row"), BAD_ROWS)
def test_bad_rows_are_refused_with_file_and_number(told, row, read):
    with pytest.raises(ConfigError, match=told) as caught:
        read([ROW, row])
    assert f"row 2 of {read.path}" in str(caught.value)


BAD_FILES = [
    ("broken.jsonl", '{"context":', None, "cannot be read"),
    ("empty.jsonl", "\n", None, "must have rows"),
    ("none.jsonl", None, None, "cannot be read"),
    ("rows.csv", None, None, "must be .jsonl"),
    ("mine.jsonl", json.dumps(ROW), 0, "limit must be"),
]


@pytest.mark.parametrize(("name", "text", "limit", "told"), BAD_FILES)
def test_files_that_cannot_be_read_are_refused(name, text, limit, told, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        data.read_rows([tmp_path / name], limit)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_mark_of_byte_order_is_no_part_of_a_row(tmp_path, encoding, ending):
    path = tmp_path / f"mine.{ending}"
    path.write_text(json.dumps(ROW | {"context": "Grün \U0001f600"}, ensure_ascii=False), encoding=encoding)
    assert data.read_rows([path])[0].sample.context == "Grün \U0001f600"


def test_the_limit_counts_rows_of_each_file(tmp_path):
    path = write(tmp_path / "mine.jsonl", [ROW] * 3)
    assert [len(data.read_rows([path, path], 2)), len(data.read_rows([path], 9))] == [4, 3]


def test_a_prompt_that_does_not_fit_is_refused_or_cut_in_the_middle(read):
    long = ROW | {"context": "BEGIN " + TEXT * 8 + " END"}
    [made] = read([ROW, long], truncate="middle")
    short, cut = made.cases
    assert short.truncated == 0
    assert len(cut.prompt) + cut.growth == 2048
    whole = data.case_of(TOKENIZER, [row.sample for row in data.read_rows([read.path])][1:])
    assert cut.truncated == len(whole.prompt) - len(cut.prompt)
    half = len(cut.samples[0].context) // 2
    assert cut.samples[0].context[:half] == long["context"][:half]
    assert cut.samples[0].context[-half:] == long["context"][-half:]
    assert cut.prompt[-20:] == whole.prompt[-20:]
    for options, told in (
        ({}, r"row 2 of .* has 2,7\d\d tokens and needs 4 more, context=2,048"),
        ({"context": 30, "truncate": "middle"}, "too little of it would be left"),
        ({"truncate": "left"}, "truncate must be one of"),
    ):
        with pytest.raises(ConfigError, match=told):
            read([ROW, long], **options)


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


def test_token_ids_of_another_text_are_not_believed(read):
    [made], [plain] = read([ROW | {"prompt_ids": [1, 2, 3]}]), read([ROW])
    assert made.cases == plain.cases


# Through `evaluate`

POLICY = ShadowKV(rank=8, budget=32, outlier_chunks=2)
QUESTIONS = [ROW, ROW | {"question": "What does the ferry cost, in crowns?", "answer": "7"}, ROW | {"question": "Why?"}]
LENGTHS = [ROW | {"context": TEXT[: 100 + 61 * i]} for i in range(3)] + [ROW | {"context": TEXT * 8}]


@pytest.mark.slow
def test_questions_on_one_context_are_prefilled_once_and_answered_alike(params, read, tmp_path, monkeypatch):
    """Each question is asked on a fork of the context, so earlier questions change nothing."""
    prefills: list[int] = []
    original = decode.prefill_many
    [made] = read(QUESTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "prefill_many", lambda *a, **named: prefills.append(1) or original(*a, **named))
        rows = runner.evaluate(params, [], [], [POLICY], data=[read.path], out=tmp_path / "out")
    assert [row["name"] for row in rows] == ["full", "shadowkv", "streaming_llm"]
    assert len(prefills) == 1
    assert all(row["task"] == "mine" and row["asked"] == 3 and len(row["turns"]) == 1 for row in rows)
    assert "depths" not in rows[0]
    assert rows[1]["attended_tokens"] < rows[0]["attended_tokens"]
    [mine] = [record for record in records_of(tmp_path / "out") if record["policy"].startswith("shadowkv")]
    [case] = made.cases
    wanted = []  # by hand: after a separate prefill, token by token
    for question, sample in zip(case.questions, case.samples, strict=True):
        tokens = np.array([case.prompt], np.int32), np.array([len(case.prompt)])
        logits, state = decode.prefill(params, *tokens, POLICY, capacity=rows[1]["capacity"])
        for token in question:
            logits, state = decode.decode_step(params, np.array([token]), state)
        said: list[int] = []
        while len(said) < sample.max_new_tokens and (token := int(np.asarray(logits)[0].argmax())) != 256:
            said.append(token)
            logits, state = decode.decode_step(params, np.array([token]), state)
        wanted.append(TOKENIZER.decode(said))
    assert mine["outputs"] == wanted
    assert len(wanted) == 3


@pytest.mark.slow
def test_prompts_of_several_lengths_are_answered_as_by_themselves(params, tmp_path):
    """A prompt that is padded to the width of the longest gets the answer of an unpadded one."""
    path, one = write(tmp_path / "mine.jsonl", LENGTHS), write(tmp_path / "one.jsonl", LENGTHS[:1])
    runner.evaluate(params, [], [], [Full()], data=[path], out=tmp_path / "out", truncate="middle")
    [alone] = runner.evaluate(params, [], [], [Full()], data=[one], out=tmp_path / "alone")
    record, wanted = records_of(tmp_path / "out")[0], records_of(tmp_path / "alone")[0]
    assert record["outputs"] == wanted["outputs"]
    assert record["hits"] == [bool(alone["found"])]


def test_prompts_of_several_lengths_share_a_cell_and_broken_rows_run_again(params, tmp_path, monkeypatch, capsys):
    path, out, ran = write(tmp_path / "mine.jsonl", LENGTHS), tmp_path / "out", []
    monkeypatch.setattr(runner, "run_cases", lambda *given: ran.extend(given[2]) or made_up_cases(*given))
    call: dict[str, Any] = {"data": [path], "out": out, "truncate": "middle"}
    first = runner.evaluate(params, [], [], [Full()], **call)
    assert ran == [0, 1, 2, 3]
    assert [(row["samples"], row["truncated"], row["length"]) for row in first] == [(4, 1, 2044)]
    assert [record.get("truncated", 0) > 0 for record in records_of(out)] == [False, False, False, True]
    lines = (out / runner.SAMPLES_FILE).read_bytes().splitlines()
    lines[1], lines[2] = lines[1][:50], b"null"
    (out / runner.SAMPLES_FILE).write_bytes(b"\n".join(lines) + b"\n")
    assert runner.evaluate(params, [], [], [Full()], **call) == first
    assert ran[4:] == [1, 2]
    assert "2 damaged line(s)" in capsys.readouterr().err


def test_the_command_line_takes_data(params, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run_cases", made_up_cases)
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
