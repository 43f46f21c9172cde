"""The adapter of lm-evaluation-harness: its scores in plain ways, its tasks, its command, and the `hf` backend."""

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import lm_eval
import numpy as np
import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from tiny_text import TEMPLATE, byte_tokenizer

from jshadow import Full, ShadowKV, StreamingLLM, generate, save, save_fitted
from jshadow.engine import decode
from jshadow.engine.sampling import Sampler
from jshadow.errors import CapacityError, ConfigError, PromptError
from jshadow.evaluation import likelihood
from jshadow.evaluation.lm_eval import JshadowLM, parse_generation
from jshadow.models.config import ModelConfig
from jshadow.policies import Loki
from jshadow.weights.params import init_params

CONFIG = ModelConfig("llama", 257, 1, 32, 48, 4, 2, 16, 1e-5, 256, eos_ids=(256,))
PARAMS = dataclasses.replace(init_params(CONFIG, seed=1), tokenizer=byte_tokenizer())
ENCODE = PARAMS.tokenizer.encode
SHADOWKV = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
POLICIES = {"full": Full(), "shadowkv": SHADOWKV, "streaming_llm": StreamingLLM(sinks=2, window=12)}
END = 256
WIDTH = 160  # of all texts that are scored plainly
TALE = "A fox and a crow sat by the river; neither of them had eaten, and it rained until the evening came. "


def lm(policy: Any = "full", **settings: Any) -> JshadowLM:
    return JshadowLM(PARAMS, policy=policy, **{"capacity": 256} | settings)


def requests(*pairs: Any) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


def scores(model: JshadowLM, *pairs: Any) -> list[tuple[float, bool]]:
    return model.loglikelihood(requests(*pairs), disable_tqdm=True)


