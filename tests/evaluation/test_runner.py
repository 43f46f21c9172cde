"""The runner of evaluations on a tiny random model, and the prompts of an evaluation in a file."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import CONFIG, made_up_cases, records_of, tiny
from tokenizers_by_kind import TOKENIZERS

from jshadow import Full, KVzip, ShadowKV, StreamingLLM, cli, save
from jshadow.engine import decode
from jshadow.engine.report import measured_bytes
from jshadow.errors import ConfigError
from jshadow.evaluation import metrics, plan, runner, tasks
from jshadow.evaluation.plan import EvalSettings
from jshadow.evaluation.runner import plan_evaluation
from jshadow.evaluation.tasks import Case, Sample, ruler
from jshadow.evaluation.tasks.needles import NEW_TOKENS, TURNS
from jshadow.weights.params import Params

POLICY = ShadowKV(rank=8, budget=32, outlier_chunks=2)
LENGTH = 420


@pytest.fixture(scope="module")
def params() -> Params:
    return tiny(TOKENIZERS["merging"])


@pytest.fixture(scope="module")
def model_dir(params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save(params, directory := tmp_path_factory.mktemp("eval") / "model")
    return directory


@pytest.fixture
def made_up_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, no model runs."""
    monkeypatch.setattr(runner, "run_cases", made_up_cases)


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
    sizes = {"capacity": row["capacity"], "fetch": "device_put"}
    _, state = decode.prefill(params, prompt, np.array([LENGTH], np.int32), POLICY, **sizes)
    assert sum(measured_bytes(state).values()) == row["device_bytes"] + row["host_bytes"]
    assert row["host_bytes"] > 0


@pytest.mark.slow
def test_every_turn_is_asked_and_answers_stay_in_the_cache(params):
    policies = [Full(), ShadowKV.lossless(2048, CONFIG)]
    case = tasks.make("needle_multiturn", params.tokenizer, 700, 0.5, 0)
    prompt, texts = (np.array([case.prompt]), np.array([700])), []
    for policy in policies:
        [(logits, state)] = decode.prefill_many(params, *prompt, [policy], capacity=700 + case.growth)
        said, state = runner.answers(params, case, logits, state)
        texts.append(said)
        answered = sum(map(len, case.turns)) + TURNS * NEW_TOKENS
        assert 700 + sum(map(len, case.turns)) < int(state.lengths[0]) <= 700 + answered
    # by hand: greedy answers token by token, with every question fed token by token too
    logits, state = decode.prefill(params, *prompt, Full(), capacity=700 + case.growth)
    wanted = []
    for question in [*case.turns, ()]:
        said = []
        while len(said) < NEW_TOKENS and (token := int(np.asarray(logits)[0].argmax())) not in CONFIG.eos_ids:
            said.append(token)
            logits, state = decode.decode_step(params, np.array([token]), state)
        wanted.append(params.tokenizer.decode(said))
        for token in question:
            logits, state = decode.decode_step(params, np.array([token]), state)
    assert texts == [wanted, wanted]


@pytest.mark.slow
def test_prefills_of_few_states_and_forgotten_programs_change_nothing(params, monkeypatch):
    """Prefills are shared by at most two states. KVzip reads the prompt twice, by itself."""
    policies = [POLICY, KVzip(kept=200, chunk=300)]
    options: dict[str, Any] = {"tasks": ["agreement", "needle_docs"], "policies": policies, "samples": 1}
    forgotten: list[int] = []
    monkeypatch.setattr(runner.jax, "clear_caches", lambda: forgotten.append(1))
    want = evaluate(params, **options)
    assert not forgotten
    monkeypatch.setattr(runner, "MOST_TOGETHER", 2)
    monkeypatch.setattr(runner, "MOST_PROGRAMS", 1)
    got = evaluate(params, **options)
    assert len(forgotten) == 2  # before each of two tasks
    assert [row["policy"] for row in got] == [row["policy"] for row in want]
    for one, other in zip(got, want, strict=True):
        assert one["score"] == other["score"]
        assert one.get("kl", 0) == pytest.approx(other.get("kl", 0), abs=1e-6)


def sorted_records(folder: Path) -> list[dict[str, Any]]:
    return sorted(records_of(folder), key=lambda one: (one["task"], one["sample"], one["policy"]))


