"""The adapter of lm-evaluation-harness: log-likelihoods against full logits and single steps, and generations."""

import dataclasses
import logging

import numpy as np
import pytest
from lm_eval_requests import (
    END,
    POLICIES,
    SHADOWKV,
    TALE,
    greedy_ids,
    log_softmax,
    plainly,
    requests,
    step_by_step,
    tiny_model,
)
from tiny_text import byte_tokenizer

from jshadow import Full, generate, save_fitted
from jshadow.engine import decode
from jshadow.engine.sampling import Sampler
from jshadow.errors import CapacityError, ConfigError, PromptError
from jshadow.evaluation import likelihood, likelihood_steps
from jshadow.evaluation.lm_eval import JshadowLM
from jshadow.evaluation.lm_eval_settings import parse_generation
from jshadow.policies import Loki


@pytest.fixture(scope="module")
def params():
    return tiny_model()


PAIRS = [
    (TALE, " yes"),
    (TALE, " n"),
    ("Rain", "y days"),
    (TALE, " perhaps not at all, said the crow"),
    ("", "Once upon"),
    ("Rain", " coat"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("full", 1), ("shadowkv", 3), ("streaming_llm", 2)])
def test_loglikelihoods_are_those_of_single_steps(params, name, batch):
    model = JshadowLM(params, policy=POLICIES[name], capacity=256, batch_size=batch)
    got = model.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(PAIRS, got, strict=True):
        ids = params.tokenizer.encode(context) or [END]
        more = params.tokenizer.encode(continuation)
        if context.endswith(" "):  # lm-eval moves the space at the end of a context to the continuation
            ids, more = ids[:-1], [ids[-1], *more]
        wanted, top = step_by_step(params, POLICIES[name], ids, more)
        assert score == pytest.approx(wanted, abs=1e-4)
        assert greedy is top
        if name == "full":
            plain, its = plainly(params, ids, more)
            assert (wanted, top) == (pytest.approx(plain, abs=1e-4), its)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["streaming_llm", "shadowkv"])
def test_policies_score_differently_and_greedy_ones_are_told(params, other):
    """A policy that drops tokens gives different scores, so the tests above do not compare constants."""
    ids, continuation = params.tokenizer.encode(TALE), greedy_ids(TALE)[:4]
    asked = [(None, ids, continuation), (None, ids, [*continuation[:-1], (continuation[-1] + 1) % 256])]
    scores = {}
    for name in ("full", other):
        model = JshadowLM(params, policy=POLICIES[name], capacity=256, batch_size=4)
        (scores[name], greedy), (_, wrong) = model._loglikelihood_tokens(asked, disable_tqdm=True)
        assert greedy or name != "full"
        assert not wrong or name != "full"
    assert scores["full"] != pytest.approx(scores[other], abs=1e-3)


@pytest.mark.slow
def test_offloaded_scores_are_the_resident_ones(params):
    asked = requests((TALE + "one", " two three"), ("Short", "er"))
    resident, offloaded = (
        JshadowLM(params, policy=SHADOWKV, capacity=256, batch_size=3, fetch=fetch).loglikelihood(asked, True)
        for fetch in ("resident", "device_put")
    )
    assert [score for score, _ in offloaded] == pytest.approx([score for score, _ in resident], abs=1e-4)
    assert [greedy for _, greedy in offloaded] == [greedy for _, greedy in resident]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("context_tokens", [1, 20])
def test_rolling_loglikelihoods_score_each_token_once(params, context_tokens):
    size, text = 48, TALE + "And so on."
    model = JshadowLM(params, policy="full", capacity=size, rolling_context=context_tokens, batch_size=4)
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


@pytest.mark.slow
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
    assert seen == [4]  # three contexts, padded to a power of two


@pytest.mark.slow
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


# Generations


@pytest.mark.slow
def test_generations_are_those_of_generate(params):
    model = JshadowLM(params, policy=SHADOWKV, capacity=256, batch_size=3)
    contexts = [TALE, "Rain", TALE[1:]]
    wanted = [generate(params, one, SHADOWKV, max_new_tokens=12, capacity=256) for one in contexts]
    assert not any(one.report.fallback for one in wanted)
    got = model.generate_until(requests(*[(one, {"max_gen_toks": 12}) for one in contexts]), disable_tqdm=True)
    assert got == [one.text for one in wanted]


def test_until_strings_end_a_generation_and_are_cut_off(params):
    model = JshadowLM(params, policy="full", capacity=256, batch_size=4)
    said = greedy_ids(TALE)
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
    """Decoded text has no special tokens, so such a stop string is compared as a token."""
    tokenizer = byte_tokenizer()
    said = greedy_ids(TALE)[:8]
    target = tokenizer.convert_ids_to_tokens(said[4])
    tokenizer.add_special_tokens({"additional_special_tokens": [target]})
    model = JshadowLM(dataclasses.replace(params, tokenizer=tokenizer), policy="full", capacity=256)
    ids = params.tokenizer.encode(TALE)
    model.tok_encode = lambda *_, **__: ids  # the text itself may contain that byte
    got = model.generate_until(requests((TALE, {"max_gen_toks": 8, "until": [target]})), disable_tqdm=True)
    assert got == [params.tokenizer.decode(said[: said.index(said[4])])]


@pytest.mark.slow
def test_sampling_does_not_depend_on_the_batch(params):
    settings = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.5, "top_p": 0.95}
    asked = requests(*[(text, settings) for text in (TALE, TALE[1:], TALE, TALE[2:])])
    alone = JshadowLM(params, policy="full", capacity=256, seed=3).generate_until(asked, disable_tqdm=True)
    together = JshadowLM(params, policy="full", capacity=256, seed=3, batch_size=4)
    assert together.generate_until(asked, disable_tqdm=True) == alone
    assert alone[0] != alone[2]  # equal requests draw different numbers
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
