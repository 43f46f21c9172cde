"""The adapter of lm-evaluation-harness: against plain and single-step computation, and against its own `hf` backend."""

import dataclasses
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
from jshadow.evaluation import likelihood, likelihood_steps
from jshadow.evaluation.lm_eval import JshadowLM
from jshadow.evaluation.lm_eval_settings import parse_generation
from jshadow.models.config import ModelConfig
from jshadow.policies import Loki
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 257, 2, 32, 48, 4, 2, 16, 1e-5, 256, eos_ids=(256,))
SHADOWKV = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
POLICIES = {"full": Full(), "shadowkv": SHADOWKV, "streaming_llm": StreamingLLM(sinks=2, window=12)}
END = 256
TALE = "A fox and a crow sat by the river; neither of them had eaten, and it rained until the evening came. "


@pytest.fixture(scope="module")
def params() -> Params:
    return dataclasses.replace(init_params(CONFIG, seed=1), tokenizer=byte_tokenizer())


def requests(*pairs: Any) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def step_by_step(params: Params, policy: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Prefill alone and unpadded, then one decode step a token."""
    capacity = 256
    logits, state = decode.prefill(
        params, np.array([context]), np.array([len(context)]), policy, capacity=capacity, fetch="resident"
    )
    total, greedy = 0.0, True
    for token in continuation:
        row = np.asarray(logits)[0]
        total += log_softmax(row)[token]
        greedy &= int(row.argmax()) == token
        logits, state = decode.decode_step(params, np.array([token]), state)
    return total, greedy


def plainly(params: Params, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Logits of the whole text at once."""
    whole = np.array([context + continuation])
    logits, _ = decode.prefill(params, whole, np.array([whole.shape[1]]), Full(), capacity=256, logits="all")
    rows = np.asarray(logits)[0, len(context) - 1 : -1]
    at = np.arange(len(continuation))
    return log_softmax(rows)[at, continuation].sum(), bool((rows.argmax(-1) == continuation).all())


def greedy_ids(params: Params, text: str, count: int) -> list[int]:
    ids = params.tokenizer.encode(text)
    logits, state = decode.prefill(params, np.array([ids]), np.array([len(ids)]), Full(), capacity=256)
    first = int(np.asarray(logits).argmax())
    return [first, *np.asarray(decode.decode_steps(params, np.array([first]), state, count - 1)[0])[0].tolist()]


PAIRS = [
    (TALE, " yes"),
    (TALE, " n"),
    ("Rain", "y days"),
    (TALE, " perhaps not at all, said the crow"),
    ("", "Once upon"),
    ("Rain", " coat"),
]


@pytest.mark.parametrize(("name", "batch"), [("full", 1), ("shadowkv", 3), ("streaming_llm", 2)])
def test_loglikelihoods_are_those_of_single_steps(params, name, batch):
    model = JshadowLM(params, policy=POLICIES[name], capacity=256, batch_size=batch)
    got = model.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(PAIRS, got, strict=True):
        ids = params.tokenizer.encode(context) or [END]
        more = params.tokenizer.encode(continuation)
        if context.endswith(" "):  # lm-eval gives the space at a context's end to the continuation
            ids, more = ids[:-1], [ids[-1], *more]
        wanted, top = step_by_step(params, POLICIES[name], ids, more)
        assert score == pytest.approx(wanted, abs=1e-4)
        assert greedy is top
        if name == "full":
            plain, its = plainly(params, ids, more)
            assert (wanted, top) == (pytest.approx(plain, abs=1e-4), its)


def test_policies_score_differently_and_greedy_ones_are_told(params):
    """What the tests above compare is no constant: a policy that drops tokens gives other numbers."""
    made = {name: JshadowLM(params, policy=policy, capacity=256) for name, policy in POLICIES.items()}
    ids, continuation = params.tokenizer.encode(TALE), greedy_ids(params, TALE, 4)
    scores = {}
    for name, model in made.items():
        asked = [(None, ids, continuation), (None, ids, [*continuation[:-1], (continuation[-1] + 1) % 256])]
        (score, greedy), (_, other) = model._loglikelihood_tokens(asked, disable_tqdm=True)
        scores[name] = score
        assert greedy or name != "full"
        assert not other or name != "full"
    assert len({round(score, 3) for score in scores.values()}) == len(POLICIES)


def test_offloaded_scores_are_the_resident_ones(params):
    asked = requests((TALE + "one", " two three"), ("Short", "er"))
    resident, offloaded = (
        JshadowLM(params, policy=SHADOWKV, capacity=256, batch_size=3, fetch=fetch).loglikelihood(asked, True)
        for fetch in ("resident", "device_put")
    )
    assert [score for score, _ in offloaded] == pytest.approx([score for score, _ in resident], abs=1e-4)
    assert [greedy for _, greedy in offloaded] == [greedy for _, greedy in resident]


def test_learned_arrays_come_from_a_file(params, tmp_path):
    loki = Loki(budget=12, columns=3, recent=4, calibration="offline")
    arrays = loki.fit(params, np.random.default_rng(0).integers(0, 256, (1, 200)))
    save_fitted(tmp_path / "loki.safetensors", arrays, loki, params)
    settings = {"policy": "loki", "budget": 12, "columns": 3, "recent": 4, "capacity": 256}
    asked = requests((TALE, " yes and no"))
    ((score, _),) = JshadowLM(params, **settings, fitted=str(tmp_path / "loki.safetensors")).loglikelihood(asked, True)
    ids, more = params.tokenizer.encode(TALE[:-1]), params.tokenizer.encode("  yes and no")
    logits, state = decode.prefill(
        params, np.array([ids]), np.array([len(ids)]), loki, capacity=256, fetch="resident", fitted=arrays
    )
    rest, _ = decode.extend(params, np.array([more[:-1]]), np.array([len(more) - 1]), state, logits="all")
    rows = np.concatenate([np.asarray(logits), np.asarray(rest)[0]])
    assert score == pytest.approx(log_softmax(rows)[np.arange(len(more)), more].sum(), abs=1e-4)
    ((plain, _),) = JshadowLM(params, **settings).loglikelihood(asked, True)
    assert plain != pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("context_tokens", [1, 20])
def test_rolling_loglikelihoods_score_each_token_once(params, context_tokens):
    size, text = 48, TALE + "And so on."
    model = JshadowLM(params, policy="full", capacity=size, rolling_context=context_tokens, batch_size=2)
    got = model.loglikelihood_rolling(requests((text,), ("",), ("Short.",)), disable_tqdm=True)
    ids, total, done = params.tokenizer.encode(text), 0.0, 0
    while done < len(ids):
        before = [END] if done == 0 else ids[:done]
        count = size if done == 0 else size - context_tokens + 1
        part = ids[done : done + count]
        room = size - (len(part) - 1)
        total += plainly(params, before[-room:], part)[0]
        done += len(part)
    short = plainly(params, [END], params.tokenizer.encode("Short."))[0]
    assert got == [pytest.approx(total, abs=2e-4), 0.0, pytest.approx(short, abs=1e-4)]


def test_equal_contexts_are_prefilled_once(params, monkeypatch):
    seen: list[int] = []
    real = decode.prefill_many

    def counted(params, tokens, lengths, *args, **options):
        seen.append(len(lengths))
        return real(params, tokens, lengths, *args, **options)

    monkeypatch.setattr(decode, "prefill_many", counted)
    model = JshadowLM(params, policy="full", capacity=256, batch_size=4)
    choices = requests(*[(f"Question {index}?", f" {answer}") for index in range(3) for answer in "abcd"])
    scores = model.loglikelihood(choices, disable_tqdm=True)
    assert len(set(scores)) == 12
    assert seen == [4]  # three contexts, and one more row to make a power of two


def test_near_lengths_share_compiled_programs(params):
    model = JshadowLM(params, policy=SHADOWKV, capacity=256, batch_size=3)
    model.loglikelihood(requests((TALE + "one", " two three"), ("Short", "er")), disable_tqdm=True)
    before = likelihood_steps.forced_scores._cache_size()
    model.loglikelihood(requests((TALE + "two ha", " three"), ("A bit", " longer")), disable_tqdm=True)
    assert likelihood_steps.forced_scores._cache_size() == before
    widths = sorted({likelihood.width_of(tokens, 8192) for tokens in range(1, 8193)})
    assert widths == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert [likelihood.below(width) for width in widths] == [0, *widths[:-1]]
    assert likelihood.width_of(5000, 5120) == 5120


def test_generations_are_those_of_generate(params):
    model = JshadowLM(params, policy=SHADOWKV, capacity=256, batch_size=3)
    contexts = [TALE, "Rain", TALE[1:]]
    wanted = [generate(params, one, SHADOWKV, max_new_tokens=12, capacity=256) for one in contexts]
    assert not any(one.report.fallback for one in wanted)
    got = model.generate_until(requests(*[(one, {"max_gen_toks": 12}) for one in contexts]), disable_tqdm=True)
    assert got == [one.text for one in wanted]


def test_until_strings_end_a_generation_and_are_cut_off(params):
    model = JshadowLM(params, policy="full", capacity=256, batch_size=2)
    said = greedy_ids(params, TALE, 16)
    assert END not in said
    text = params.tokenizer.decode(said)
    readable = [char for char in text if char != "\ufffd"]
    assert readable, "the tiny model must say at least one whole character"
    stop = readable[-1]
    settings = [{"max_gen_toks": 16}, {"max_gen_toks": 16, "until": [stop]}, {"max_gen_toks": 16, "until": stop}]
    whole, cut, same = model.generate_until(requests(*[(TALE, one) for one in settings]), disable_tqdm=True)
    assert whole == text
    assert cut == same == text[: text.index(stop)]


def test_a_special_token_among_until_ends_a_generation(params):
    """Decoded text leaves special tokens out, so such a string is compared as a token."""
    tokenizer = byte_tokenizer()
    said = greedy_ids(params, TALE, 8)
    target = tokenizer.convert_ids_to_tokens(said[4])
    tokenizer.add_special_tokens({"additional_special_tokens": [target]})
    model = JshadowLM(dataclasses.replace(params, tokenizer=tokenizer), policy="full", capacity=256)
    ids = params.tokenizer.encode(TALE)
    model.tok_encode = lambda *_, **__: ids  # the text may hold that byte itself
    got = model.generate_until(requests((TALE, {"max_gen_toks": 8, "until": [target]})), disable_tqdm=True)
    assert got == [params.tokenizer.decode(said[: said.index(said[4])])]


def test_sampling_does_not_depend_on_the_batch(params):
    settings = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.5, "top_p": 0.95}
    asked = requests(*[(text, settings) for text in (TALE, "Rain", TALE, "Snow")])
    alone = JshadowLM(params, policy="full", capacity=256, seed=3).generate_until(asked, disable_tqdm=True)
    together = JshadowLM(params, policy="full", capacity=256, seed=3, batch_size=4)
    assert together.generate_until(asked, disable_tqdm=True) == alone
    assert alone[0] != alone[2]  # a repeated request draws anew
    other = JshadowLM(params, policy="full", capacity=256, seed=4, batch_size=4)
    assert other.generate_until(asked, disable_tqdm=True) != alone


