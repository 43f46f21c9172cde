"""Tasks, scores and the runner, on a tiny random model with a byte tokenizer: no checkpoint."""

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, ShadowKV, StreamingLLM, cli, save
from jshadow.engine import decode
from jshadow.engine.report import measured_bytes
from jshadow.errors import ConfigError
from jshadow.evaluation import metrics, results, runner, samples, tasks, text_metrics
from jshadow.evaluation.settings import Setup, TaskPlan
from jshadow.evaluation.tasks.__main__ import main
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 2, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))
POLICY = ShadowKV(rank=8, budget=32, outlier_chunks=2)
LENGTH = 420


OLD = [name for name in tasks.TASKS if name.startswith(("needle", "agreement"))]
NEEDLES = [name for name in tasks.TASKS if name.startswith("needle")]


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, TOKENIZERS["merging"])


# Tasks


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", OLD)
def test_a_prompt_has_exactly_the_asked_length(task: str, kind: str) -> None:
    for length, depth in ((600, 0.0), (601, 0.5), (1337, 1.0)):
        case = tasks.make(task, TOKENIZERS[kind], length, depth, seed=length)
        assert len(case.prompt) == length
        assert len(case.forced) == (tasks.FORCED if task.startswith("agreement") else 0)


@pytest.mark.parametrize("task", OLD)
def test_the_seed_decides_everything(task: str) -> None:
    for tokenizer in TOKENIZERS.values():
        one, again, other = (tasks.make(task, tokenizer, 700, 0.5, seed) for seed in (3, 3, 4))
        assert one == again
        assert one.prompt != other.prompt


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", NEEDLES)
def test_the_facts_lie_where_they_were_asked_to(task: str, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    length = 3000
    for depth in (0.05, 0.5, 0.95):
        case = tasks.make(task, tokenizer, length, depth, seed=7)
        assert len(case.samples) == len(case.planted) == len(case.turns) + 1
        for turn, (sample, start) in enumerate(zip(case.samples, case.planted, strict=True)):
            city = sample.answer_prefix.removeprefix("The secret number of ").removesuffix(" is")
            fact = tasks.FACT.format(city=city, number=sample.answer)
            assert tokenizer.decode(list(case.prompt[start:])).lstrip().startswith(fact)
            assert sample.context.count(fact) == 1
            assert sample.context.count(sample.answer) == 1
            asked = (depth + turn / len(case.samples)) % 1
            assert abs(start / length - asked) < 0.15  # the frame, and the other facts, take their share


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_prompt_reads_as_its_user_would_write_it(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    case = tasks.make("needle_docs", tokenizer, 900, 0.3, seed=1)
    sample, text = case.samples[0], tokenizer.decode(list(case.prompt))
    assert text.endswith(sample.answer_prefix)
    assert sample.context in text
    assert sample.question in text
    assert sample.answer not in text.replace(sample.context, "")
    assert case.text == f"{tasks.HEAD}{sample.context}\n\n{sample.question}"
    assert "<assistant>" not in case.text
    if kind == "chat":
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": case.text}], tokenize=False, add_generation_prompt=True
        )
        assert text == rendered + sample.answer_prefix
    else:
        assert text.count("<s>") == (kind == "merging")  # no end token is put after the prompt
    assert not any(token in case.prompt for token in (tokenizer.eos_token_id,))


def test_a_later_question_goes_on_from_the_answer() -> None:
    case = tasks.make("needle_multiturn", TOKENIZERS["chat"], 2500, 0.5, seed=1)
    second = TOKENIZERS["chat"].decode(list(case.turns[0]))
    assert second == f"\n<user>{case.samples[1].question}\n<assistant>{case.samples[1].answer_prefix}"
    plain = tasks.make("needle_multiturn", TOKENIZERS["plain"], 2500, 0.5, seed=1)
    assert TOKENIZERS["plain"].decode(list(plain.turns[0])).startswith("\n\nQuestion: ")


def test_the_forced_text_is_what_follows_the_prompt() -> None:
    tokenizer = TOKENIZERS["plain"]
    case = tasks.make("agreement", tokenizer, 500, 0.5, seed=5)
    longer = tasks.make("agreement", tokenizer, 500 + tasks.FORCED, 0.5, seed=5)
    assert (*case.prompt, *case.forced) == longer.prompt


def test_long_texts_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        for task in OLD:
            tasks.make(task, TOKENIZERS["merging"], 5000, 0.5, seed=0)
    assert not caplog.records


BAD_CASES: list[tuple[str, dict[str, Any]]] = [
    ("task", {"task": "needle"}),
    ("length", {"length": 20}),
    ("length", {"length": 0}),
    ("length", {"length": True}),
    ("depth", {"depth": -0.1}),
    ("depth", {"depth": 1.5}),
    ("depth", {"depth": float("nan")}),
    ("seed", {"seed": -1}),
    ("tokenizer", {"tokenizer": None}),
]


@pytest.mark.parametrize(("word", "change"), BAD_CASES)
def test_bad_cases_are_refused(word: str, change: dict[str, Any]) -> None:
    good = {"task": "needle_docs", "tokenizer": TOKENIZERS["plain"], "length": 900, "depth": 0.5, "seed": 0}
    with pytest.raises(ConfigError, match=word):
        tasks.make(**(good | change))


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


# Scores

ANSWERS = [
    ("1234567", "1234567", True),
    ("1234567", " It is 1234567.", True),
    ("1234567", "", False),
    ("1234567", "123456", False),
    ("1234567", "12345678", False),
    ("1234567", "01234567", False),
    ("1234567", "1,234,567", False),
    ("1234567", "1234568 or 1234567", True),
    ("", "anything", False),
]


@pytest.mark.parametrize(("answer", "output", "good"), ANSWERS)
def test_an_answer_is_found_only_whole(answer: str, output: str, good: bool) -> None:
    assert text_metrics.found(answer, output) is good


def test_divergence_against_numpy_and_far_from_overflow() -> None:
    rng = np.random.default_rng(0)
    full, other = rng.normal(0, 3, (2, 7, 50)).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (full, other))
    np.testing.assert_allclose(metrics.kl(full, other), (p * np.log(p / q)).sum(-1), rtol=1e-10)
    np.testing.assert_array_equal(metrics.kl(full, full), 0)
    np.testing.assert_array_equal(metrics.top1(full, other), p.argmax(-1) == q.argmax(-1))
    huge = full * np.float32(1e30)
    assert np.isfinite(metrics.log_softmax(huge)).all()
    np.testing.assert_allclose(metrics.kl(full + np.float32(1000), other), metrics.kl(full, other), atol=1e-3)


