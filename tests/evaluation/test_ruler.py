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
from evaluations import records_of, tiny
from ruler_package import SIZES, write_package
from tiny_text import byte_tokenizer

from jshadow import Full, StreamingLLM, cli, save
from jshadow.errors import ConfigError
from jshadow.evaluation import runner
from jshadow.evaluation.parts import evaluate_part
from jshadow.evaluation.plan import EvalSettings
from jshadow.evaluation.scorers import score
from jshadow.evaluation.tasks import TASKS, ruler
from jshadow.ops.parts import Part
from jshadow.weights.params import load_tokenizer
from jshadow.weights.tokenizer import encode, opening

TOKENIZER = byte_tokenizer()
LENGTH = 700
SOME = ["ruler_vt", "ruler_fwe"]
pytestmark = pytest.mark.usefixtures("made_up")  # the model is asked in test_tasks.py


def forget_package() -> None:
    """Remove the modules of the package, so that another one can be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == ruler.MODULE]:
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


def cases_at(tasks: Any, seed: Any = 0, tokenizer: Any = TOKENIZER, length: int = LENGTH) -> Any:
    return ruler.cases_at(tasks, tokenizer, length, 2, seed)


def test_the_names_are_told_apart_from_ours():
    assert len(ruler.RULER_TASKS) == 13 == len(set(ruler.RULER_TASKS))
    assert not set(ruler.RULER_TASKS) & set(TASKS)
    assert {name.removeprefix("ruler_") for name in ruler.RULER_TASKS} <= set(TASKS)


def test_every_task_fits_and_follows_its_seed(root):
    made = cases_at(ruler.RULER_TASKS)
    assert list(made) == list(ruler.RULER_TASKS)
    sizes = dict(zip(("niah", "vt", "cwe", "fwe", "qa"), SIZES.values(), strict=True))
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
    assert cases_at(SOME) == {task: made[task] for task in SOME}
    other = cases_at(SOME, seed=1)
    assert all(other[task][0].samples[0].answers != made[task][0].samples[0].answers for task in SOME)
    longest = cases_at(["ruler_vt"], length=1024)
    assert len(longest["ruler_vt"][0].prompt) + 30 <= 1024


def test_scores_are_those_of_the_package(root, params, tmp_path):
    tasks, out = ["ruler_vt", "ruler_qa_1", "passkey"], tmp_path / "out"
    given = (params, tasks, [LENGTH], [Full(), StreamingLLM()])
    options: dict[str, Any] = {"samples": 2, "fetch": "resident", "out": out}
    rows = runner.evaluate(*given, **options)
    assert [row["task"] for row in rows] == [task for task in tasks for _ in range(2)]
    assert [row["capacity"] for row in rows[:4]] == [LENGTH] * 4
    records = records_of(out)
    assert runner.evaluate(*given, **options) == rows
    assert len(records_of(out)) == len(records) == 12
    scorers = importlib.import_module(f"{ruler.MODULE}.eval.synthetic.constants").TASKS
    for row in rows[:4]:
        own = [one for one in records if (one["task"], one["policy"]) == (row["task"], row["policy"])]
        scorer = scorers["qa" if "qa" in row["task"] else "variable_tracking"]["metric_fn"]
        theirs = scorer([one["outputs"][0] for one in own], [one["answers"][0] for one in own])
        assert row["score"] == pytest.approx(theirs, abs=0.005)
    shared = runner.evaluate(params, ["ruler_vt", "passkey"], [LENGTH], [StreamingLLM()], samples=1, shares=[0.5])
    assert len({row["capacity"] for row in shared}) == 1  # a table of shares has one
    assert shared[0]["capacity"] > LENGTH


def test_the_command_takes_a_suite(root, params, tmp_path, capsys):
    save(params, tmp_path / "model")
    args = ["eval", str(tmp_path / "model"), "--policies", "full", "--samples", "1", "--dtype", "float32", "--json"]
    assert cli.main([*args, "--suite", "ruler", "--tasks", "passkey", "--lengths", str(LENGTH)]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["task"] for row in rows] == ["passkey", *ruler.RULER_TASKS]
    for bad, message in ((["--suite", "longbench"], "suite must be"), (["--suite", "ruler"], "context=2048")):
        assert cli.main([*args, *bad]) == 2
        assert message in capsys.readouterr().err


# Refusals


@pytest.fixture
def refused(params):
    """Checks that an evaluation is refused with a message."""

    def refused(match: str, tasks: tuple[str, ...] = ("ruler_niah_single_2",), length: int = LENGTH) -> None:
        with pytest.raises(ConfigError, match=match):
            runner.evaluate(params, list(tasks), [length], [Full()], samples=1)

    return refused


def test_a_missing_package_and_another_version_are_told(refused, tmp_path, monkeypatch, capsys):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", version)
        refused(r"pip install 'jshadow\[ruler\]'")
        assert cli.main(["eval", "no_such_model", "--suite", "ruler"]) == 2  # before the model loads
        assert "pip install 'jshadow[ruler]'" in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "package", "25.1")))
    refused(r"must have the version 26\.3, got 25\.1")


def test_missing_data_and_a_failing_script_are_told(root, refused, monkeypatch):
    folder = root / ruler.MODULE / "data" / "synthetic"
    (folder / "qa.py").write_text("raise ValueError('broken script')")
    refused("ruler_qa_1: ValueError: broken script", ("ruler_qa_1",))
    (folder / "json" / "squad.json").unlink()
    refused(r"ruler_qa_1 needs the file .*squad\.json", ("passkey", "ruler_qa_1"))
    (folder / "variable_tracking.py").unlink()
    refused(r"ruler_vt needs the file .*variable_tracking\.py", ("ruler_vt",))
    monkeypatch.setattr(nltk.data, "path", [])
    refused("ruler_niah_single_2 needs .*python -m nltk.downloader punkt_tab")
    (root / ruler.MODULE / "synthetic.yaml").write_text("{}")
    refused("cannot be read")
    monkeypatch.setattr(ruler, "NEEDED", ("no_such_module",))
    refused("no_such_module")


def test_lengths_tokenizers_and_seeds_out_of_range_are_refused(root, refused):
    refused("context=2048.*2049", length=2049)
    refused("at least 512", length=511)
    refused("ruler_vt.*not all of 1 samples fit", ("ruler_vt",), 599)
    for given in ({"tokenizer": None}, {"seed": -1}, {"seed": True}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            cases_at(["ruler_vt"], **given)


def test_results_of_another_model_are_refused(root, params, tmp_path):
    out, part = tmp_path / "out", Part(1, 1)

    def planned(params: Any, task: str) -> Any:
        return runner.plan_evaluation(params, [task], [LENGTH], [Full()], EvalSettings(samples=1))

    runner.evaluate(params, ["passkey"], [LENGTH], [Full()], samples=1, out=out)
    evaluate_part(planned(params, "passkey"), part, out)
    before = {path: path.read_bytes() for path in out.rglob("*.*") if path.is_file()}
    other = tiny(TOKENIZER, seed=2)
    with pytest.raises(ConfigError, match="out must be a directory of this model"):
        runner.evaluate(other, ["ruler_vt"], [LENGTH], [Full()], samples=1, out=out)
    with pytest.raises(ConfigError, match=f"samples of {params.digest} instead of {other.digest}"):
        evaluate_part(planned(other, "ruler_vt"), part, out)
    assert {path: path.read_bytes() for path in out.rglob("*.*") if path.is_file()} == before


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
        scorers = importlib.import_module(f"{ruler.MODULE}.eval.synthetic.constants").TASKS
        answers = ["1234567", "Île de France", "ab-cd", "yes", "XQZRT", "the 10th", "New York"]
        words = [*answers, "12345", "\t", "\n", "\x01", "YES", "new york", "", " "]
        for task in ruler.read_tasks([name.removeprefix(ruler.PREFIX) for name in ruler.RULER_TASKS]):
            references, outputs = [], []
            for _ in range(200):
                references.append(tuple(rng.choices(answers, k=rng.randint(1, 5))))
                outputs.append(" ".join(rng.choices(words, k=rng.randint(0, 6))))
            shares = [score(task.scorer, *pair) for pair in zip(references, outputs, strict=True)]
            theirs = scorers[task.script.stem]
            cleaned = ["".join("\n" if ord(one) < 32 else one for one in output.strip()).strip() for output in outputs]
            assert theirs["metric_fn_per_sample"](cleaned, references) == pytest.approx([100 * one for one in shares])
            assert theirs["metric_fn"](cleaned, references) == pytest.approx(100 * sum(shares) / 200, abs=0.005)

    @pytest.mark.real
    @pytest.mark.timeout(1800)
    def test_all_tasks_of_nvidia_fit(smollm2_dir):
        sizes = {"tokenizer": load_tokenizer(smollm2_dir), "length": 4096}
        made = cases_at(ruler.RULER_TASKS, **sizes)
        told = ruler.read_tasks([name.removeprefix(ruler.PREFIX) for name in ruler.RULER_TASKS])
        for task, cases in zip(told, made.values(), strict=True):
            assert len({case.prompt for case in cases}) == 2
            for case in cases:
                [sample] = case.samples
                assert sample.max_new_tokens == task.new_tokens
                assert len(case.prompt) + task.new_tokens <= 4096
                ids = [*opening(sizes["tokenizer"]), *encode(sizes["tokenizer"], sample.context)]
                assert ids == list(case.prompt)
                if task.name != "qa_2":  # some answers there are only "yes" or "no"
                    assert any(answer in sample.context for answer in sample.answers)
        assert cases_at(SOME, **sizes) == {task: made[task] for task in SOME}
        other = cases_at(SOME, seed=1, **sizes)
        assert all(other[task] != made[task] for task in SOME)
