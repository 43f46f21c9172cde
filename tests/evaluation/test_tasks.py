"""Every generated task: it has the requested length, the same seed gives the same case, and its context has the answer.

The oracle of a task reads the context with a plain parser. It does not know how the context was made, and must find the
answer.
"""

import collections
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from evaluations import tiny
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, save
from jshadow.errors import ConfigError
from jshadow.evaluation import data, plan, runner, tasks
from jshadow.evaluation.metrics import SCORERS, score
from jshadow.evaluation.tasks import agreement_texts
from jshadow.evaluation.tasks.__main__ import main
from jshadow.evaluation.tasks.framing import padded
from jshadow.weights.params import Params

OLD = ("needle", "agreement")  # test_needle_prompts.py tests these
NEW = [name for name in tasks.TASKS if not name.startswith(OLD)]
LENGTH = 4200  # bytes, which are tokens here
TOKENIZER = TOKENIZERS["chat"]
FACT = r"The special (?:number|code) of ([\w-]+) is ([\w-]+)\."
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def make(task: str, length: int = LENGTH, depth: float = 0.5, seed: int = 0, tokenizer: Any = TOKENIZER) -> tasks.Case:
    return tasks.make(task, tokenizer, length, depth, seed)


# The oracles. Each returns the answers to a question on a context.


def niah(context: str, question: str) -> list[str]:
    """The values of all keys that the question names, in the order of the question."""
    facts: dict[str, list[str]] = {}
    for key, value in re.findall(FACT, context):
        facts.setdefault(key, []).append(value)
    names = re.search(r"special (?:number|code)s? of (.*) in this text", question)
    assert names
    return [value for name in re.split(r", | and ", names.group(1)) for value in facts[name]]


def passkey(context: str, question: str) -> list[str]:
    return sorted(set(re.findall(r"pass key is (\d+)", context)))


def kv_retrieval(context: str, question: str) -> list[str]:
    table, _ = json.JSONDecoder().raw_decode(context)
    key = re.search(UUID, question)
    assert key
    return [table[key.group()]]


def two_stage(context: str, question: str) -> list[str]:
    pairs = dict(re.findall(r"(\d+): (\w+)", context))
    one, other = map(int, re.findall(r"\d+", question))
    return [pairs[str(one + other)]]


def vt(context: str, question: str) -> list[str]:
    value = re.findall(r"\d{5}", question)[0]
    holds: dict[str, str] = {}
    for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)\.", context):
        holds[name] = holds.get(source, source)
    return [name for name, held in holds.items() if held == value]


def cwe(context: str, question: str) -> list[str]:
    body = context.split("\n\n", 1)[1]
    counts = collections.Counter(re.findall(r"\d+\. ([\w-]+)", body)).most_common(11)
    assert counts[9][1] > counts[10][1], "the tenth word is no tie"
    return [word for word, _ in counts[:10]]


def fwe(context: str, question: str) -> list[str]:
    counts = collections.Counter(re.findall(r"[a-z]{6}", context.split("\n\n", 1)[1])).most_common(4)
    assert counts[2][1] > counts[3][1]
    return [word for word, _ in counts[:3]]


def verses(context: str, question: str) -> list[str]:
    lines = dict(re.findall(r"^(.+? \d+:\d+) (.*)$", context, re.MULTILINE))
    asked = re.search(r"What do(?:es)? (.*) say\?", question)
    assert asked
    return [" ".join(lines[name] for name in asked.group(1).split(" and "))]


def text_to_json(context: str, question: str) -> list[str]:
    """Find fields by their neighbors: a number after "order" or "number" or before goods, a city after in, of or to."""
    made = []
    for sentence in re.split(r"(?<=[.;]) (?=[A-Z])", context.replace("; this", ", this")):
        order = re.search(r"(?:[Oo]rder|number) (\d{4})", sentence)
        if order:
            amount, goods = re.findall(r"(?<!\d)(\d{1,2}) ([a-z]+)", sentence)[0]
            city = re.findall(r"(?:of|in|to) ([A-Z]\w+)", sentence)[0]
            name = [word for word in re.findall(r"\b[A-Z]\w+", sentence) if word not in ("Order", "Under", city)]
            values = (int(order.group(1)), name[-1], city, int(amount), goods)
            made.append(dict(zip(("order", "name", "city", "count", "goods"), values, strict=True)))
    return [json.dumps(made)]


