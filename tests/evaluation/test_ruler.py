"""NVIDIA's own RULER: on a tiny package that is laid out as theirs, and on theirs where it is installed."""

import importlib
import importlib.metadata
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nltk
import pytest
from ruler_package import write_package
from tiny_text import byte_tokenizer

from jshadow import Full, StreamingLLM, cli, save
from jshadow.errors import ConfigError
from jshadow.evaluation import runner, text_metrics
from jshadow.evaluation.parts import Part
from jshadow.evaluation.parts.run import evaluate_part
from jshadow.evaluation.settings import EvalSettings
from jshadow.evaluation.tasks import TASKS, ruler
from jshadow.evaluation.tasks.framing import encode, opening
from jshadow.evaluation.tasks.ruler import package
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params, init_params, load_tokenizer

CONFIG = ModelConfig("llama", 512, 1, 16, 24, 2, 1, 8, 1e-5, 1024, eos_ids=(256,))
TOKENIZER = byte_tokenizer()
LENGTH = 700
pytestmark = pytest.mark.usefixtures("made_up")  # the model is asked in test_tasks.py


def forget_package() -> None:
    """Remove the modules of the package, so that another one can be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package.MODULE]:
        del sys.modules[name]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a tiny package of the right version, which is installed."""
    root = write_package(tmp_path / "package")
    forget_package()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(nltk.data, "path", [str(root / "nltk_data")])
    yield root
    forget_package()


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, TOKENIZER)


def test_the_names_are_told_apart_from_ours():
    assert len(ruler.RULER_TASKS) == 13 == len(set(ruler.RULER_TASKS))
    assert not set(ruler.RULER_TASKS) & set(TASKS)
    assert {name.removeprefix("ruler_") for name in ruler.RULER_TASKS} <= set(TASKS)


def test_every_task_fits_and_follows_its_seed(root):
    made = ruler.cases_at(ruler.RULER_TASKS, TOKENIZER, LENGTH, 2, 0)
    assert list(made) == list(ruler.RULER_TASKS)
    sizes = {"qa": 32, "vt": 30, "cwe": 120, "fwe": 50, "niah": 128}
    for task, cases in made.items():
        kind = task.removeprefix("ruler_").split("_")[0]
        for case in cases:
            [sample] = case.samples
            assert sample.max_new_tokens == sizes[kind] == case.growth
            assert sample.scorer == ("string_match_part" if kind == "qa" else "string_match_all")
            assert len(case.prompt) + case.growth <= LENGTH
            assert TOKENIZER.decode(case.prompt) == sample.context
            assert sample.context.startswith("Read.\n")
            assert sample.context.endswith("\nSay q. Answer:")
            assert all(answer in sample.context for answer in sample.answers)
    some = ["ruler_vt", "ruler_fwe"]
    assert ruler.cases_at(some, TOKENIZER, LENGTH, 2, 0) == {task: made[task] for task in some}
    other = ruler.cases_at(some, TOKENIZER, LENGTH, 2, 1)
    assert all(other[task][0].samples[0].answers != made[task][0].samples[0].answers for task in some)


def test_scores_are_those_of_the_package(root, params, tmp_path):
    tasks, out = ["ruler_vt", "ruler_qa_1", "passkey"], tmp_path / "out"
    options: dict[str, Any] = {"samples": 2, "fetch": "resident", "out": out}
    rows = runner.evaluate(params, tasks, [LENGTH], [Full(), StreamingLLM()], **options)
    assert [row["task"] for row in rows] == [task for task in tasks for _ in range(2)]
    assert [row["capacity"] for row in rows[:4]] == [LENGTH] * 4
    records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert runner.evaluate(params, tasks, [LENGTH], [Full(), StreamingLLM()], **options) == rows
    assert len((out / "samples.jsonl").read_text().splitlines()) == len(records) == 12
    scorers = importlib.import_module(f"{package.MODULE}.eval.synthetic.constants").TASKS
    for row in rows[:4]:
        own = [one for one in records if (one["task"], one["policy"]) == (row["task"], row["policy"])]
        scorer = scorers["qa" if "qa" in row["task"] else "variable_tracking"]["metric_fn"]
        theirs = scorer([one["outputs"][0] for one in own], [one["answers"][0] for one in own])
        assert row["score"] == pytest.approx(theirs, abs=0.005)