def test_mean_and_standard_error() -> None:
    values = [0.0, 100.0, 100.0, 50.0]
    mean, stderr = metrics.mean_stderr(values)
    assert mean == np.mean(values)
    assert stderr == pytest.approx(np.std(values, ddof=1) / 2)
    assert metrics.mean_stderr([3.0]) == (3.0, None)
    assert metrics.mean_known([None, 2.0]) == 2.0
    assert metrics.mean_known([None]) is None


def record(*hits: bool) -> dict[str, Any]:
    share = 100 * sum(hits) / len(hits)
    return {"score": share, "hits": list(hits), "kl": None, "attended_tokens": 1.0, "hit_rate": None}


def test_recall_counts_only_what_full_finds() -> None:
    row = results.score_row([record(True, False), record(True, True)], [record(False, True), record(True, True)])
    assert (row["asked"], row["found"], row["found_by_full"], row["found_by_both"]) == (4, 3, 3, 2)
    assert row["recall_of_full"] == pytest.approx(200 / 3)
    assert row["turns"] == [100.0, 50.0]
    assert results.score_row([record(True)], [record(False)])["recall_of_full"] is None
    rows = [row | {"policy": "a", "control_of": None}, row | {"policy": "b", "control_of": "a"}] * 2
    policy, control = results.pooled(rows)
    assert (policy["found_by_both"], policy["found_by_full"], policy["recall_of_full"]) == (
        4,
        6,
        pytest.approx(200 / 3),
    )
    assert control["control"].endswith("tells nothing")


@pytest.mark.parametrize(
    ("by_full", "by_control", "good"), [(10, 5, True), (10, 6, False), (0, 0, False), (5, 0, True)]
)
def test_a_control_that_finds_much_is_told(by_full: int, by_control: int, good: bool) -> None:
    said = results.verdict(by_full, by_control)
    assert said.startswith("ok") is good
    assert ("tells nothing" in said) is not good


# The runner


def evaluate(params: Params, out: Path | None = None, **changes: Any) -> list[dict[str, Any]]:
    options = {"tasks": ["needle_docs"], "lengths": [LENGTH], "policies": [POLICY], "samples": 2} | changes
    return runner.evaluate(params, **options, out=out)