def test_generation_settings():
    assert parse_generation({}, 256) == (Sampler(), 256, ())
    assert parse_generation({"do_sample": False, "temperature": 1, "until": "\n"}, 256) == (Sampler(), 256, ("\n",))
    assert parse_generation({"do_sample": True, "max_tokens": "7"}, 256) == (Sampler(1.0), 7, ())
    assert parse_generation({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "num_beams": 1}, 9) == (
        Sampler(0.7, top_k=5, top_p=0.9),
        9,
        (),
    )
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


def test_what_is_too_long_is_an_error_or_cut_in_the_middle(params, caplog):
    strict = JshadowLM(params, policy="full", capacity=64)
    with pytest.raises(CapacityError, match=r"at most 64 tokens .* got a context of 80 and 2 more"):
        strict.loglikelihood(requests(("a", "b"), (TALE[:80], "xyz")), disable_tqdm=True)
    with pytest.raises(CapacityError, match="a context of 60 and 5 more"):
        strict.generate_until(requests((TALE[:60], {"max_gen_toks": 5})), disable_tqdm=True)
    strict.loglikelihood(requests((TALE[:62], "xyz")), disable_tqdm=True)  # the last token is scored, not fed
    cutting = JshadowLM(params, policy="full", capacity=64, truncation="middle")
    with caplog.at_level(logging.WARNING):
        got = cutting.loglikelihood(requests(("a", "b"), (TALE[:80], "xyz")), disable_tqdm=True)
    assert "1 of 2 requests were too long for max_length=64: 18 tokens were cut" in caplog.text
    ids = params.tokenizer.encode(TALE[:80])
    wanted = plainly(params, ids[:31] + ids[-31:], params.tokenizer.encode("xyz"))
    assert got[1] == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    with pytest.raises(CapacityError, match="got a context of 1 and 99 more"):
        cutting.loglikelihood(requests(("a", TALE[:100])), disable_tqdm=True)