ORACLES: dict[str, Callable[[str, str], list[str]]] = {
    **{name: niah for name in NEW if name.startswith("niah")},
    "passkey": passkey,
    "kv_retrieval": kv_retrieval,
    "two_stage": two_stage,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
    "qa_1": verses,
    "qa_2": verses,
    "qa_1_apart": verses,
    "text_to_json": text_to_json,
}
MANY = ("two_stage", "cwe", "fwe", "vt", "passkey")  # by design, their answers occur in the text more than once


@pytest.mark.parametrize("task", NEW)
def test_every_answer_follows_from_the_context_alone(task):
    for seed, depth in ((0, 0.0), (1, 0.37), (2, 1.0)):
        for sample in make(task, depth=depth, seed=seed).samples:
            assert sample.scorer in SCORERS
            found = ORACLES[task](sample.context, sample.question)
            assert sorted(found) == sorted(sample.answers)
            assert score(sample.scorer, sample.answers, " ".join(found)) == 1
            if task != "text_to_json":
                assert score(sample.scorer, sample.answers, "nothing of it 0") < 1
            for answer in sample.answers:
                assert answer not in sample.question
                if task not in (*MANY, "qa_2", "text_to_json"):
                    assert sample.context.count(answer) == 1


@pytest.mark.parametrize("kind", ["chat", "plain"])
@pytest.mark.parametrize("task", NEW)
def test_prompts_have_the_asked_length_and_the_seed_decides_all(task, kind):
    tokenizer = TOKENIZERS[kind]
    for length in (LENGTH, LENGTH + 37):
        case, again, other = (make(task, length, seed=seed, tokenizer=tokenizer) for seed in (7, 7, 8))
        assert 0.99 * length <= len(case.prompt) <= length
        assert again == case
        assert other.prompt != case.prompt
        text = tokenizer.decode(list(case.prompt))
        assert case.samples[0].context in text
        if not case.questions:
            assert text.endswith(case.samples[0].answer_prefix)
            continue
        assert len(case.questions) == len(case.samples) > 1
        assert text.endswith(case.samples[0].context)
        for question, sample in zip(case.questions, case.samples, strict=True):
            assert sample.question in tokenizer.decode(list(question))


@pytest.mark.parametrize("task", [name for name in NEW if name not in ("cwe", "fwe", "two_stage", "text_to_json")])
def test_the_first_fact_lies_at_its_depth(task):
    for depth in (0.0, 0.5, 1.0):
        sample = make(task, 9000, depth, 3).samples[0]
        fact = f"VAR {sample.answers[0]} =" if task == "vt" else sample.answers[0][:30]
        at = sample.context.index(fact) / len(sample.context)
        wanted = depth / 5 if task == "vt" else depth  # the first of five links
        assert abs(at - wanted) < 0.16  # the head, the other facts and the size of a paragraph


def test_the_key_of_a_sum_lies_at_its_depth():
    for depth, least, most in ((0.0, 0, 0.01), (0.5, 0.45, 0.55), (1.0, 0.95, 1)):
        sample = make("two_stage", depth=depth, seed=3).samples[0]
        keys = len(re.findall(r"\d+: ", sample.context))
        assert least <= sum(map(int, re.findall(r"\d+", sample.question))) / keys <= most


def test_a_grid_walks_the_depth_from_end_to_end():
    assert make("needle_grid", depth=0.0).planted[0] < 0.1 * LENGTH
    assert make("needle_grid", depth=1.0).planted[0] > 0.9 * LENGTH
    depths = [tasks.sample_of("needle_grid", TOKENIZER, 1500, i, 5, 0)[1] for i in range(5)]
    assert depths == [0, 0.25, 0.5, 0.75, 1]
    assert tasks.sample_of("needle_docs", TOKENIZER, 1500, 1, 4, 0)[1] == 0.375


@pytest.mark.parametrize("task", NEW)
def test_a_length_that_is_too_short_is_told_with_the_least(task):
    with pytest.raises(ConfigError, match=r"length must be at least \d+ tokens .*got 90") as caught:
        make(task, 90)
    least = int(re.findall(r"\d+", str(caught.value))[0])
    assert least > 90
    for length in (least, least + 60):  # the text for a different length may be slightly longer
        try:
            assert len(make(task, length).prompt) <= length
            return
        except ConfigError:
            continue
    pytest.fail("the least length was refused")