def test_every_table_has_full_attention_and_a_control(params: Params) -> None:
    rows = evaluate(params, tasks=["needle_noise", "needle_docs"])
    assert [row["name"] for row in rows] == ["full", "shadowkv", "streaming_llm"] * 2
    assert [row["control_of"] is None for row in rows] == [True, True, False] * 2
    assert len({(row["task"], row["control"]) for row in rows}) == 2
    assert rows[1]["policy"] == "shadowkv:rank=8:budget=32:outlier_chunks=2" == rows[2]["control_of"]
    assert rows[0]["device_bytes"] == rows[0]["full_bytes"]
    assert rows[2]["device_bytes"] <= rows[1]["offloaded_device_bytes"] < rows[1]["device_bytes"]
    assert rows[1]["offloaded_device_bytes"] - rows[2]["device_bytes"] < 0.02 * rows[0]["full_bytes"]
    assert all(row["samples"] == 2 and 0 <= row["score"] <= 100 for row in rows)


def test_bytes_are_those_of_a_real_state(params: Params) -> None:
    row = evaluate(params, samples=1, fetch="device_put")[1]
    prompt = np.array([tasks.make("needle_docs", params.tokenizer, LENGTH, 0.5, 0).prompt], np.int32)
    _, state = decode.prefill(
        params, prompt, np.array([LENGTH], np.int32), POLICY, capacity=row["capacity"], fetch="device_put"
    )
    assert sum(measured_bytes(state).values()) == row["device_bytes"] + row["host_bytes"]
    assert row["host_bytes"] > 0


def test_agreement_of_full_attention_with_itself_is_perfect(params: Params) -> None:
    rows = evaluate(params, tasks=["agreement"], policies=[POLICY, ShadowKV.lossless(1024, CONFIG), StreamingLLM()])
    full, shadow, lossless, window = rows
    assert (full["top1"], full["kl"], full["kl_stderr"]) == (100.0, 0.0, 0.0)
    assert lossless["kl"] < 1e-6 < shadow["kl"]
    assert window["kl"] < 1e-6  # the window holds the whole prompt
    assert shadow["score"] == shadow["top1"] < 100
    assert all(row["control_of"] is None for row in rows)


def test_every_turn_is_asked_and_answers_stay_in_the_cache(params: Params) -> None:
    policies = [Full(), ShadowKV.lossless(2048, CONFIG)]
    rows = evaluate(params, tasks=["needle_multiturn"], policies=policies, lengths=[700])
    assert all(len(row["turns"]) == tasks.TURNS and row["asked"] == 2 * tasks.TURNS for row in rows)
    case = tasks.make("needle_multiturn", params.tokenizer, 700, 0.5, 0)
    texts = []
    for policy in policies:
        [(logits, state)] = decode.prefill_many(
            params, np.array([case.prompt]), np.array([700]), [policy], capacity=700 + case.growth
        )
        said, state = runner.answers(params, case, logits, state)
        texts.append(said)
        answered = sum(map(len, case.turns)) + tasks.TURNS * tasks.NEW_TOKENS
        assert 700 + sum(map(len, case.turns)) < int(state.lengths[0]) <= 700 + answered
    assert texts[0] == texts[1]
    assert texts[0] == by_hand(params, case)


def by_hand(params: Params, case: tasks.Case) -> list[str]:
    """Greedy answers token by token, every question fed in the same way: the slow way to the same."""
    capacity = 700 + case.growth
    logits, state = decode.prefill(params, np.array([case.prompt]), np.array([700]), Full(), capacity=capacity)
    texts = []
    for question in [*case.turns, ()]:
        said: list[int] = []
        while len(said) < tasks.NEW_TOKENS and (token := int(np.asarray(logits)[0].argmax())) not in CONFIG.eos_ids:
            said.append(token)
            logits, state = decode.decode_step(params, np.array([token]), state)
        texts.append(params.tokenizer.decode(said))
        for token in question:
            logits, state = decode.decode_step(params, np.array([token]), state)
    return texts


