"""The runner of evaluations, on a tiny random model with a byte tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_cases import made_up_case
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, KVzip, ShadowKV, StreamingLLM, cli, save
from jshadow.engine import decode
from jshadow.engine.report import measured_bytes
from jshadow.errors import ConfigError
from jshadow.evaluation import cases, metrics, runner, samples, tasks
from jshadow.evaluation.settings import Setup, TaskPlan
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 2, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))
POLICY = ShadowKV(rank=8, budget=32, outlier_chunks=2)
LENGTH = 420


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, TOKENIZERS["merging"])


@pytest.fixture
def made_up_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, no model runs."""
    monkeypatch.setattr(runner, "run_case", made_up_case)


def evaluate(params: Params, out: Path | None = None, **changes: Any) -> list[dict[str, Any]]:
    options = {"tasks": ["needle_docs"], "lengths": [LENGTH], "policies": [POLICY], "samples": 2} | changes
    return runner.evaluate(params, **options, out=out)


@pytest.mark.usefixtures("made_up_here")
def test_every_table_has_full_attention_and_a_control(params):
    rows = evaluate(params, tasks=["needle_noise", "needle_docs"])
    assert [row["name"] for row in rows] == ["full", "shadowkv", "streaming_llm"] * 2
    assert [row["control_of"] is None for row in rows] == [True, True, False] * 2
    assert len({(row["task"], row["control"]) for row in rows}) == 2
    assert rows[1]["policy"] == "shadowkv:rank=8:budget=32:outlier_chunks=2" == rows[2]["control_of"]
    assert rows[0]["device_bytes"] == rows[0]["full_bytes"]
    assert rows[2]["device_bytes"] <= rows[1]["offloaded_device_bytes"] < rows[1]["device_bytes"]
    assert rows[1]["offloaded_device_bytes"] - rows[2]["device_bytes"] < 0.02 * rows[0]["full_bytes"]
    assert all(row["samples"] == 2 and 0 <= row["score"] <= 100 for row in rows)


@pytest.mark.usefixtures("made_up_here")
def test_bytes_are_those_of_a_real_state(params):
    row = evaluate(params, samples=1, fetch="device_put")[1]
    prompt = np.array([tasks.make("needle_docs", params.tokenizer, LENGTH, 0.5, 0).prompt], np.int32)
    _, state = decode.prefill(
        params, prompt, np.array([LENGTH], np.int32), POLICY, capacity=row["capacity"], fetch="device_put"
    )
    assert sum(measured_bytes(state).values()) == row["device_bytes"] + row["host_bytes"]
    assert row["host_bytes"] > 0


@pytest.mark.slow
def test_agreement_of_full_attention_with_itself_is_perfect(params):
    rows = evaluate(params, tasks=["agreement"], policies=[POLICY, ShadowKV.lossless(1024, CONFIG), StreamingLLM()])
    full, shadow, lossless, window = rows
    assert (full["top1"], full["kl"], full["kl_stderr"]) == (100.0, 0.0, 0.0)
    assert lossless["kl"] < 1e-6 < shadow["kl"]
    assert window["kl"] < 1e-6  # the window holds the whole prompt
    assert shadow["score"] == shadow["top1"] < 100
    assert all(row["control_of"] is None for row in rows)


@pytest.mark.slow
def test_every_turn_is_asked_and_answers_stay_in_the_cache(params):
    policies = [Full(), ShadowKV.lossless(2048, CONFIG)]
    rows = evaluate(params, tasks=["needle_multiturn"], policies=policies, lengths=[700])
    assert all(len(row["turns"]) == tasks.TURNS and row["asked"] == 2 * tasks.TURNS for row in rows)
    case = tasks.make("needle_multiturn", params.tokenizer, 700, 0.5, 0)
    texts = []
    for policy in policies:
        [(logits, state)] = decode.prefill_many(
            params, np.array([case.prompt]), np.array([700]), [policy], capacity=700 + case.growth
        )
        said, state = cases.answers(params, case, logits, state)
        texts.append(said)
        answered = sum(map(len, case.turns)) + tasks.TURNS * tasks.NEW_TOKENS
        assert 700 + sum(map(len, case.turns)) < int(state.lengths[0]) <= 700 + answered
    assert texts[0] == texts[1]
    assert texts[0] == by_hand(params, case)


def by_hand(params: Params, case: tasks.Case) -> list[str]:
    """Greedy answers token by token, with every question fed token by token too. It is slow, but simple."""
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


@pytest.mark.slow
def test_prefills_of_few_states_and_forgotten_programs_change_nothing(params, monkeypatch):
    """Full attention and two policies share prefills of at most two states. KVzip reads the prompt twice, by itself."""
    policies = [POLICY, KVzip(kept=200, chunk=300), StreamingLLM(window=30)]
    options: dict[str, Any] = {"tasks": ["agreement", "needle_docs"], "policies": policies, "samples": 1}
    forgotten: list[int] = []
    monkeypatch.setattr(runner.jax, "clear_caches", lambda: forgotten.append(1))
    want = evaluate(params, **options)
    assert not forgotten
    monkeypatch.setattr(cases, "MOST_TOGETHER", 2)
    monkeypatch.setattr(runner, "MOST_PROGRAMS", 1)
    got = evaluate(params, **options)
    assert len(forgotten) == 2  # before each of two tasks
    assert [row["policy"] for row in got] == [row["policy"] for row in want]
    for one, other in zip(got, want, strict=True):
        assert one["score"] == other["score"]
        assert one.get("kl", 0) == pytest.approx(other.get("kl", 0), abs=1e-6)


