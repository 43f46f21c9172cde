"""The adapter inside lm-evaluation-harness: its tasks, its command line, and its `hf` backend for comparison."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from lm_eval_requests import (
    SHADOWKV,
    TALE,
    requests,
    tiny_model,
)
from tiny_text import TEMPLATE, byte_tokenizer

from jshadow import save
from jshadow.errors import PromptError
from jshadow.evaluation.lm_eval import JshadowLM


@pytest.fixture(scope="module")
def params():
    return tiny_model()


def test_a_chat_is_continued_where_a_task_begins_the_answer(params):
    model = JshadowLM(params, policy="full")
    chat = [{"role": "user", "content": "Who?"}]
    assert model.apply_chat_template(chat) == "<user>Who?\n<assistant>"
    begun = [*chat, {"role": "assistant", "content": "It was"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("<assistant>It was")
    assert model.chat_template(True) == TEMPLATE
    assert isinstance(model.tokenizer_name, str)
    plain = byte_tokenizer()
    plain.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        JshadowLM(dataclasses.replace(params, tokenizer=plain)).apply_chat_template(chat)


def test_the_harness_finds_the_model_by_its_name(params, tmp_path):
    save(params, tmp_path / "model")
    told = f"pretrained={tmp_path / 'model'},policy=shadowkv,rank=8,budget=16,dtype=float32,dense_first.layers=1"
    model = get_model("jshadow").create_from_arg_string(told, {"batch_size": "2", "device": None})
    assert isinstance(model, JshadowLM)
    info = model.get_model_info()
    assert (model.scorer.policy.inner.rank, info["model_dtype"], model.scorer.batch) == (8, "float32", 2)
    assert model.scorer.policy.layers == 1
    assert json.dumps(info)


@pytest.mark.slow
@pytest.mark.process
def test_the_evaluation_imports_without_the_harness():
    code = "import sys; sys.modules['lm_eval'] = None; import jshadow.evaluation.runner, jshadow.cli"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def write_tasks(folder: Any) -> dict[str, Any]:
    """Write three tasks of different kinds as local files, so that nothing is downloaded."""
    rows = [
        {
            "text": f"{TALE}Question {index}: what did the {who} want?",
            "choices": ["bread", "a boat", "cheese and rain"],
            "label": index % 3,
        }
        for index, who in enumerate(["fox", "crow", "river"])
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "num_fewshot": 0,
    }
    metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    tasks = {
        "tiny_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": metric,
        },
        "tiny_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
            ],
        },
        "tiny_generation": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": {"max_gen_toks": 12, "until": ["\n\n"], "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **task}))
    return {"tasks": sorted(tasks), "task_manager": TaskManager(include_path=str(folder), include_defaults=False)}


@pytest.fixture
def tiny_tasks(tmp_path, monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return write_tasks(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_tasks_run_through_the_harness(params, tiny_tasks):
    model = JshadowLM(params, policy=SHADOWKV, capacity=256, batch_size=3)
    done = lm_eval.simple_evaluate(model=model, bootstrap_iters=0, **tiny_tasks)
    assert (done["config"]["jshadow_policy"], done["config"]["jshadow_capacity"]) == ("shadowkv", 256)
    first = done["samples"]["tiny_choice"][0]
    again = model.loglikelihood(requests(*first["arguments"]), disable_tqdm=True)
    assert [one[0][0] for one in first["resps"]] == pytest.approx([score for score, _ in again], abs=1e-4)
    assert done["results"]["tiny_rolling"]["word_perplexity,none"] > 1
    assert all(sample["resps"][0][0] for sample in done["samples"]["tiny_generation"])


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_full_attention_scores_as_the_hf_backend(smollm2_dir, tiny_tasks):
    """SmolLM2 in float32 and the `hf` backend in float64 give equal scores, greedy flags, windows and texts."""
    from lm_eval.models.huggingface import HFLM

    mine = JshadowLM(smollm2_dir, policy="full", dtype="float32", capacity=64, batch_size=2)
    theirs = HFLM(pretrained=str(smollm2_dir), device="cpu", dtype="float64", batch_size=1, max_length=64)
    pairs = [
        ("The capital of France is", " Paris"),
        ("The capital of France is", " a large city"),
        ("", "Once upon a time"),
        ("One, two, three,", " four, five, six"),
        (TALE, "The crow"),
        ("Trailing space ", "goes on"),
    ]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for one, other in zip(mine.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one == (pytest.approx(other[0], abs=1e-3), other[1])
    texts = [(TALE * 4,), ("A short one.",)]  # the first needs two windows
    rolling = [Instance("loglikelihood_rolling", {}, text, index) for index, text in enumerate(texts)]
    assert 64 < len(mine.tok_encode(texts[0][0])) <= 128
    assert mine.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), abs=1e-3)
    settings = {"max_gen_toks": 16, "until": [".", "\n"], "do_sample": False}
    contexts = ["The capital of France is", "One, two, three, four,", TALE]
    until = [Instance("generate_until", {}, (text, settings), index) for index, text in enumerate(contexts)]
    assert mine.generate_until(until) == theirs.generate_until(until)
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It was"}]
    assert mine.apply_chat_template(chat, False) == theirs.apply_chat_template(chat, False)
    assert mine.apply_chat_template(chat[:1]) == theirs.apply_chat_template(chat[:1])
    results = [
        lm_eval.simple_evaluate(model=model, bootstrap_iters=0, log_samples=False, **tiny_tasks)["results"]
        for model in (mine, theirs)
    ]
    for task, scores in results[0].items():
        numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
        assert numbers
        assert numbers == pytest.approx({name: results[1][task][name] for name in numbers}, abs=1e-3, rel=1e-4), task


@pytest.mark.slow
@pytest.mark.process
def test_the_command_of_the_harness(params, tmp_path):
    """A run from a shell with its results in a file, and a typed error with exit status 2."""
    write_tasks(tmp_path)
    model = tmp_path / "model"
    save(params, model)

    def run(settings: str) -> subprocess.CompletedProcess[str]:
        told = [
            "--model",
            "jshadow",
            "--model_args",
            f"pretrained={model},dtype=float32,capacity=256,{settings}",
            "--tasks",
            "tiny_choice",
            "--include_path",
            str(tmp_path),
            "--output_path",
            str(tmp_path / "out"),
        ]
        return subprocess.run(
            [sys.executable, "-m", "jshadow.evaluation.lm_eval", "run", *told],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        )

    done = run("policy=shadowkv,rank=8,budget=16,outlier_chunks=2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_choice" in done.stdout
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["config"]["jshadow_settings"]["rank"] == 8
    assert 0 <= results["results"]["tiny_choice"]["acc,none"] <= 1
    wrong = run("policy=shadowkv,rnak=8")
    assert wrong.returncode == 2
    assert "jshadow: ConfigError" in wrong.stderr
    assert "rnak" in wrong.stderr