def texts(model: JshadowLM, *pairs: Any) -> list[str]:
    return model.generate_until(requests(*pairs), disable_tqdm=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def padded(ids: list[int]) -> np.ndarray:
    """A text in one width, so that all texts share programs."""
    return np.array([[*ids, *[0] * (WIDTH - len(ids))]], np.int32)


def step_by_step(policy: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score a continuation with a prefill of one row, and one decode step for each token."""
    logits, state = decode.prefill(PARAMS, padded(context), [len(context)], policy, capacity=256, fetch="resident")
    total, greedy = 0.0, True
    for token in continuation:
        row = np.asarray(logits)[0]
        total += log_softmax(row)[token]
        greedy &= int(row.argmax()) == token
        logits, state = decode.decode_step(PARAMS, np.array([token]), state)
    return total, greedy


def all_logits(ids: list[int]) -> np.ndarray:
    """The logits after each token, from one prefill of the whole text."""
    logits, _ = decode.prefill(PARAMS, padded(ids), [len(ids)], Full(), capacity=256, logits="all")
    return np.asarray(logits)[0, : len(ids)]


def plainly(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score a continuation with `all_logits`."""
    rows = all_logits(context + continuation)[len(context) - 1 : -1]
    at = np.arange(len(continuation))
    return log_softmax(rows)[at, continuation].sum(), bool((rows.argmax(-1) == continuation).all())


@functools.cache
def greedy_ids(text: str) -> list[int]:
    """The 16 tokens that the tiny model with full attention says after a text."""
    ids = ENCODE(text)
    for _ in range(16):
        ids.append(int(all_logits(ids)[-1].argmax()))
    return ids[-16:]


# Log-likelihoods

TALES = [(TALE, " yes"), (TALE, " n"), (TALE, " perhaps not at all, said the crow")]
PAIRS = [*TALES, ("Rain", "y days"), ("", "Once upon"), ("Rain", " coat")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("full", 1), ("shadowkv", 3)])
def test_loglikelihoods_are_those_of_single_steps(name, batch):
    got = scores(lm(POLICIES[name], batch_size=batch), *PAIRS)
    for (context, continuation), (score, greedy) in zip(PAIRS, got, strict=True):
        ids, more = ENCODE(context) or [END], ENCODE(continuation)
        if context.endswith(" "):  # lm-eval moves the space at the end of a context to the continuation
            ids, more = ids[:-1], [ids[-1], *more]
        wanted, top = step_by_step(POLICIES[name], ids, more)
        assert score == pytest.approx(wanted, abs=1e-4)
        assert greedy is top
        if name == "full":
            plain, its = plainly(ids, more)
            assert (wanted, top) == (pytest.approx(plain, abs=1e-4), its)


@pytest.mark.slow
def test_policies_score_differently_and_greedy_ones_are_told():
    """A policy that drops tokens gives different scores, so the tests above do not compare constants."""
    ids, continuation = ENCODE(TALE), greedy_ids(TALE)[:4]
    asked = [(None, ids, continuation), (None, ids, [*continuation[:-1], (continuation[-1] + 1) % 256])]
    found = {}
    for name in ("full", "streaming_llm"):
        model = lm(POLICIES[name], batch_size=4)
        (found[name], greedy), (_, wrong) = model._loglikelihood_tokens(asked, disable_tqdm=True)
        assert greedy or name != "full"
        assert not wrong or name != "full"
    assert found["full"] != pytest.approx(found["streaming_llm"], abs=1e-3)


@pytest.mark.slow
def test_offloaded_scores_are_the_resident_ones_and_near_lengths_share_compiled_programs():
    asked, near = [(TALE + "one", " two three"), ("Short", "er")], [(TALE + "two ha", " three"), ("A bit", " longer")]
    models = [lm(SHADOWKV, batch_size=3, fetch=fetch) for fetch in ("resident", "device_put")]
    resident, offloaded = (scores(model, *asked) for model in models)
    assert [score for score, _ in offloaded] == pytest.approx([score for score, _ in resident], abs=1e-4)
    assert [greedy for _, greedy in offloaded] == [greedy for _, greedy in resident]
    before = likelihood.forced_scores._cache_size()
    scores(models[0], *near)
    assert likelihood.forced_scores._cache_size() == before


def test_widths_are_few():
    widths = sorted({likelihood.width_of(tokens, 8192) for tokens in range(1, 8193)})
    assert widths == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert [likelihood.below(width) for width in widths] == [0, *widths[:-1]]
    assert likelihood.width_of(5000, 5120) == 5120


@pytest.mark.slow
def test_learned_arrays_come_from_a_file(tmp_path):
    loki, file = Loki(budget=12, columns=3, recent=4, calibration="offline"), tmp_path / "loki.safetensors"
    arrays = loki.fit(PARAMS, np.random.default_rng(0).integers(0, 256, (1, 200)))
    save_fitted(file, arrays, loki, PARAMS)
    settings = {"policy": "loki", "budget": 12, "columns": 3, "recent": 4}
    [(score, _)] = scores(lm(**settings, fitted=str(file)), (TALE, " yes and no"))
    ids, more = ENCODE(TALE[:-1]), ENCODE("  yes and no")
    sizes = {"capacity": 256, "fetch": "resident", "fitted": arrays}
    logits, state = decode.prefill(PARAMS, np.array([ids]), np.array([len(ids)]), loki, **sizes)
    rest, _ = decode.extend(PARAMS, np.array([more[:-1]]), np.array([len(more) - 1]), state, logits="all")
    rows = np.concatenate([np.asarray(logits), np.asarray(rest)[0]])
    assert score == pytest.approx(log_softmax(rows)[np.arange(len(more)), more].sum(), abs=1e-4)
    [(plain, _)] = scores(lm(**settings), (TALE, " yes and no"))
    assert plain != pytest.approx(score, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("context_tokens", [1, 20])
def test_rolling_loglikelihoods_score_each_token_once(context_tokens):
    size, text = 48, TALE + "And so on."
    model = lm(capacity=size, rolling_context=context_tokens, batch_size=4)
    got = model.loglikelihood_rolling(requests((text,), ("",), ("Short.",)), disable_tqdm=True)
    ids, total, done = ENCODE(text), 0.0, 0
    while done < len(ids):
        before = [END] if done == 0 else ids[:done]
        part = ids[done : done + (size if done == 0 else size - context_tokens + 1)]
        total += plainly(before[-(size - (len(part) - 1)) :], part)[0]
        done += len(part)
    short = plainly([END], ENCODE("Short."))[0]
    assert got == [pytest.approx(total, abs=2e-4), 0.0, pytest.approx(short, abs=1e-4)]


@pytest.mark.slow
def test_equal_contexts_are_prefilled_once(monkeypatch):
    seen: list[int] = []
    real = decode.prefill_many
    monkeypatch.setattr(decode, "prefill_many", lambda *a, **named: seen.append(len(a[2])) or real(*a, **named))
    choices = [(f"Question {index}?", f" {answer}") for index in range(3) for answer in "abcd"]
    assert len(set(scores(lm(batch_size=4), *choices))) == 12
    assert seen == [4]  # three contexts, padded to a power of two


def test_what_is_too_long_is_an_error_or_cut_in_the_middle(caplog):
    strict, cutting = lm(capacity=64), lm(capacity=64, truncation="middle")
    pairs = [("a", "b"), (TALE[:80], "xyz")]
    scores(strict, (TALE[:62], "xyz"))  # the last token is scored, not fed
    with caplog.at_level(logging.WARNING):
        got = scores(cutting, *pairs)
    assert "1 of 2 requests were too long for max_length=64: 18 tokens were cut" in caplog.text
    ids = ENCODE(TALE[:80])
    wanted = plainly(ids[:31] + ids[-31:], ENCODE("xyz"))
    assert got[1] == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    for call, told in (
        (lambda: scores(strict, *pairs), r"at most 64 tokens .* got a context of 80 and 2 more"),
        (lambda: texts(strict, (TALE[:60], {"max_gen_toks": 5})), "a context of 60 and 5 more"),
        (lambda: scores(cutting, ("a", TALE[:100])), "got a context of 1 and 99 more"),
    ):
        with pytest.raises(CapacityError, match=told):
            call()


BAD_SETTINGS = [
    ({"rnak": 3}, "rnak"),
    ({"batch_size": "auto"}, "batch_size"),
    ({"truncation": "left"}, "truncation"),
    ({"max_batch_size": 8}, "max_batch_size"),
    ({"policy": "none"}, "policy"),
    ({"fetch": "disk"}, "fetch"),
    ({"policy": Full(), "rank": 3}, "rank"),
    ({"capacity": 64, "rolling_context": 65}, "rolling_context"),
    ({"prefill": "none"}, "prefill"),
    ({"rank": 4096}, "rank"),
]


@pytest.mark.parametrize(("settings", "name"), BAD_SETTINGS)
def test_bad_settings_are_typed_errors(settings, name):
    with pytest.raises(ConfigError, match=name):
        JshadowLM(PARAMS, **settings)


def test_a_capacity_a_model_and_a_continuation_that_are_none_are_typed_errors():
    with pytest.raises(CapacityError, match="context=256"):
        JshadowLM(PARAMS, capacity=257)
    with pytest.raises(ConfigError, match="tokenizer"):
        JshadowLM(dataclasses.replace(PARAMS, tokenizer=None))
    with pytest.raises(PromptError, match="continuation of request 1"):
        scores(JshadowLM(PARAMS), ("a", "b"), ("a", ""))


# Generations


@pytest.mark.slow
def test_generations_are_those_of_generate():
    contexts = [TALE, "Rain", TALE[1:]]
    wanted = [generate(PARAMS, one, SHADOWKV, max_new_tokens=12, capacity=256) for one in contexts]
    assert not any(one.report.fallback for one in wanted)
    got = texts(lm(SHADOWKV, batch_size=3), *[(one, {"max_gen_toks": 12}) for one in contexts])
    assert got == [one.text for one in wanted]


def test_until_strings_end_a_generation_and_are_cut_off():
    """A special token too: decoded text has none, so such a stop string is compared as a token."""
    said = greedy_ids(TALE)
    assert END not in said
    text = PARAMS.tokenizer.decode(said)
    readable = [char for char in text if char != "\ufffd"]
    assert readable, "the tiny model must say at least one whole character"
    stop = readable[-1]
    asked = [(TALE, {"max_gen_toks": 16} | more) for more in ({}, {}, {"until": [stop]}, {"until": stop})]
    assert texts(lm(batch_size=2), *asked) == [text] * 2 + [text[: text.index(stop)]] * 2
    tokenizer = byte_tokenizer()
    target = tokenizer.convert_ids_to_tokens(said[4])
    tokenizer.add_special_tokens({"additional_special_tokens": [target]})
    model = JshadowLM(dataclasses.replace(PARAMS, tokenizer=tokenizer), policy="full", capacity=256, batch_size=2)
    model.tok_encode = lambda *_, **__: ENCODE(TALE)  # the text itself may contain that byte
    got = texts(model, *[(TALE, {"max_gen_toks": 16, "until": [target]})] * 2)
    assert got == [PARAMS.tokenizer.decode(said[: said.index(said[4])])] * 2


@pytest.mark.slow
def test_sampling_does_not_depend_on_the_batch():
    settings = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.5, "top_p": 0.95}
    asked = [(text, settings) for text in (TALE, TALE[1:], TALE, TALE[2:])]
    alone = texts(lm(seed=3), *asked)
    assert texts(lm(seed=3, batch_size=4), *asked) == alone
    assert alone[0] != alone[2]  # equal requests draw different numbers
    assert texts(lm(seed=4, batch_size=4), *asked) != alone


def test_generation_settings():
    sampled = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "num_beams": 1}
    for given, most, wanted in (
        ({}, 256, (Sampler(), 256, ())),
        ({"do_sample": False, "temperature": 1, "until": "\n"}, 256, (Sampler(), 256, ("\n",))),
        ({"do_sample": True, "max_tokens": "7"}, 256, (Sampler(1.0), 7, ())),
        (sampled, 9, (Sampler(0.7, top_k=5, top_p=0.9), 9, ())),
    ):
        assert parse_generation(given, most) == wanted
    for bad, name in (
        ({"beam_width": 3}, "beam_width"),
        ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
        ({"max_gen_toks": 3, "max_tokens": 3}, "once"),
        ({"do_sample": True, "temperature": 0}, "temperature"),
        ({"temperature": 0.5, "top_p": 2}, "top_p"),
    ):
        with pytest.raises(ConfigError, match=name):
            parse_generation(bad, 256)