def test_tables_of_shares_have_one_capacity(root, params):
    rows = runner.evaluate(params, ["ruler_vt", "passkey"], [LENGTH], [StreamingLLM()], samples=1, shares=[0.5])
    assert len({row["capacity"] for row in rows}) == 1
    assert rows[0]["capacity"] > LENGTH


# Refusals


def refused(
    params: Params, match: str, tasks: tuple[str, ...] = ("ruler_niah_single_2",), length: int = LENGTH
) -> None:
    """Check that an evaluation is refused with a message."""
    with pytest.raises(ConfigError, match=match):
        runner.evaluate(params, list(tasks), [length], [Full()], samples=1)


def test_a_missing_package_is_told(params, monkeypatch, capsys):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    refused(params, r"pip install 'jshadow\[ruler\]'")
    assert cli.main(["eval", "no_such_model", "--suite", "ruler"]) == 2  # before the model loads
    assert "pip install 'jshadow[ruler]'" in capsys.readouterr().err


def test_another_version_is_refused(tmp_path, params, monkeypatch):
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "package", "25.1")))
    refused(params, r"must have the version 26\.3, got 25\.1")


def test_missing_data_is_told(root, params, monkeypatch):
    folder = root / package.MODULE / "data" / "synthetic"
    (folder / "json" / "squad.json").unlink()
    refused(params, r"ruler_qa_1 needs the file .*squad\.json", ("passkey", "ruler_qa_1"))
    (folder / "variable_tracking.py").unlink()
    refused(params, r"ruler_vt needs the file .*variable_tracking\.py", ("ruler_vt",))
    monkeypatch.setattr(nltk.data, "path", [])
    refused(params, "ruler_niah_single_2 needs .*python -m nltk.downloader punkt_tab")
    (root / package.MODULE / "synthetic.yaml").write_text("{}")
    refused(params, "cannot be read")
    monkeypatch.setattr(package, "NEEDED", ("no_such_module",))
    refused(params, "no_such_module")


def test_lengths_out_of_range_are_refused(root, params):
    refused(params, "context=1024.*1025", length=1025)
    refused(params, "at least 512", length=511)
    refused(params, "ruler_vt.*not all of 1 samples fit", ("ruler_vt",), 599)
    cases = ruler.cases_at(["ruler_vt"], TOKENIZER, 1024, 1, 0)
    assert len(cases["ruler_vt"][0].prompt) + 30 <= 1024


def test_a_failing_script_is_told(root):
    (root / package.MODULE / "data" / "synthetic" / "qa.py").write_text("raise ValueError('broken script')")
    with pytest.raises(ConfigError, match="ruler_qa_1: ValueError: broken script"):
        ruler.cases_at(["ruler_qa_1"], TOKENIZER, LENGTH, 1, 0)
    for tokenizer, seed in ((None, 0), (TOKENIZER, -1), (TOKENIZER, True)):
        with pytest.raises(ConfigError, match=r"tokenizer|seed"):
            ruler.cases_at(["ruler_vt"], tokenizer, LENGTH, 1, seed)


def test_results_of_another_model_are_refused(root, params, tmp_path):
    out, part = tmp_path / "out", Part(1, 1)
    runner.evaluate(params, ["passkey"], [LENGTH], [Full()], samples=1, out=out)
    evaluate_part(runner.plan_evaluation(params, ["passkey"], [LENGTH], [Full()], EvalSettings(samples=1)), part, out)
    before = {path: path.read_bytes() for path in out.rglob("*.*") if path.is_file()}
    other = Params(init_params(CONFIG, seed=2).weights, CONFIG, TOKENIZER)
    with pytest.raises(ConfigError, match="out must be a directory of this model"):
        runner.evaluate(other, ["ruler_vt"], [LENGTH], [Full()], samples=1, out=out)
    evaluation = runner.plan_evaluation(other, ["ruler_vt"], [LENGTH], [Full()], EvalSettings(samples=1))
    with pytest.raises(ConfigError, match=f"samples of {params.digest} instead of {other.digest}"):
        evaluate_part(evaluation, part, out)
    assert {path: path.read_bytes() for path in out.rglob("*.*") if path.is_file()} == before