def test_prefills_of_few_states_and_forgotten_programs_change_nothing(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [POLICY, dataclasses.replace(POLICY, budget=16), StreamingLLM(window=30)]
    options: dict[str, Any] = {"tasks": ["agreement", "needle_docs"], "policies": policies}
    want = evaluate(params, **options)
    monkeypatch.setattr(runner, "MOST_TOGETHER", 2)
    monkeypatch.setattr(runner, "MOST_PROGRAMS", 1)
    got = evaluate(params, **options)
    assert [row["policy"] for row in got] == [row["policy"] for row in want]
    for one, other in zip(got, want, strict=True):
        assert one["score"] == other["score"]
        assert one.get("kl", 0) == pytest.approx(other.get("kl", 0), abs=1e-6)


def test_a_killed_run_goes_on_where_it_stopped(
    params: Params, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    original = runner.run_case

    def counted(setup: Setup, plan: TaskPlan, index: int, policies: list) -> Any:
        ran.append(len(policies))
        return original(setup, plan, index, policies)

    monkeypatch.setattr(runner, "run_case", counted)
    both = ["needle_docs", "agreement"]
    first = evaluate(params, tmp_path, tasks=both)
    assert ran == [3, 3, 2, 2]
    assert evaluate(params, tmp_path, tasks=both) == first
    assert len(ran) == 4, "a finished run computes nothing"

    file = tmp_path / samples.SAMPLES_FILE
    data = file.read_bytes()
    file.write_bytes(data[:-40])  # killed in the middle of its last line
    assert evaluate(params, tmp_path, tasks=both) == first
    assert ran[4:] == [2]  # the lost policy, and full attention for its logits
    assert "1 damaged line" in capsys.readouterr().err
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([b'{"key": 1}', b"\xff garbage", *lines[1:]]) + b"\n")
    assert evaluate(params, tmp_path, tasks=both) == first
    assert ran[5:] == [1]

    evaluate(params, tmp_path, tasks=["needle_docs"], policies=[POLICY, ShadowKV(rank=4, budget=32)])
    assert ran[6:] == [2, 2]  # the new setting and its control
    other = Params(init_params(CONFIG, seed=2).weights, CONFIG, params.tokenizer)
    evaluate(other, tmp_path, tasks=["needle_docs"], samples=1)
    assert ran[8:] == [3]  # other weights share nothing


BAD_RUNS: list[dict[str, Any]] = [
    {"tasks": []},
    {"tasks": ["what"]},
    {"tasks": "needle_docs"},
    {"lengths": []},
    {"lengths": [8]},
    {"lengths": [5000]},
    {"lengths": [True]},
    {"policies": []},
    {"policies": [ShadowKV(rank=999)]},
    {"samples": 0},
    {"samples": True},
    {"fetch": "fast"},
]


@pytest.mark.parametrize("change", BAD_RUNS, ids=str)
def test_bad_runs_are_refused_before_anything_runs(params: Params, tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        evaluate(params, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def test_a_model_without_tokenizer_is_refused(params: Params) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        evaluate(Params(params.weights, params.config))


@pytest.fixture(scope="module")
def model_dir(params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("eval") / "model"
    save(params, directory)
    return directory


def test_the_command_line(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["eval", str(model_dir), "--tasks", "needle_docs,agreement", "--lengths", str(LENGTH), "--samples", "2"]
    args += ["--policies", "shadowkv:rank=8:budget=32:outlier_chunks=2", "--dtype", "float32", "--out", str(tmp_path)]
    assert cli.main([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = printed["results"]
    assert [(row["task"], row["name"]) for row in rows] == [
        ("needle_docs", "full"),
        ("needle_docs", "shadowkv"),
        ("needle_docs", "streaming_llm"),
        ("agreement", "full"),
        ("agreement", "shadowkv"),
    ]
    wanted = {"task", "length", "policy", "score", "stderr", "samples", "device_bytes", "host_bytes", "full_bytes"}
    assert all(row.keys() >= wanted for row in rows)
    assert {"found", "recall_of_full", "control"} <= rows[0].keys()
    assert {"top1", "top1_stderr", "kl", "kl_stderr"} <= rows[3].keys()
    assert [entry["policy"] for entry in printed["pooled"]] == [rows[0]["policy"], rows[1]["policy"], "control"]
    lines = (tmp_path / samples.SAMPLES_FILE).read_text().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == 10
    report = (tmp_path / "report.html").read_text()
    assert all(name in report for name in ("needle_docs", "agreement", "jshadow eval", "--policies", "shadowkv"))
    assert (tmp_path / "memory_kl.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(args) == 0
    table = capsys.readouterr().out
    assert "needle_docs" in table
    assert "control:" in table
    assert len((tmp_path / samples.SAMPLES_FILE).read_text().splitlines()) == 10


BAD_ARGUMENTS = [
    ("--tasks", "x"),
    ("--tasks", ","),
    ("--lengths", "x"),
    ("--lengths", ""),
    ("--lengths", "-5"),
    ("--policies", "x"),
    ("--policies", "shadowkv:size=3"),
    ("--policies", "shadowkv:rank"),
    ("--fetch", "x"),
    ("--samples", "0"),
    ("--seed", "-1"),
]


@pytest.mark.parametrize(("option", "value"), BAD_ARGUMENTS)
def test_bad_arguments_end_with_2(model_dir: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    assert cli.main(["eval", str(model_dir), f"{option}={value}", "--dtype", "float32"]) == 2
    assert "ConfigError" in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused(params: Params, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="out"):
        evaluate(params, tmp_path / "out")