# The harness


def test_a_chat_is_continued_where_a_task_begins_the_answer():
    model = JshadowLM(PARAMS, policy="full")
    chat = [{"role": "user", "content": "Who?"}]
    assert model.apply_chat_template(chat) == "<user>Who?\n<assistant>"
    begun = [*chat, {"role": "assistant", "content": "It was"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("<assistant>It was")
    assert model.chat_template(True) == TEMPLATE
    assert isinstance(model.tokenizer_name, str)
    plain = byte_tokenizer()
    plain.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        JshadowLM(dataclasses.replace(PARAMS, tokenizer=plain)).apply_chat_template(chat)


def test_the_harness_finds_the_model_by_its_name(tmp_path):
    save(PARAMS, tmp_path / "model")
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
    choices = ["bread", "a boat", "cheese and rain"]
    rows = [
        {"text": f"{TALE}Question {index}: what did the {who} want?", "choices": choices, "label": index % 3}
        for index, who in enumerate(["fox", "crow", "river"])
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    source = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "num_fewshot": 0}

    def metric(name: str, aggregation: str = "mean") -> list[dict[str, Any]]:
        return [{"metric": name, "aggregation": aggregation, "higher_is_better": aggregation == "mean"}]

    choice = {"doc_to_choice": "{{choices}}", "doc_to_target": "label", "metric_list": metric("acc")}
    rolling = {"doc_to_text": "", "doc_to_target": "{{text}}"}
    rolling |= {"metric_list": metric("word_perplexity", "weighted_perplexity")}
    generation = {"doc_to_target": "{{choices[label]}}", "metric_list": metric("exact_match")}
    generation |= {"generation_kwargs": {"max_gen_toks": 12, "until": ["\n\n"], "do_sample": False}}
    tasks = {
        "tiny_choice": {"output_type": "multiple_choice", **choice},
        "tiny_rolling": {"output_type": "loglikelihood_rolling", **rolling},
        "tiny_generation": {"output_type": "generate_until", **generation},
    }
    for name, task in tasks.items():
        whole = {"task": name, **source, "doc_to_text": "{{text}}", **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return {"tasks": sorted(tasks), "task_manager": TaskManager(include_path=str(folder), include_defaults=False)}


@pytest.fixture
def tiny_tasks(tmp_path, monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return write_tasks(tmp_path)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_full_attention_scores_as_the_hf_backend(smollm2_dir, tiny_tasks):
    """SmolLM2 in float32 and the `hf` backend in float64 give equal scores, greedy flags, windows and texts."""
    from lm_eval.models.huggingface import HFLM

    mine = JshadowLM(smollm2_dir, policy="full", dtype="float32", capacity=64, batch_size=2)
    theirs = HFLM(pretrained=str(smollm2_dir), device="cpu", dtype="float64", batch_size=1, max_length=64)

    def asked(kind: str, pairs: list[Any]) -> list[Instance]:
        return [Instance(kind, {}, pair, index) for index, pair in enumerate(pairs)]

    france = "The capital of France is"
    pairs = [(france, " Paris"), (france, " a large city"), ("", "Once upon a time"), (TALE, "The crow")]
    pairs += [("One, two, three,", " four, five, six"), ("Trailing space ", "goes on")]
    both = [model.loglikelihood(asked("loglikelihood", pairs)) for model in (mine, theirs)]
    for one, other in zip(*both, strict=True):
        assert one == (pytest.approx(other[0], abs=1e-3), other[1])
    rolling = asked("loglikelihood_rolling", [(TALE * 4,), ("A short one.",)])  # the first needs two windows
    assert 64 < len(mine.tok_encode(TALE * 4)) <= 128
    assert mine.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), abs=1e-3)
    settings = {"max_gen_toks": 16, "until": [".", "\n"], "do_sample": False}
    until = asked("generate_until", [(text, settings) for text in (france, "One, two, three, four,", TALE)])
    assert mine.generate_until(until) == theirs.generate_until(until)
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It was"}]
    assert mine.apply_chat_template(chat, False) == theirs.apply_chat_template(chat, False)
    assert mine.apply_chat_template(chat[:1]) == theirs.apply_chat_template(chat[:1])
    results = [
        lm_eval.simple_evaluate(model=model, bootstrap_iters=0, log_samples=False, **tiny_tasks)["results"]
        for model in (mine, theirs)
    ]
    for task, values in results[0].items():
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        assert numbers
        assert numbers == pytest.approx({name: results[1][task][name] for name in numbers}, abs=1e-3, rel=1e-4), task


@pytest.mark.slow
@pytest.mark.process
def test_the_command_of_the_harness(tmp_path):
    """A run from a shell with its results in a file, and a typed error with exit status 2."""
    write_tasks(tmp_path)
    save(PARAMS, model := tmp_path / "model")

    def run(settings: str) -> subprocess.CompletedProcess[str]:
        given = f"pretrained={model},dtype=float32,capacity=256,{settings}"
        command = [sys.executable, "-m", "jshadow.evaluation.lm_eval", "run", "--model", "jshadow"]
        command += ["--model_args", given, "--tasks", "tiny_choice", "--include_path", str(tmp_path)]
        env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
        out = ["--output_path", str(tmp_path / "out")]
        return subprocess.run([*command, *out], capture_output=True, text=True, env=env)

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
