"""Generations of the adapter of lm-evaluation-harness, and its generation settings."""

import dataclasses

import pytest
from lm_eval_requests import (
    END,
    SHADOWKV,
    TALE,
    greedy_ids,
    requests,
    tiny_model,
)
from tiny_text import byte_tokenizer

from jshadow import generate
from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError
from jshadow.evaluation.lm_eval import JshadowLM
from jshadow.evaluation.lm_eval_settings import parse_generation


@pytest.fixture(scope="module")
def params():
    return tiny_model()


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
    """Decoded text has no special tokens, so such a stop string is compared as a token."""
    tokenizer = byte_tokenizer()
    said = greedy_ids(params, TALE, 8)
    target = tokenizer.convert_ids_to_tokens(said[4])
    tokenizer.add_special_tokens({"additional_special_tokens": [target]})
    model = JshadowLM(dataclasses.replace(params, tokenizer=tokenizer), policy="full", capacity=256)
    ids = params.tokenizer.encode(TALE)
    model.tok_encode = lambda *_, **__: ids  # the text itself may contain that byte
    got = model.generate_until(requests((TALE, {"max_gen_toks": 8, "until": [target]})), disable_tqdm=True)
    assert got == [params.tokenizer.decode(said[: said.index(said[4])])]


def test_sampling_does_not_depend_on_the_batch(params):
    settings = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.5, "top_p": 0.95}
    asked = requests(*[(text, settings) for text in (TALE, "Rain", TALE, "Snow")])
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