def test_ruler_s_sizes():
    for length, times, others in ((4000, 6, 1), (12000, 30, 3)):
        sample = make("cwe", length).samples[0]
        counts = collections.Counter(re.findall(r"\d+\. ([\w-]+)", sample.context.split("\n\n", 1)[1]))
        assert {counts[word] for word in sample.answers} == {times}
        assert max(count for word, count in counts.items() if word not in sample.answers) <= others
    assert [len(make(task).samples[0].answers) for task in ("niah_multivalue", "vt")] == [4, 5]
    for task in ("niah_multikey_2", "niah_multikey_3"):  # a haystack of needles has no key or value twice
        pairs = re.findall(FACT, make(task, 20000).samples[0].context)
        assert len(pairs) > 100
        assert len({key for key, _ in pairs}) == len({value for _, value in pairs}) == len(pairs)


def test_growth_covers_the_largest_fork():
    case = make("niah_multiquery_apart")
    assert case.growth == padded(max(map(len, case.questions))) + case.samples[0].max_new_tokens


@pytest.fixture(scope="module")
def params() -> Params:
    return tiny(TOKENIZER, num_layers=1, context=8192)


@pytest.fixture(scope="module")
def model_dir(params, tmp_path_factory):
    save(params, path := tmp_path_factory.mktemp("tasks") / "model")
    return str(path)


@pytest.mark.slow
def test_every_task_runs(params, monkeypatch, text_packages):
    """All tasks run in one call, with short answers and at one capacity, so that few programs are compiled."""
    monkeypatch.setattr(agreement_texts, "TURNS_FORCED", tasks.FORCED)

    def short(*args: Any) -> tuple[tasks.Case, float]:
        case, depth = tasks.sample_of(*args)
        samples = tuple(dataclasses.replace(one, max_new_tokens=8) for one in case.samples)
        return dataclasses.replace(case, samples=samples), depth

    monkeypatch.setattr(plan, "sample_of", short)
    monkeypatch.setattr(tasks.Case, "growth", 600)
    rows = runner.evaluate(params, list(tasks.TASKS), [LENGTH], [Full()], samples=1, fetch="resident")
    assert [row["task"] for row in rows] == list(tasks.TASKS)
    for row in rows:
        assert row["truncated"] == 0
        if row["task"].startswith("agreement"):
            assert row["score"] == 100
            assert row["ppl"] == row["ppl_full"] > 1
        else:
            assert 0 <= row["score"] < 100
            assert row["asked"] == (4 if "multiturn" in row["task"] or row["task"].endswith("apart") else 1)
            assert row["depth_scores"] == [row["score"]]
            assert len(row["turns"]) == tasks.TASK_TURNS.get(row["task"], 1)


# The command `python -m jshadow.evaluation.tasks`


def test_the_module_writes_rows(model_dir, tmp_path, params, capsys):
    task, out = "niah_multiquery_apart", tmp_path / "rows.jsonl"
    args = ["--model", model_dir, "--tokens", "1200", "--samples", "2", "--seed", "3", "--out", str(out)]
    assert main([task, *args]) == 0
    assert "8 rows" in capsys.readouterr().out
    [made] = data.read_cases([out], params.tokenizer, 2048)
    assert made.cases == tuple(tasks.sample_of(task, params.tokenizer, 1200, i, 2, 3)[0] for i in range(2))
    for bad, told in (
        (["agreement", *args], "must have questions"),
        (["passkey", *args, "--depth", "1"], "--depth"),
        (["passkey", *args, "--samples", "0"], "--samples"),
        (["passkey", *args[:-1], str(tmp_path / "none" / "x.jsonl")], "can be written"),
        (["nothing", *args], "ConfigError"),
    ):
        assert main(bad) == 2
        assert told in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 8
    assert list(tmp_path.iterdir()) == [out]


def test_the_module_prints_a_prompt(model_dir, capsys):
    args = ["needle_docs", "--model", model_dir, "--tokens", "600", "--depth", "0.25", "--seed", "3"]
    assert main(args) == 0
    text = make("needle_docs", 600, 0.25, 3).text
    assert capsys.readouterr().out == text + "\n"
    assert main([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["prompt"] == text
    assert printed["samples"][0].keys() >= {"context", "question", "answer_prefix", "answer", "max_new_tokens"}


@pytest.mark.slow
@pytest.mark.process
def test_the_module_is_a_command():
    run = [sys.executable, "-W", "error", "-m", "jshadow.evaluation.tasks", "--help"]
    assert "--depth" in subprocess.run(run, check=True, capture_output=True, text=True).stdout