@pytest.mark.slow
def test_samples_that_run_together_have_the_same_records(params, tmp_path):
    """Three samples in batches of two: the second one is filled up. A task of several turns runs one at a time."""
    options: dict[str, Any] = {"tasks": ["needle_docs", "needle_multiturn"], "samples": 3, "lengths": [LENGTH + 280]}
    alone = evaluate(params, tmp_path / "alone", **options)
    assert all(len(row["turns"]) == TURNS and row["asked"] == 3 * TURNS for row in alone[len(alone) // 2 :])
    assert evaluate(params, tmp_path / "together", together=2, **options) == alone
    assert sorted_records(tmp_path / "together") == sorted_records(tmp_path / "alone")
    assert evaluate(params, tmp_path / "alone", together=3, **options) == alone, "finished samples are not run again"


@pytest.mark.slow
def test_agreement_cases_that_run_together_have_the_same_records(params, tmp_path):
    """Full attention runs again for a policy that is added later, because its logits are not stored."""
    added = StreamingLLM(window=30)
    options: dict[str, Any] = {"tasks": ["agreement"], "samples": 3, "lengths": [LENGTH + 280]}
    alone, together = tmp_path / "alone", tmp_path / "together"
    evaluate(params, alone, policies=[POLICY, added], **options)
    for policies in ([POLICY], [POLICY, added]):
        evaluate(params, together, together=2, policies=policies, **options)
    want, got = sorted_records(alone), sorted_records(together)
    assert [one["key"] for one in got] == [one["key"] for one in want]
    assert len({one["kl"] for one in want}) == 3 * 2 + 1, "each sample has its own divergence, and full attention none"
    for name in ("score", "kl", "ppl", "attended_tokens"):
        assert [one[name] for one in got] == pytest.approx([one[name] for one in want], rel=1e-4, abs=1e-6)


def test_a_killed_run_goes_on_where_it_stopped(params, tmp_path, capsys, monkeypatch):
    ran: list[int] = []
    monkeypatch.setattr(runner, "run_cases", lambda *given: ran.append(len(given[3])) or made_up_cases(*given))
    both = ["needle_docs", "agreement"]
    first = evaluate(params, tmp_path, tasks=both)
    assert ran == [3, 3, 2, 2]
    assert evaluate(params, tmp_path, tasks=both) == first
    assert len(ran) == 4, "a finished run computes nothing"

    file = tmp_path / runner.SAMPLES_FILE
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
    evaluate(tiny(params.tokenizer, seed=2), tmp_path, tasks=["needle_docs"], samples=1)
    assert ran[8:] == [3]  # other weights share nothing


BAD_RUNS: list[dict[str, Any]] = [
    *({"tasks": tasks} for tasks in ([], ["what"], "needle_docs")),
    *({"lengths": lengths} for lengths in ([], [8], [5000], [True])),
    *({"policies": policies} for policies in ([], [ShadowKV(rank=999)])),
    *({"samples": samples} for samples in (0, True)),
    {"fetch": "fast"},
    {"together": 0},
    # local data: no list of files, options without data, a file that is not there, nothing at all
    *({"tasks": [], "lengths": [], **more} for more in ({"data": "x.jsonl"}, {"truncate": "middle"}, {"limit": 3}, {})),
    {"tasks": [], "lengths": [], "data": ["none.jsonl"]},
]


@pytest.mark.parametrize("change", BAD_RUNS, ids=str)
def test_bad_runs_are_refused_before_anything_runs(params, tmp_path, change):
    with pytest.raises(ConfigError):
        evaluate(params, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def test_a_model_without_tokenizer_and_an_out_that_is_a_file_are_refused(params, tmp_path):
    (tmp_path / "out").write_text("")
    for model, told in ((Params(params.weights, params.config), "tokenizer"), (params, "out")):
        with pytest.raises(ConfigError, match=told):
            evaluate(model, tmp_path / "out")


@pytest.mark.usefixtures("made_up_here")
def test_the_command_prints_rows_and_a_table_and_writes_records_and_results(model_dir, tmp_path, capsys):
    args = ["eval", str(model_dir), "--tasks", "needle_docs,agreement", "--lengths", str(LENGTH), "--samples", "2"]
    args += ["--policies", "shadowkv:rank=8:budget=32:outlier_chunks=2", "--dtype", "float32", "--out", str(tmp_path)]
    assert cli.main([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = printed["results"]
    assert [row["task"] for row in rows] == ["needle_docs"] * 3 + ["agreement"] * 2
    assert [row["name"] for row in rows] == ["full", "shadowkv", "streaming_llm", "full", "shadowkv"]
    wanted = {"task", "length", "policy", "score", "stderr", "samples", "device_bytes", "host_bytes", "full_bytes"}
    assert all(row.keys() >= wanted for row in rows)
    assert {"found", "recall_of_full", "control"} <= rows[0].keys()
    assert {"top1", "top1_stderr", "kl", "kl_stderr"} <= rows[3].keys()
    assert [entry["policy"] for entry in printed["pooled"]] == [rows[0]["policy"], rows[1]["policy"], "control"]
    assert cli.main(args) == 0
    table = capsys.readouterr().out
    assert "needle_docs" in table
    assert "control:" in table
    records = records_of(tmp_path)  # the second run computed nothing
    assert len({record["key"] for record in records}) == len(records) == 10
    written = json.loads((tmp_path / "results.json").read_text())
    assert written.items() >= printed.items()
    assert written["command"][:2] == ["jshadow", "eval"]
    assert written["machine"]["platform"] == "cpu"


BAD_ARGUMENTS = ["--tasks=x", "--tasks=,", "--lengths=x", "--lengths=", "--lengths=-5", "--policies=x"]
BAD_ARGUMENTS += ["--policies=shadowkv:size=3", "--policies=shadowkv:rank", "--fetch=x", "--samples=0", "--seed=-1"]


@pytest.mark.parametrize("option", BAD_ARGUMENTS)
def test_bad_arguments_end_with_2(model_dir, capsys, option):
    assert cli.main(["eval", str(model_dir), option, "--dtype", "float32"]) == 2
    assert "ConfigError" in capsys.readouterr().err


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


# Tasks with depths, forced tokens, turns, independent questions and several answers.
TASKS = ["needle_docs", "agreement", "needle_multiturn", "niah_multiquery_apart", "fwe", "text_to_json"]


@pytest.fixture
def planned(params, tmp_path):
    """Plans of evaluations, which are not run. The file of prompts is `planned.file`."""

    def planned(tasks, lengths, params=params, **settings: Any):
        asked = EvalSettings(**{"samples": 2} | settings)
        return plan_evaluation(params, tasks, lengths, [Full(), StreamingLLM()], asked).plans

    planned.file = tmp_path / "prompts.json.gz"
    return planned


def never(*_: Any) -> None:
    raise AssertionError("no case may be made")


def test_the_cases_of_a_file_are_those_that_were_made(planned, monkeypatch):
    file, want = planned.file, planned(TASKS, [800, 900])
    assert planned(TASKS, [800, 900], cases=file) == want
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(plan, "sample_of", never)
    assert planned(TASKS, [800, 900], cases=file) == want
    assert planned(TASKS[:1], [900], cases=str(file)) == planned(TASKS, [900], cases=file)[:1]


@pytest.mark.usefixtures("made_up")
def test_the_file_replaces_the_package_of_ruler(params, planned, tmp_path, monkeypatch, capsys):
    file, name = planned.file, "ruler_vt"
    sample = Sample("", "text", "", ("one", "two"), 8, "string_match_all")
    made = {name: [Case((sample,), tuple(range(300))), Case((sample,), tuple(range(290)))]}
    with monkeypatch.context() as patch:
        patch.setattr(ruler, "check_tasks", lambda *_: None)
        patch.setattr(ruler, "cases_at", lambda *_: made)
        want = planned([name], [512], cases=file)
    monkeypatch.setattr(ruler, "cases_at", never)
    assert planned([name], [512], cases=file) == want
    assert [list(case.prompt) for case in want[0].cases] == [list(range(300)), list(range(290))]
    save(params, tmp_path / "model")
    words = ["eval", str(tmp_path / "model"), "--tasks", name, "--lengths", "512", "--samples", "2"]
    assert cli.main([*words, "--policies", "full", "--cases", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["task"] == name


def test_a_file_that_does_not_fit_is_refused_and_not_changed(params, planned):
    asked, file = {"tasks": ["needle_docs"], "lengths": [700], "cases": planned.file}, planned.file
    planned(**asked)
    before = file.read_bytes()
    for message, changes in {
        "with seed=5, got 0": {"seed": 5},
        "with samples=3, got 2": {"samples": 3},
        "with tokenizer=": {"params": dataclasses.replace(params, tokenizer=TOKENIZERS["plain"])},
        "with needle_docs at 800 tokens": {"lengths": [700, 800]},
        "with agreement at 700 tokens": {"tasks": ["needle_docs", "agreement"]},
        "cases must be a file that can be written": {"cases": file.parent / "missing" / file.name},
    }.items():
        with pytest.raises(ConfigError, match=message):
            planned(**asked | changes)
    assert file.read_bytes() == before
    content = json.loads(gzip.decompress(before))
    content["cases"]["700"]["needle_docs"][0][0].pop("prompt")
    for damaged in (before[:-9], b"", b"text", gzip.compress(b"[]"), gzip.compress(json.dumps(content).encode())):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cases must be a file that --cases wrote"):
            planned(**asked)
        assert file.read_bytes() == damaged