def test_bad_settings_are_typed_errors(params):
    for settings, name in (
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
    ):
        with pytest.raises(ConfigError, match=name):
            JshadowLM(params, **settings)
    with pytest.raises(CapacityError, match="context=256"):
        JshadowLM(params, capacity=257)
    with pytest.raises(ConfigError, match="tokenizer"):
        JshadowLM(dataclasses.replace(params, tokenizer=None))
    with pytest.raises(PromptError, match="continuation of request 1"):
        JshadowLM(params).loglikelihood(requests(("a", "b"), ("a", "")))


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


def test_the_evaluation_imports_without_the_harness():
    code = "import sys; sys.modules['lm_eval'] = None; import jshadow.evaluation.runner, jshadow.cli"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def write_tasks(folder: Any) -> dict[str, Any]:
    """Three tasks of a kind each, from files: nothing is downloaded."""
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_full_attention_scores_as_the_hf_backend(smollm2_dir, tiny_tasks):
    """SmolLM2 in float32, torch beside it: scores, greedy flags, windows and generations of the same requests."""
    from lm_eval.models.huggingface import HFLM

    mine = JshadowLM(smollm2_dir, policy="full", dtype="float32", capacity=64, batch_size=2)
    theirs = HFLM(pretrained=str(smollm2_dir), device="cpu", dtype="float32", batch_size=1, max_length=64)
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
def test_the_command_line(params, tmp_path):
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