def records_in(folder: Path) -> list[dict[str, Any]]:
    """The records of a directory by task, sample and policy."""
    lines = (folder / samples.SAMPLES_FILE).read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda one: (one["task"], one["sample"], one["policy"]))


@pytest.mark.slow
def test_samples_that_run_together_have_the_same_records(params, tmp_path):
    """Five samples in batches of three: the second one is filled up. A task of several turns runs one at a time."""
    options: dict[str, Any] = {"tasks": ["needle_docs", "needle_multiturn"], "samples": 5, "lengths": [LENGTH + 280]}
    alone = evaluate(params, tmp_path / "alone", **options)
    assert evaluate(params, tmp_path / "together", together=3, **options) == alone
    assert records_in(tmp_path / "together") == records_in(tmp_path / "alone")
    assert evaluate(params, tmp_path / "alone", together=2, **options) == alone, "finished samples are not run again"
    with pytest.raises(ConfigError, match="together must be an integer of at least 1, got 0"):
        evaluate(params, together=0)


@pytest.mark.slow
def test_agreement_cases_that_run_together_have_the_same_records(params, tmp_path):
    """Full attention runs again for a policy that is added later, because its logits are not stored."""
    added = StreamingLLM(window=30)
    options: dict[str, Any] = {"tasks": ["agreement"], "samples": 5, "lengths": [LENGTH + 280]}
    alone, together = tmp_path / "alone", tmp_path / "together"
    evaluate(params, alone, policies=[POLICY, added], **options)
    for policies in ([POLICY], [POLICY, added]):
        evaluate(params, together, together=3, policies=policies, **options)
    want, got = records_in(alone), records_in(together)
    assert [one["key"] for one in got] == [one["key"] for one in want]
    assert len({one["kl"] for one in want}) == 5 * 2 + 1, "each sample has its own divergence, and full attention none"
    for name in ("score", "kl", "ppl", "attended_tokens"):
        assert [one[name] for one in got] == pytest.approx([one[name] for one in want], rel=1e-4, abs=1e-6)


def test_a_killed_run_goes_on_where_it_stopped(params, tmp_path, capsys, monkeypatch):
    ran: list[int] = []

    def counted(setup: Setup, plan: TaskPlan, index: int, policies: list) -> Any:
        ran.append(len(policies))
        return made_up_case(setup, plan, index, policies)

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
def test_bad_runs_are_refused_before_anything_runs(params, tmp_path, change):
    with pytest.raises(ConfigError):
        evaluate(params, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def test_a_model_without_tokenizer_is_refused(params):
    with pytest.raises(ConfigError, match="tokenizer"):
        evaluate(Params(params.weights, params.config))


@pytest.fixture(scope="module")
def model_dir(params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("eval") / "model"
    save(params, directory)
    return directory


@pytest.mark.usefixtures("made_up_here")
def test_the_command_prints_rows_and_a_table(model_dir, capsys):
    args = ["eval", str(model_dir), "--tasks", "needle_docs,agreement", "--lengths", str(LENGTH), "--samples", "2"]
    args += ["--policies", "shadowkv:rank=8:budget=32:outlier_chunks=2", "--dtype", "float32"]
    assert cli.main([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = ["full", "shadowkv", "streaming_llm", "full", "shadowkv"]
    assert [row["name"] for row in printed["results"]] == names
    assert [entry["policy"] for entry in printed["pooled"]][2] == "control"
    assert cli.main(args) == 0
    table = capsys.readouterr().out
    assert "needle_docs" in table
    assert "control:" in table


@pytest.mark.slow
def test_the_command_line(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jshadow.cli.progress.LINE_SECONDS", 0.01)  # compiling takes longer
    args = ["eval", str(model_dir), "--tasks", "needle_docs,agreement", "--lengths", str(LENGTH), "--samples", "2"]
    args += ["--policies", "shadowkv:rank=8:budget=32:outlier_chunks=2", "--dtype", "float32", "--out", str(tmp_path)]
    assert cli.main([*args, "--json"]) == 0
    captured = capsys.readouterr()
    assert "jshadow: evaluating" in captured.err
    printed = json.loads(captured.out)
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
def test_bad_arguments_end_with_2(model_dir, capsys, option, value):
    assert cli.main(["eval", str(model_dir), f"{option}={value}", "--dtype", "float32"]) == 2
    assert "ConfigError" in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused(params, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="out"):
        evaluate(params, tmp_path / "out")


def test_the_perplexity_of_an_agreement_is_that_of_its_text(params):
    """And a policy that holds the whole prompt agrees with full attention."""
    case = tasks.sample_of("agreement", params.tokenizer, LENGTH, 0, 1, 0)[0]
    row, window = evaluate(params, tasks=["agreement"], policies=[StreamingLLM()], samples=1)
    ids = np.array([[*case.prompt, *case.forced]], np.int32)
    logits, _ = decode.prefill(params, ids, np.array([ids.shape[1]]), Full(), capacity=ids.shape[1], logits="all")
    wanted = metrics.perplexity(np.asarray(logits)[0, LENGTH - 1 : -1], np.array(case.forced))
    assert row["ppl"] == pytest.approx(wanted, rel=1e-4)
    assert (row["top1"], row["kl"], row["kl_stderr"]) == (100.0, 0.0, None)
    assert window["kl"] < 1e-6