def test_the_command_takes_a_suite(root, params, tmp_path, capsys):
    save(params, tmp_path / "model")
    args = ["eval", str(tmp_path / "model"), "--policies", "full", "--samples", "1", "--dtype", "float32", "--json"]
    assert cli.main([*args, "--suite", "ruler", "--tasks", "passkey", "--lengths", str(LENGTH)]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["task"] for row in rows] == ["passkey", *ruler.RULER_TASKS]
    for bad, message in ((["--suite", "longbench"], "suite must be"), (["--suite", "ruler"], "context=1024")):
        assert cli.main([*args, *bad]) == 2
        assert message in capsys.readouterr().err


# NVIDIA's package


def real_package() -> bool:
    """Return whether NVIDIA's package and all data of its tasks are installed."""
    try:
        ruler.check_tasks(ruler.RULER_TASKS)
    except ConfigError:
        return False
    return True


if real_package():

    def test_scores_of_random_outputs_are_nvidia_s():
        rng = random.Random(0)
        scorers = importlib.import_module(f"{package.MODULE}.eval.synthetic.constants").TASKS
        answers = ["1234567", "Île de France", "ab-cd", "yes", "XQZRT", "the 10th", "New York"]
        for task in package.read_tasks([name.removeprefix(ruler.PREFIX) for name in ruler.RULER_TASKS]):
            references, outputs = [], []
            for _ in range(200):
                references.append(tuple(rng.choices(answers, k=rng.randint(1, 5))))
                words = rng.choices(
                    [*answers, "12345", "\t", "\n", "\x01", "YES", "new york", "", " "], k=rng.randint(0, 6)
                )
                outputs.append(" ".join(words))
            shares = [text_metrics.score(task.scorer, *pair) for pair in zip(references, outputs, strict=True)]
            theirs = scorers[task.script.stem]
            cleaned = ["".join("\n" if ord(one) < 32 else one for one in output.strip()).strip() for output in outputs]
            assert theirs["metric_fn_per_sample"](cleaned, references) == pytest.approx([100 * one for one in shares])
            assert theirs["metric_fn"](cleaned, references) == pytest.approx(100 * sum(shares) / 200, abs=0.005)

    @pytest.mark.real
    @pytest.mark.timeout(1800)
    def test_all_tasks_of_nvidia_fit(smollm2_dir):
        tokenizer = load_tokenizer(smollm2_dir)
        made = ruler.cases_at(ruler.RULER_TASKS, tokenizer, 4096, 2, 0)
        told = package.read_tasks([name.removeprefix(ruler.PREFIX) for name in ruler.RULER_TASKS])
        for task, cases in zip(told, made.values(), strict=True):
            assert len({case.prompt for case in cases}) == 2
            for case in cases:
                [sample] = case.samples
                assert sample.max_new_tokens == task.new_tokens
                assert len(case.prompt) + task.new_tokens <= 4096
                assert [*opening(tokenizer), *encode(tokenizer, sample.context)] == list(case.prompt)
                if task.name != "qa_2":  # some answers there are only "yes" or "no"
                    assert any(answer in sample.context for answer in sample.answers)
        some = ["ruler_vt", "ruler_fwe"]
        assert ruler.cases_at(some, tokenizer, 4096, 2, 0) == {task: made[task] for task in some}
        other = ruler.cases_at(some, tokenizer, 4096, 2, 1)
        assert all(other[task] != made[task] for task in some)
